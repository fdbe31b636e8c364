"""The farm's window: how much all jobs together may have on the server, and what of it is used.

Producers that looked only at their own jobs' windows would fill the server together. The used bytes
are the sum over all jobs, which is counted anew by whoever asks for room when the last count is
old: one process at a time, so that counting costs the same however many ask. Between two counts
room is taken from what the last one found, by a script. Nobody holds anything that could be lost
with a process: what a dead producer took without pushing it is free again at the next count but
one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import redis

from embedfarm.contract import wire
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import ROOMY, VECTOR_BYTES_GUESSED, FarmRoom, used_bytes
from embedfarm.contract.status import JobGone, JobStatus, status_from
from embedfarm.contract.unreadable_records import names_of

COUNT_MS: Final = 250
TURN_MS: Final = 2000  # for one count, after which somebody else begins one
KEPT_MS: Final = 5000  # for which a count is kept while nobody asks
SHORT_MS: Final = 2000  # for which the farm is short of room after it refused somebody
ASKS_MAX: Final = 3  # until a count is there, if others begin one as well
_SHARE: Final = "share:"  # followed by a tenant
_FIELDS: Final = ("state", "tenant", "bytes_in", "bytes_done", "chunks_in", "chunks_done",
                  "known_in", "known_done",
                  "result_bytes", "vector_bytes", "receipt_bytes")  # fmt: skip


class Count(NamedTuple):
    """Bytes that all jobs have on the server, and the number of such jobs of each tenant."""

    window_bytes: int
    used_bytes: int
    result_bytes: int
    jobs: Mapping[str, int]

    def shares(self) -> dict[str, int]:
        """Return the fair share of a job of each tenant: equal for tenants and for their jobs."""
        each = self.window_bytes // max(1, len(self.jobs))
        return {tenant: each // count for tenant, count in self.jobs.items()}


@dataclass
class FarmWindow:
    """The farm's window, in which one process asks for room."""

    client: redis.Redis
    settings: Settings

    def reserve(self, status: JobStatus, vector_bytes: int, costs: Sequence[int]) -> int:
        """Take room for blocks that are pushed next: for as many, in order, as there is room for.

        A job of which all that was pushed is collected may push one block in any case, so that
        every job goes on, however much others hold.

        Args:
            status: Status of the job.
            vector_bytes: Bytes of one of its vectors.
            costs: Bytes of each block, with its vectors.

        Returns:
            How many of the blocks have room.
        """
        idle = status.drained_upto >= status.pushed_upto
        return self._ask(status.tenant, used_bytes(status, vector_bytes), costs, idle=idle)

    def look(self) -> FarmRoom:
        """Return the usage of the window; count it first if the last count is old."""
        self._ask("", 0, ())
        return self.seen()

    def seen(self) -> FarmRoom:
        """Return the usage that the last count found; zero if there was no count lately."""
        pipe = self.client.pipeline(transaction=False)
        ask_room(pipe)
        return room_from(*pipe.execute())

    def _ask(self, tenant: str, held: int, costs: Sequence[int], *, idle: bool = False) -> int:
        for _ in range(ASKS_MAX):
            granted, turn = self._script("reserve")(
                keys=[wire.WINDOW],
                args=[tenant, held, int(idle), COUNT_MS, TURN_MS, KEPT_MS, *costs],
            )
            if not turn:
                return int(granted)
            self._note(turn, self._count())
        return 0

    def _script(self, name: str) -> Any:  # noqa: ANN401 # what its answer is, the script says
        return self.client.register_script(wire.script(name))

    def _note(self, turn: int, count: Count) -> None:
        shares = count.shares()
        newcomer = count.window_bytes // (len(shares) + 1)
        self._script("count")(
            keys=[wire.WINDOW],
            args=[
                turn, count.window_bytes, count.used_bytes, count.result_bytes, KEPT_MS, newcomer,
                *(word for pair in shares.items() for word in pair),
            ],
        )  # fmt: skip

    def _count(self) -> Count:
        """Add up all jobs, in two round trips."""
        pipe = self.client.pipeline(transaction=False)
        for job in names_of(cast("list[bytes]", self.client.zrange(wire.JOBS, 0, -1))):
            pipe.hmget(wire.JobKeys(job).meta, _FIELDS)
        pipe.info("memory")
        *rows, memory = pipe.execute(raise_on_error=False)
        statuses = list(_readable(rows))
        held = [used_bytes(each, _vector_bytes(each)) for each in statuses]
        wanting = (
            each.tenant
            for each, size in zip(statuses, held, strict=True)
            if size and each.state != "cancelled"
        )
        results = sum(each.result_bytes for each in statuses)
        return Count(self._window_bytes(memory), sum(held), results, Counter(wanting))

    def _window_bytes(self, memory: Mapping[str, int] | Exception) -> int:
        """Return the setting, else half of the server's memory; it holds other things as well."""
        most = 0 if isinstance(memory, Exception) else memory.get("maxmemory", 0)
        return self.settings.farm_window_bytes_max or (most or self.settings.redis_bytes_max) // 2


def ask_room(pipe: Any) -> None:  # noqa: ANN401 # a pipeline of the client
    """Add to a pipeline the commands whose answers `room_from` reads."""
    pipe.time()
    pipe.hgetall(wire.WINDOW)


def room_from(time: tuple[int, int], fields: Mapping[bytes, bytes]) -> FarmRoom:
    """Return the usage of the window, from the server's time and what was counted."""
    if b"max" not in fields:
        return ROOMY
    known = {name.decode(errors="replace"): _number(value) for name, value in fields.items()}
    seconds, microseconds = time
    refused_ms = seconds * 1000 + microseconds // 1000 - known.get("refused", 0)
    shares = {
        name.removeprefix(_SHARE): value for name, value in known.items() if name.startswith(_SHARE)
    }
    return FarmRoom(
        bytes_max=known["max"],
        used_bytes=known.get("used", 0),
        result_bytes=known.get("results", 0),
        refusing=refused_ms < SHORT_MS,
        share=known.get("share", 0),
        shares=shares,
    )


def _readable(rows: Iterable[Any]) -> Iterable[JobStatus]:
    """Yield the status of each unfinished job; one that no program of ours wrote is left out."""
    for row in rows:
        if isinstance(row, redis.ResponseError):
            continue
        try:
            status = status_from(_FIELDS, row)
        except JobGone:
            continue
        if not status.ended:
            yield status


def _vector_bytes(status: JobStatus) -> int:
    """Return the bytes of one vector that is still to come; a cancelled job's take none."""
    if status.state == "cancelled":
        return 0
    return status.held_vector_bytes or VECTOR_BYTES_GUESSED


def _number(value: bytes) -> int:
    """Return a figure that a script wrote, 0 for anything else."""
    return int(value) if value.removeprefix(b"-").isdigit() else 0
