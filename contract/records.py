"""The records that cross a process boundary; `embedfarm.contract.encoding` has their bytes."""

import zlib
from collections.abc import Sequence
from itertools import chain, pairwise, repeat
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.encoding import (
    Amount,
    Count,
    EntryId,
    Fact,
    Record,
    Some,
    Speed,
)
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_states import ModelState
from embedfarm.contract.source_places import UNPLACED, Places, SourceReference


class Rows(NamedTuple):
    """Consecutive chunks as columns, since a record per chunk would cost more than the chunk.

    Attributes:
        texts: The text of each chunk.
        ids: The caller's identifiers, one per chunk, or None.
        known: For each chunk a byte, which is 1 if its vector is known already and it needs none
            made; empty where none is known.
        places: Where they lie; of none where nobody has asked for that.
    """

    texts: list[str]
    ids: list[str] | None
    known: bytes = b""
    places: Places = UNPLACED

    def piece(self, first: int, end: int) -> "Rows":
        """Return rows `first` to `end - 1`, counted from 0."""
        ids = None if self.ids is None else self.ids[first:end]
        known = _if_any(self.known[first:end])
        return Rows(self.texts[first:end], ids, known, self.places.piece(first, end))


class TokenisationSettings(Record, forbid_unknown_fields=True):
    """Settings by which texts become token ids (`embedfarm.contract.token_ids`).

    Attributes:
        tokenizer: SHA-256 of tokenizer.json.
        prompt: Prompt put before every text.
        tokens_max: Tokens kept of a text, special tokens included.
    """

    tokenizer: str
    prompt: str
    tokens_max: Count


class TokenIds(Record):
    """Chunks as a model's token ids, end to end.

    Attributes:
        tokenisation: Settings by which the ids were made.
        ids: Ids of all chunks, little-endian, of `width` bytes each.
        width: Bytes of an id, 2 or 4.
        lengths: Tokens of each chunk, little-endian uint32.
        checksums: `text_checksums` of the texts that the ids were made of.
    """

    tokenisation: TokenisationSettings
    ids: bytes
    width: Count
    lengths: bytes
    checksums: bytes

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together, also in a record off the wire."""
        if self.width not in {2, 4} or len(self.lengths) % 4:
            raise ValueError("token ids of 2 or 4 bytes and lengths of 4 are needed")
        if len(self.ids) != self.width * self.ends()[-1]:
            raise ValueError("the lengths are not those of the token ids")
        if len(self.checksums) != len(self.lengths):
            raise ValueError("a checksum for each chunk is needed")

    def ends(self) -> NDArray[np.int64]:
        """Return where each chunk ends among the ids, after a zero where the first one begins."""
        lengths = np.frombuffer(self.lengths, dtype="<u4")
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def arrays(self) -> list[NDArray[np.int64]]:
        """Return the ids of each chunk."""
        ids = np.frombuffer(self.ids, dtype=f"<u{self.width}").astype(np.int64)
        return [ids[first:end] for first, end in pairwise(self.ends().tolist())]

    def piece(self, first: int, end: int) -> "TokenIds":
        """Return the token ids of chunks `first` to `end - 1`, counted from 0."""
        begins, ends = (self.width * int(self.ends()[chunk]) for chunk in (first, end))
        return TokenIds(
            tokenisation=self.tokenisation,
            ids=self.ids[begins:ends],
            width=self.width,
            lengths=self.lengths[4 * first : 4 * end],
            checksums=self.checksums[4 * first : 4 * end],
        )


class Block(Record):
    """Consecutive chunks in one stream entry, as texts, as token ids, or by reference.

    Of some chunks whoever collects knows the vector already: they have an index, and an id where
    the others have one, but no text, and nothing is embedded for them.

    Attributes:
        start: Index of the first chunk in the job.
        texts: A text for each chunk to embed; none when there are `tokens`.
        ids: The caller's identifiers, one per chunk, or None.
        token_count: Tokens of all texts after truncation, estimated while they are texts; the unit
            of every plan.
        tokens: Token ids of the chunks to embed, None when there are `texts`.
        known: For each chunk a byte, which is 1 if its vector is known; empty where none is.
        reference: Where the texts are, None if they are here; such a block has no ids.
    """

    # Who does not know `known` or `reference` would take the chunks for others.
    versions: ClassVar[int] = 3

    start: Count
    texts: list[str]
    ids: list[str] | None = None
    token_count: Count = 0
    tokens: TokenIds | None = None
    known: bytes = b""
    reference: SourceReference | None = None

    @property
    def version(self) -> int:
        """Version of the layout that this block needs."""
        if self.reference is not None:
            return 3
        return 2 if self.known else 1

    @property
    def to_embed(self) -> int:
        """Number of chunks that are to be embedded."""
        if self.reference is not None:
            return self.reference.rows - self.known.count(1)
        return len(self.texts) if self.tokens is None else len(self.tokens.lengths) // 4

    @property
    def count(self) -> int:
        """Number of chunks in the block."""
        return len(self.known) or self.to_embed

    def indices(self) -> Sequence[int]:
        """Return the indices in the job of the chunks to embed."""
        if not self.known:
            return range(self.start, self.end)
        return [self.start + place for place, known in enumerate(self.known) if not known]

    @property
    def end(self) -> int:
        """Index of the first chunk after the block."""
        return self.start + self.count

    def chunks(self) -> Sequence[str | NDArray[np.int64]]:
        """Return the chunks to embed, each a text or token ids."""
        return self.texts if self.tokens is None else self.tokens.arrays()

    def identities(self) -> Sequence[str | bytes]:
        """Return the text of each chunk to embed, or the bytes of its token ids, alike for both."""
        if self.tokens is None:
            return self.texts
        ends = (self.tokens.width * self.tokens.ends()).tolist()
        return [self.tokens.ids[first:end] for first, end in pairwise(ends)]

    def checksums(self) -> bytes:
        """Return `text_checksums` of the texts to embed, 4 bytes each."""
        return text_checksums(self.texts) if self.tokens is None else self.tokens.checksums

    def piece(self, first: int, end: int) -> "Block":
        """Return a block of this block's chunks `first` to `end - 1`, counted from 0.

        The token count is shared out evenly; the pieces of a block add up to the block's count.
        """
        before, upto = (self.token_count * chunk // self.count for chunk in (first, end))
        begin, stop = (at - self.known.count(1, 0, at) for at in (first, end))
        return Block(
            start=self.start + first,
            texts=self.texts[begin:stop],
            ids=None if self.ids is None else self.ids[first:end],
            token_count=upto - before,
            tokens=None if self.tokens is None else self.tokens.piece(begin, stop),
            known=_if_any(self.known[first:end]),
        )


class ChunkError(Record):
    """One chunk that was given up on.

    Attributes:
        index: Index of the chunk in the job.
        reason: Why the chunk failed, for people.
        attempts: How often the chunk was tried, by itself and among others.
    """

    index: Count
    reason: str
    attempts: Count = 1


class Receipt(Record):
    """Where on shared storage the vectors of one block are.

    Attributes:
        file: Name of the file in the place that the job's specification names.
        offset: Bytes of the file that come before them.
        bytes: Bytes that they take.
        checksum: CRC-32 of these bytes.
    """

    file: str
    offset: Count
    bytes: Count
    checksum: Count


class Result(Record):
    """The vectors of one block, keyed by its start index.

    Attributes:
        start: Index of the first chunk in the job.
        count: Chunks in the block; rows in `vectors`, with those of known chunks, that it lacks.
        dimensions: Components per vector, or bytes of a vector of sign bits.
        dtype: numpy name of the components, little-endian: `<f4`, `<f2`, `|i1` or `|u1`.
        vectors: `dimensions` components for each chunk that was to be embedded, row-major; the row
            of a failed chunk is zero.
        checksums: `text_checksums` of the texts that were embedded, 4 bytes each.
        ids: The caller's identifiers, one per chunk, or None.
        errors: The chunks that failed.
        token_count: Tokens of the texts, as the model counts; a text that repeats counts each time.
        worker: Name of the worker that embedded the block.
        seconds: The block's share of the time of the worker's device, or of all of its devices.
        known: For each chunk a byte, which is 1 if its vector was known; empty where none was.
        cost: What that time costs, by the price of the worker's settings.
        receipt: Where the vectors are, if they are stored; on the server `vectors` is empty then.
            None where they are here.
    """

    versions: ClassVar[int] = 2  # who does not know `receipt` would take the vectors for lost

    start: Count
    count: Count
    dimensions: Count
    dtype: str
    vectors: bytes
    checksums: bytes
    ids: list[str] | None = None
    errors: list[ChunkError] = msgspec.field(default_factory=list)
    token_count: Count = 0
    worker: str = ""
    seconds: Amount = 0.0
    known: bytes = b""
    cost: Amount = 0.0
    receipt: Receipt | None = None

    @property
    def version(self) -> int:
        """Version of the layout that this result needs."""
        return 1 if self.receipt is None else 2

    @property
    def is_elsewhere(self) -> bool:
        """Whether the vectors are where the receipt says, and not here."""
        return self.receipt is not None and not self.vectors

    @property
    def embedded(self) -> int:
        """Number of chunks that were to be embedded: rows in `vectors`."""
        return self.count - self.known.count(1)

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector."""
        return self.dimensions * np.dtype(self.dtype).itemsize

    def matrix(self) -> NDArray[Any]:
        """Return the vectors as an array of shape (embedded, dimensions), without a copy."""
        return np.frombuffer(self.vectors, dtype=self.dtype).reshape(self.embedded, self.dimensions)

    def rest(self, start: int) -> "Result":
        """Return the part of this result from chunk `start` on, with all of its tokens and time."""
        skip = start - self.start
        gone = skip - self.known.count(1, 0, skip)
        return Result(
            start=start,
            count=self.count - skip,
            dimensions=self.dimensions,
            dtype=self.dtype,
            vectors=self.matrix()[gone:].tobytes(),
            checksums=self.checksums[4 * gone :],
            ids=None if self.ids is None else self.ids[skip:],
            errors=[error for error in self.errors if error.index >= start],
            token_count=self.token_count,
            worker=self.worker,
            seconds=self.seconds,
            known=_if_any(self.known[skip:]),
            cost=self.cost,
        )


class Completion(Record):
    """A worker's account of one micro-batch; statistics only, losing some is harmless.

    Attributes:
        worker: Name of the worker.
        model: Key of the model, dtype and engine the rate belongs to.
        job: The job the blocks came from, the first of them if there are several.
        chunks: Chunks in the micro-batch.
        tokens: Tokens as the producer counted them, the unit of plans.
        padded_tokens: Tokens the device went through, padding included.
        real_tokens: Tokens the device went through, padding not included.
        seconds: Time that the micro-batch took, with the overhead that the pipeline could not hide.
        overhead_seconds: The part of `seconds` that is not the device's work.
        pairs: Sum of the squared lengths of its chunks, in the model's tokens.
        first: Whether it is the first one since the worker's process was started.
        jobs: Real tokens and chunks of each job, if there are several.
    """

    worker: str
    model: str
    job: str
    chunks: Count
    tokens: Count
    padded_tokens: Count
    real_tokens: Count
    seconds: Amount
    overhead_seconds: Amount
    pairs: Count = 0
    first: bool = False
    jobs: dict[str, tuple[Count, Count]] = msgspec.field(default_factory=dict)

    def by_job(self) -> dict[str, tuple[int, int]]:
        """Return real tokens and chunks of each job."""
        return self.jobs or {self.job: (self.real_tokens, self.chunks)}


class Heartbeat(Record):
    """State that a worker reports about itself, about once a second.

    Attributes:
        worker: Name of the worker, stable over restarts of the same device on the same host.
        incarnation: Id of this start of the worker; the newest one owns the name.
        host: Host name.
        pid: Process id on that host.
        device: Name of the device, such as "cpu-0" or "cuda-GPU-6f8e…".
        state: State of the worker: "loading", "idle", "busy" or "draining".
        model: Key of the loaded model that was used last, "" when none is loaded.
        job: The job of the current micro-batch, "" when idle.
        held_tokens: Tokens leased and not yet committed.
        held_seconds: Time since the current micro-batch began on the device.
        tokens_per_second: The worker's own recent rate, 0 when unknown.
        tokens_done: Real tokens since the start.
        chunks_done: Chunks since the start.
        load_seconds: Time that this model took to load.
        device_facts: Memory, temperature and the like, by metric name.
        where: Seconds since the start by activity ("fetch", "tokenise", "forward", "commit").
        lane: Work for interactive requests since the start: "rounds" (runs that several requests
            may share), "pieces" of requests, "texts", "tokens", and the device's "seconds".
        refused: Jobs that the worker could not embed a moment ago.
        model_bytes: Memory that its weights take, 0 when that is not known.
        trying_engines: Whether it tries engines before it loads the faster one, which it remembers.
        restarts: How many times its supervisor has started it again.
        loading: Key of the model that is being loaded, "" when none is.
        models: States of the models that it has loaded, or tried to load.
        yields_in_seconds: Time after which requests that come now get a model that is in the way of
            their own.
        device_cost_per_hour: Price of an hour of each of its devices, 0 if none is set.
        devices: Number of devices that work as this worker.
        kind: Kind of its device (`embedfarm.contract.device_kinds`); "" from an older version.
    """

    worker: str
    incarnation: str
    host: str
    pid: Count
    device: str
    state: str
    model: str = ""
    job: str = ""
    held_tokens: Count = 0
    held_seconds: Amount = 0.0
    tokens_per_second: Amount = 0.0
    tokens_done: Count = 0
    chunks_done: Count = 0
    load_seconds: Amount = 0.0
    device_facts: dict[str, Fact] = msgspec.field(default_factory=dict)
    where: dict[str, Fact] = msgspec.field(default_factory=dict)
    lane: dict[str, Fact] = msgspec.field(default_factory=dict)
    refused: list[str] = msgspec.field(default_factory=list)
    model_bytes: Count = 0
    trying_engines: bool = False
    restarts: Count = 0
    loading: str = ""
    models: list[ModelState] = msgspec.field(default_factory=list)
    yields_in_seconds: Amount = 0.0
    device_cost_per_hour: Amount = 0.0
    devices: Some = 1
    kind: str = ""


class JobShare(Record):
    """How much of one job a worker may lease at a time.

    Attributes:
        job: The job.
        tokens: Size of the next micro-batch in tokens.
        blocks: Size of the next micro-batch in stream entries, at least 1.
        copies: IDs of stream entries that other workers hold, and of which this worker should embed
            speculative copies at the job's tail.
        open: Whether the producer adds more blocks, which are worth waiting for.
        priority: Priority of the job; only jobs of the same one share a micro-batch.
        ahead: Whether nothing is to be leased for this share: the worker only loads the job's model
            before its turn, where there is room for it beside the models of the other shares.
    """

    job: str
    tokens: Count
    blocks: Some
    copies: list[EntryId] = msgspec.field(default_factory=list)
    open: bool = False
    priority: Count = 0
    ahead: bool = False


class Plan(Record):
    """Plan of the scheduler for one worker: which jobs, in which order, how much at a time."""

    worker: str
    fence: Count
    shares: list[JobShare]


class Policy(Record):
    """The scheduler's passes, by name and in order."""

    passes: list[str]


class Decision(Record):
    """Decision of the scheduler and its reasons, for people.

    Attributes:
        time: Unix time of the decision in seconds.
        seconds: Seconds from the look at the farm to the publication of the plans.
        passes: Names of the passes, in their order.
        notes: What each pass did, as pairs of its name and a text, which calls workers and jobs by
            their names and ids.
        workers: The worker that each note is about, "" for none in particular; unknown for notes
            beyond the end of this list.
        left_out: Number of notes that were too many to be kept, by pass.
    """

    time: Fact
    seconds: Fact
    passes: list[str]
    notes: list[tuple[str, str]]
    workers: list[str] = msgspec.field(default_factory=list)
    left_out: dict[str, Count] = msgspec.field(default_factory=dict)

    def about(self, worker: str) -> "Decision":
        """Return the decision with the notes about a worker or none in particular; "" for all."""
        rows = zip(self.notes, chain(self.workers, repeat("")), strict=False)
        kept = [row for row in rows if not worker or row[1] in {"", worker}]
        return msgspec.structs.replace(
            self, notes=[note for note, _ in kept], workers=[about for _, about in kept]
        )


class SchedulerStats(Record):
    """Figures of the active scheduler; "recent" is the last minute.

    Attributes:
        passes: Names of the active passes, in their order.
        dropped: Errors of passes that raised one and are left out since, by pass.
        decisions: Number of decisions since the scheduler became active.
        decision_seconds_mean: Mean time of recent decisions, from the look at the farm to the
            publication of the plans.
        decision_seconds_p99: 99th percentile of the same times.
        micro_batches: Number of micro-batches since the scheduler became active.
        tokens: Tokens of the micro-batches since the scheduler became active.
        micro_batch_seconds_mean: Mean time of recent micro-batches.
        micro_batch_seconds_p99: 99th percentile of the time of recent micro-batches.
        tokens_per_second: Recent tokens per second of all workers.
        prediction_error: Median of |took / predicted - 1| of recent micro-batches.
        padding: Recent padded tokens over real ones, less 1.
        efficiency: Recent tokens as a share of those that all workers, by their rates, could have
            done of these jobs while there was work.
        late: Seconds by which jobs miss their deadlines as things are, by job.
    """

    passes: list[str]
    dropped: dict[str, str]
    decisions: Count
    decision_seconds_mean: Fact
    decision_seconds_p99: Fact
    micro_batches: Count
    tokens: Count
    micro_batch_seconds_mean: Fact
    micro_batch_seconds_p99: Fact
    tokens_per_second: Fact
    prediction_error: Fact
    padding: Fact
    efficiency: Fact
    late: dict[str, Fact] = msgspec.field(default_factory=dict)


class Sample(Record):
    """Sample of what the farm did in some seconds, for curves.

    Attributes:
        seconds: Length of the time that it covers, which ends at the time in its entry's ID.
        workers: Real tokens and chunks done, by worker; workers that did none are left out.
        jobs: Real tokens and chunks done, by job; jobs that got none are left out.
        backlog_tokens: Tokens that were sent and are not done, of all jobs.
        workers_alive: Number of live workers.
        job_workers: Real tokens done, by job and then by worker.
        started: Workers of which a new process did its first micro-batch.
    """

    seconds: Amount
    workers: dict[str, tuple[Count, Count]]
    jobs: dict[str, tuple[Count, Count]]
    backlog_tokens: Count
    workers_alive: Count
    job_workers: dict[str, dict[str, Count]] = msgspec.field(default_factory=dict)
    started: list[str] = msgspec.field(default_factory=list)


class Rate(Record):
    """Throughput history of one worker, model and length class.

    Attributes:
        tokens_per_second: Exponential average, in the tokens of plans.
        overhead_seconds: Exponential average of the fixed time per micro-batch.
        updated: Unix time of the last completion that was taken in.
        samples: Number of completions that were taken in.
        kind: Kind of the worker's device, which is known after the worker is gone; "" if it is not.
        cost_per_hour: Price of an hour of the worker, 0 if none was set.
    """

    tokens_per_second: Speed
    overhead_seconds: Amount
    updated: Amount
    samples: Count
    kind: str = ""
    cost_per_hour: Amount = 0.0


class LanePiece(Record):
    """Piece of an interactive request: one device may take this piece, another the next.

    Attributes:
        id: Id of the request, which names the key of the answers.
        spec: Specification as of a job; its fields about storing vectors are ignored.
        place: Index in the request of the piece's first text.
        texts: Texts of the piece, at least one.
        timeout_seconds: Time after the piece's arrival on the server for which the caller waits.
    """

    id: str
    spec: JobSpec
    place: Count
    texts: list[str]
    timeout_seconds: Amount


class LaneAnswer(Record):
    """Answer to a piece, and then to the whole request: vectors, or why there are none.

    Attributes:
        place: Index in the request of the first text.
        dimensions: Components of a vector.
        vectors: Little-endian float32, a row for each text; the row of a failed text is zero.
        errors: The texts that failed, by their index among the texts of this answer.
        reason: Why the whole request failed, "" where it did not.
        late: Whether it failed because a worker came to it after its time.
        worker: Name of the worker, or of several with commas between them.
        token_count: Tokens of the texts, as the model counts and cuts them.
        seconds: The piece's share of the time from when a worker took it, with what else was
            waiting, until the answers; for a request the sum over its pieces.
        waited_seconds: Time from the piece's arrival on the server until a worker took it; for a
            request the least of its pieces.
        fingerprint: Fingerprint of the model by component, as for a job.
        unserved: Whether the reason is that no worker has such a model, whatever the texts are.
    """

    place: Count = 0
    dimensions: Count = 0
    vectors: bytes = b""
    errors: list[ChunkError] = msgspec.field(default_factory=list)
    reason: str = ""
    late: bool = False
    worker: str = ""
    token_count: Count = 0
    seconds: Fact = 0.0
    waited_seconds: Fact = 0.0
    fingerprint: dict[str, str] = msgspec.field(default_factory=dict)
    unserved: bool = False

    def matrix(self) -> NDArray[np.float32]:
        """Return the vectors as an array of shape (texts, dimensions), without a copy."""
        return np.frombuffer(self.vectors, dtype="<f4").reshape(-1, self.dimensions)


def _if_any(known: bytes) -> bytes:
    """Return a mask of chunks whose vectors are known, which is empty where none is."""
    return known if 1 in known else b""


def text_checksums(texts: Sequence[str]) -> bytes:
    """Return the CRC-32 of each text's UTF-8 as little-endian uint32: ties vectors to texts."""
    checksums = map(zlib.crc32, map(str.encode, texts))
    return np.fromiter(checksums, dtype="<u4", count=len(texts)).tobytes()
