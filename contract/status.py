"""Status of a job: its state, and what the server has counted of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from embedfarm.contract.encoding import COUNT_MAX
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.formatting import describe_reuse
from embedfarm.contract.scheduling_terms import LIMITS, USUAL, Terms
from embedfarm.contract.spending import Estimate, Spent, spent_from

TEXT_FIELDS: Final = frozenset(
    {"state", "tenant", "out", "reason", "submitted_by", "labels", "corpus", "braked"}
)  # of a status; the others are numbers, and of these some have fractions
FRACTIONS: Final = frozenset({*LIMITS, *Estimate._fields})

ENDED_STATES: Final = frozenset({"finished", "failed"})
MOVING_STATES: Final = frozenset({"open", "closed"})
RUNNING: Final = "running"
OVER_STATES: Final = ENDED_STATES | {"cancelled"}

EndState: TypeAlias = Literal["finished", "failed", "cancelled"]
Cause: TypeAlias = Literal["", "chunks", "corpus", "device", "ingest", "job id", "model", "output"]
"""What the end of a job is about, as metrics count it: "chunks" that failed, say."""


class JobGone(EmbedfarmError, LookupError):
    """Raised when a job was deleted, or never was."""

    exit_status = 2


class JobUnreadable(JobGone):
    """Raised when the key of a job holds data that no program of the farm wrote."""


def is_gone(error: Exception) -> bool:
    """Tell whether an error says that the job was deleted in the meantime.

    redis-py puts words of its own before an error that comes out of a pipeline.
    """
    message = str(error)
    return isinstance(error, JobGone) or "NOGROUP" in message or "no such key" in message


@dataclass(frozen=True)
class JobStatus:
    """A job's state and counters, as the server has them.

    `state` is "open" while the producer adds chunks, then "closed" (all chunks are in), unless
    somebody makes it "paused" or "cancelled"; at last it is "finished" or "failed". One that was
    cancelled has ended once what was embedded is collected, and `ended_ms` is set. It was begun at
    `first_chunk` (an earlier run did those before), has got the chunks below `pushed_upto`, and has
    those below `drained_upto` on disk; below `refilled_upto` some were lost and sent again. Of the
    corpus `rows_skipped` became no chunk, and chunks are counted without them. `chunks_reused` of
    those collected have the vector of another output, or of an earlier chunk; `known_in` and
    `known_done` count such chunks among `chunks_in` and `chunks_done`. Once it is finished,
    `ids_repeated` counts the chunks whose id an earlier chunk has.
    `chunk_count` is N, -1 while it is not known; meanwhile `chunks_expected` estimates it from how
    much of the corpus was read, 0 where nobody can tell. Bytes are of encoded blocks and results,
    but `vector_bytes` is of one vector, and `receipt_bytes` is what the server holds of one that is
    stored past it, 0 where it holds all. Times are the server's, but `created_ms` is the
    producer's. `device_us` is the time of devices, in microseconds, that the committed results
    took, and `cost_micros` what that cost, in millionths; earlier makings of the job do not count.
    `priority`, `tenant`, `weight`, `deadline_ms`, `labels`, `max_hours` and `max_cost` are the
    job's `Terms`; `braked` says which of the last two it has reached, if it has paused itself.
    Fields that begin with `estimated_` are what the job was estimated to take before it ran.
    `out` is the directory that it fills, on its collector's host, `reason` says why it failed, what
    it waits for, or what failed after its end, and `submitted_by` is who made it: an account at a
    host, or a key of HTTP.
    `corpus` names its sources, if others can be made of the same ones: not an upload, and not
    standard input.
    """

    state: str = ""
    created_ms: int = 0
    first_chunk: int = 0
    pushed_upto: int = 0
    chunk_count: int = -1
    chunks_expected: int = 0
    blocks_in: int = 0
    chunks_in: int = 0
    known_in: int = 0
    tokens_in: int = 0
    bytes_in: int = 0
    blocks_done: int = 0
    chunks_done: int = 0
    known_done: int = 0
    chunks_failed: int = 0
    rows_skipped: int = 0
    chunks_reused: int = 0
    ids_repeated: int = 0
    tokens_done: int = 0
    bytes_done: int = 0
    real_tokens_done: int = 0
    result_bytes: int = 0
    vector_bytes: int = 0
    receipt_bytes: int = 0
    drained_upto: int = 0
    refilled_upto: int = 0
    first_read_ms: int = 0
    last_commit_ms: int = 0
    resumed_ms: int = 0
    ended_ms: int = 0
    device_us: int = 0
    cost_micros: int = 0
    priority: int = USUAL.priority
    tenant: str = USUAL.tenant
    weight: int = USUAL.weight
    deadline_ms: int = USUAL.deadline_ms
    labels: str = USUAL.labels
    max_hours: float = USUAL.max_hours
    max_cost: float = USUAL.max_cost
    braked: str = ""
    estimated_seconds_least: float = 0.0
    estimated_seconds_most: float = 0.0
    estimated_device_hours: float = 0.0
    estimated_cost: float = 0.0
    out: str = ""
    reason: str = ""
    submitted_by: str = ""
    corpus: str = ""

    @property
    def terms(self) -> Terms:
        """The job's terms."""
        return Terms(**{name: getattr(self, name) for name in Terms.__dataclass_fields__})

    @property
    def ended(self) -> bool:
        """Whether the job has ended, so that only a record of it is left."""
        return self.state in ENDED_STATES or (self.cancelled and self.ended_ms > 0)

    def has_label(self, label: str) -> bool:
        """Tell whether the job has a label."""
        return label in self.labels.split(",")

    @property
    def shown_state(self) -> str:
        """The word that people are shown for the state: "running" for "open" and "closed"."""
        return RUNNING if self.state in MOVING_STATES else self.state

    @property
    def done(self) -> int:
        """Chunks that are embedded or have failed, those of earlier runs included."""
        return self.first_chunk + self.chunks_done

    @property
    def known(self) -> int:
        """Chunks that there are, those of earlier runs included: all that have come so far."""
        return self.chunk_count if self.chunk_count >= 0 else self.first_chunk + self.chunks_in

    @property
    def reuse(self) -> str:
        """What people are told of chunks that were not embedded since their vectors were there."""
        return describe_reuse(self.chunks_reused, self.chunks_embedded, self.embed_seconds)

    @property
    def spent(self) -> Spent:
        """Device-hours that the job has taken, and their cost."""
        return spent_from(self.device_us, self.cost_micros)

    @property
    def estimate(self) -> Estimate:
        """What the job was estimated to take before it ran."""
        return Estimate(*(getattr(self, name) for name in Estimate._fields))

    @property
    def limited(self) -> bool:
        """Whether the job has taken all that its `max_hours` or `max_cost` let it take."""
        spent = self.spent
        return 0 < self.max_hours <= spent.device_hours or 0 < self.max_cost <= spent.cost

    @property
    def embed_seconds(self) -> float:
        """Seconds from the first block read to the last commit."""
        return max(0, self.last_commit_ms - self.first_read_ms) / 1000

    @property
    def chunks_embedded(self) -> int:
        """Chunks that workers have embedded, or that have failed, without those of earlier runs."""
        return max(0, self.chunks_done - self.known_done)

    @property
    def chunks_to_embed(self) -> int:
        """Chunks that were sent, and that workers have still to embed."""
        return max(0, self.chunks_in - self.known_in - self.chunks_embedded)

    @property
    def moving(self) -> bool:
        """Whether the job is worked on: it is neither paused nor over."""
        return self.state in MOVING_STATES

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled the job; what was embedded may still be collected."""
        return self.state == "cancelled"

    @property
    def over(self) -> bool:
        """Whether nothing more is embedded of the job: it has ended, or was cancelled."""
        return self.state in OVER_STATES

    @property
    def tokens_left(self) -> int:
        """Tokens that were sent and are not embedded."""
        return max(0, self.tokens_in - self.tokens_done)

    @property
    def tokens_unsent(self) -> float:
        """Tokens that are expected to be sent still, 0 where nobody can tell.

        A job that has nothing on the server to embed waits for a producer, which may be gone: of it
        nothing is expected.
        """
        if self.chunk_count >= 0 or not self.chunks_in or self.blocks_done >= self.blocks_in:
            return 0.0
        unsent = max(0, self.chunks_expected - self.first_chunk - self.chunks_in)
        return unsent * self.tokens_in / self.chunks_in

    @property
    def held_vector_bytes(self) -> int:
        """Bytes that the server holds of a vector that is embedded, 0 while nobody knows."""
        return self.receipt_bytes or self.vector_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of vectors past the server once all that was pushed is embedded; 0 for none."""
        chunks = max(0, self.pushed_upto - self.drained_upto) if self.receipt_bytes else 0
        return chunks * self.vector_bytes

    @property
    def embedded(self) -> bool:
        """Whether all chunks are in, and every block has its result."""
        return self.chunk_count >= 0 and self.blocks_done >= self.blocks_in

    @property
    def removable(self) -> bool:
        """Whether the job may be removed: it was cancelled, has ended, or is all on disk."""
        return self.over or 0 <= self.chunk_count <= self.drained_upto

    @property
    def begun_at(self) -> float:
        """Unix time at which a worker began it, or at which it was last resumed; 0 before."""
        return max(self.first_read_ms, self.resumed_ms) / 1000

    @property
    def block_tokens_mean(self) -> float:
        """Tokens of an average block that is not done."""
        blocks = self.blocks_in - self.blocks_done
        return max(1.0, (self.tokens_in - self.tokens_done) / blocks) if blocks > 0 else 1.0

    @property
    def block_bytes_mean(self) -> float:
        """Bytes of an average block."""
        return self.bytes_in / self.blocks_in if self.blocks_in else 1.0

    @property
    def chunk_tokens_mean(self) -> float:
        """Tokens of an average chunk that is to be embedded."""
        chunks = self.chunks_in - self.known_in
        return self.tokens_in / chunks if chunks > 0 else 1.0


def status_from(fields: Sequence[str], values: Sequence[bytes | None]) -> JobStatus:
    """Make a status out of hash fields.

    Raises:
        JobGone: The hash has no state.
        JobUnreadable: The hash has values that no program of ours wrote.
    """
    known = {name: value for name, value in zip(fields, values, strict=True) if value is not None}
    if "state" not in known:
        raise JobGone("the job is not on the server")
    try:
        converted: dict[str, Any] = {
            name: value.decode(errors="replace") if name in TEXT_FIELDS else _number(name, value)
            for name, value in known.items()
        }
        converted["weight"] = max(1, converted.get("weight", USUAL.weight))  # it divides
    except ValueError as error:
        raise JobUnreadable(f"the job cannot be read: {error}") from error
    if converted["state"] == "paused" and converted.get("braked"):
        limit = converted.get(converted["braked"], 0)
        why = f"has taken as much as it may: {converted['braked']} {limit:g}"
        converted["reason"] = converted.get("reason") or why
    return JobStatus(**converted)


def _number(name: str, value: bytes) -> int | float:
    """Return a counter or a limit; refuse a counter that a float could not hold exactly."""
    number = float(value) if name in FRACTIONS else int(value)
    if not abs(number) <= COUNT_MAX:
        raise ValueError(f"{name} is beyond all counting")
    return number
