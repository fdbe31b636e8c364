"""Checks of what must hold at every step of a run, as the server sees it."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from embedfarm.contract import wire
from embedfarm.contract.encoding import decode
from embedfarm.contract.records import Result
from tests.simulation.server import ModelServer
from tests.simulation.states import State
from tests.simulation.views import Broken, View, Views


def script_sha(script: str) -> bytes:
    """Return the SHA-1 by which clients call a script."""
    return hashlib.sha1(wire.script(script).encode(), usedforsecurity=False).hexdigest().encode()


PUSH: Final = script_sha("push")
END: Final = script_sha("end")
CLAIM: Final = script_sha("claim")
RELEASE: Final = script_sha("release")
SPLIT: Final = script_sha("split")
COMMIT: Final = script_sha("commit")
STREAMS: Final = (b"}:in", b"}:retry")
UNITS: Final = (b"blocks", b"chunks", b"tokens", b"bytes")
COUNTED: Final = (
    b"state", b"created_ms", b"generation", b"result_bytes",
    *(u + e for u in UNITS for e in (b"_in", b"_done")),
)  # fmt: skip
DONE: Final = COUNTED.index(b"chunks_done")
DRAIN: Final = script_sha("drain")
RECONCILE: Final = script_sha("reconcile")
LOSE: Final = script_sha("lose")
GENERATIONS: Final = {COMMIT: 16, SPLIT: 9}  # where each says that of its block
LATE: Final = State(
    "late commit of an earlier life refused", "`duplicate`, and the block has another generation"
)


class Holder(NamedTuple):
    """The worker that holds a lease, since which Unix ms, and the deliveries of its entry."""

    worker: bytes
    since_ms: int
    deliveries: int


def _meta(key: bytes) -> bytes:
    """Return the key of a job's counters, given any of its keys."""
    return key[: key.rfind(b":") + 1] + b"meta"


@dataclass
class Monitor:
    """Checks a server after each of its commands.

    Attributes:
        lease_ms: Time after which a lease that was not renewed may be taken.
        views: The states that clients have seen of jobs.
    """

    lease_ms: int
    views: Views = field(default_factory=Views)
    _server: ModelServer | None = None
    _holders: dict[bytes, dict[bytes, Holder]] = field(default_factory=dict)
    _pushed: dict[bytes, int] = field(default_factory=dict)
    _results: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)
    _entries: int = 0
    _tries: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    _earlier_tries: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    _left: dict[bytes, int] = field(default_factory=dict)
    _resurrected: set[bytes] = field(default_factory=set)

    def begin(self, server: ModelServer, now_ms: int) -> None:
        """Take in the state of a server that has just started on its log."""
        if len(server.log) < self._entries:
            self._resurrected |= self._left.keys()
            self.views.forget()
            for place, tries in self._earlier_tries.items():  # of a job whose new making is lost
                self._tries[place] = max(tries, self._tries.get(place, 0))
            self._earlier_tries.clear()
        self._server = server
        self._holders.clear()
        self._pushed.clear()
        self._results.clear()
        keys = {word for _, words in server.log for word in words}
        self._remember(server, keys, now_ms)
        for key in keys:
            if key.endswith(STREAMS):
                self._holders[key] = {
                    entry: Holder(*each) for entry, each in server.leases(key).items()
                }
                for entry, holder in self._holders[key].items():
                    tries = self._tried_before(server, key, entry, now_ms) + holder.deliveries
                    # A worker knows of tries that the server has lost.
                    self._tries[key, entry] = max(tries, self._tries.get((key, entry), 0))

    def look(self, server: ModelServer, words: list[bytes], reply: object, now_ms: int) -> None:
        """Check a command that has just changed something.

        Raises:
            Broken: The command did something that is not allowed.
        """
        if server is not self._server:
            self.begin(server, now_ms)
        self._entries = len(server.log)
        script = words[1] if words[1:] else b""
        for key in words[1:]:
            if key.endswith(STREAMS):
                self._check_leases(server, key, now_ms)
        self._count_tries(script, words, reply)
        self._check(server, words, reply, now_ms)
        self._remember(server, set(words), now_ms)
        for meta in {_meta(word) for word in words if word.startswith(b"ef:{")}:
            self._count(server, meta, now_ms, lost=script in {LOSE, RECONCILE})

    def _check(self, server: ModelServer, words: list[bytes], reply: object, now_ms: int) -> None:
        """Check that a script has done only what it may do."""
        script = words[1] if words[1:] else b""
        if reply == b"published" and wire.SCHEDULER.encode() in words:
            self._check_fence(server, words, now_ms)
        if script == PUSH and reply == b"added":
            self._check_order(*words[4:10])
        elif script == DRAIN:
            self._check_drained(words[3], int(words[6]), words[8:])
        elif script == RECONCILE and reply:
            self._check_holes(cast("list[list[int]]", reply)[-1])
        elif script == END and reply == b"finished":
            self._check_end(words[3])
        elif reply in (b"committed", b"split") and self._is_late(server, words, now_ms):
            raise Broken(f"a block of an earlier life of {words[5].decode()} was {reply!r}")

    def see_answer(self, words: list[bytes], reply: object, now_ms: int) -> None:
        """Mark the state of a late commit as reached, if an answer shows one."""
        if reply != b"duplicate" or self._server is None or words[1] not in GENERATIONS:
            return
        LATE.reach(self._is_late(self._server, words, now_ms))

    @staticmethod
    def _is_late(server: ModelServer, words: list[bytes], now_ms: int) -> bool:
        """Tell whether a commit or split is of a block of an earlier life of its job."""
        generation = words[GENERATIONS[words[1]]]
        return bool(generation != server.execute([b"HGET", words[5], b"generation"], now_ms))

    def _remember(self, server: ModelServer, keys: Collection[bytes], now_ms: int) -> None:
        """Note how far jobs were pushed, and their results, for the check of the next command."""
        for key in keys:
            if key.endswith(b"}:meta"):
                upto = server.execute([b"HGET", key, b"pushed_upto"], now_ms)
                self._pushed[key] = int(cast("bytes", upto or b"0"))
            elif key.endswith(b"}:res"):
                found = server.execute([b"HGETALL", key], now_ms)
                self._results[key] = dict(cast("dict[bytes, bytes]", found))

    def _count(self, server: ModelServer, meta: bytes, now_ms: int, *, lost: bool) -> None:
        """Check that a job's counters are right, and that clients see nothing impossible."""
        values = cast("list[bytes | None]", server.execute([b"HMGET", meta, *COUNTED], now_ms))
        state, life, generation, *numbers = values
        view = View(life, state or b"", int(values[DONE] or 0), generation)
        self._see(meta, view, lost=lost)
        if state not in {b"open", b"closed", b"paused"}:
            return
        job = meta.removesuffix(b"meta")
        result_bytes, *pairs = (int(number or 0) for number in numbers)
        there = sum(map(len, self._results.get(job + b"res", {}).values()))
        if result_bytes != there:
            raise Broken(f"{result_bytes} bytes of results are counted, {there} are there")
        streams = [job + b"in", job + b"retry"]
        lengths = (server.execute([b"XLEN", stream], now_ms) for stream in streams)
        left = sum(cast("int", length) for length in lengths)
        for unit, into, done in zip(UNITS, pairs[::2], pairs[1::2], strict=True):
            if not 0 <= done <= into:
                raise Broken(f"{done} {unit.decode()} of {into} are done")
        if pairs[0] - pairs[1] != left:
            raise Broken(f"{pairs[1]} blocks of {pairs[0]} are done, and {left} are left")
        self._left[meta] = left

    def _see(self, meta: bytes, view: View, *, lost: bool) -> None:
        """Let clients look at a job; the tries of a job that is made anew are counted anew."""
        lives = self.views.lives.get(meta)
        self.views.see(meta, view, lost=lost)
        if lives and self.views.lives[meta] > lives:
            job = meta.removesuffix(b"meta")
            for place in [each for each in self._tries if each[0].startswith(job)]:
                self._earlier_tries[place] = self._tries.pop(place)

    def _check_end(self, meta: bytes) -> None:
        """Check that a job ends with no blocks left but those that a crash has brought back."""
        if self._left.get(meta) and meta not in self._resurrected:
            raise Broken(f"{meta.decode()} ends with {self._left[meta]} blocks that are not done")

    def _check_leases(self, server: ModelServer, key: bytes, now_ms: int) -> None:
        """Check that nobody takes a lease from a worker that has renewed it in time."""
        before = self._holders.get(key, {})
        now = {entry: Holder(*each) for entry, each in server.leases(key).items()}
        for entry, holder in now.items():
            old = before.get(entry)
            if old is None:
                tried = self._tried_before(server, key, entry, now_ms)
                self._tries[key, entry] = 1 + max(tried, self._tries.get((key, entry), 0))
            if old is None or old.worker == holder.worker:
                continue
            if now_ms - old.since_ms < self.lease_ms:
                raise Broken(
                    f"{holder.worker.decode()} took {entry.decode()} of {key.decode()} from "
                    f"{old.worker.decode()}, which had kept it {now_ms - old.since_ms} ms ago"
                )
        self._holders[key] = now

    def _count_tries(self, script: bytes, words: list[bytes], reply: object) -> None:
        """Count the tries of blocks, and check those that are said when a chunk is given up on.

        A try is a lease that was not released. What a server has after a crash is believed.
        """
        key = words[3] if words[3:] else b""
        if script == CLAIM:
            for claimed, _ in cast("list[tuple[bytes, Any]]", reply):
                self._tries[key, claimed] += 1
        elif script == RELEASE:
            for entry in words[5:]:
                holder = self._holders[key].get(entry)
                if holder is not None and holder.worker == words[4]:
                    self._tries[key, entry] -= 1
        elif script == SPLIT and reply == b"split":
            self._check_tries((key, words[6]), int(words[8]))
        elif script == COMMIT and reply == b"committed":
            for attempts in words[26::3]:
                self._check_tries((key, words[8]), int(attempts))

    def _check_tries(self, place: tuple[bytes, bytes], attempts: int) -> None:
        """Check that a block was tried as often as is said when it is given up or split."""
        if attempts > self._tries[place]:
            raise Broken(f"{place} is given up after {attempts} tries, of {self._tries[place]}")

    @staticmethod
    def _tried_before(server: ModelServer, key: bytes, entry: bytes, now_ms: int) -> int:
        """Return the tries of the block that an entry is a piece of, as noted in the entry."""
        rows = cast("list[Any]", server.execute([b"XRANGE", key, entry, entry], now_ms))
        fields = rows[0][1] if rows else []
        noted = dict(zip(fields[::2], fields[1::2], strict=True))
        return int(noted.get(b"attempts", 0))

    @staticmethod
    def _check_fence(server: ModelServer, words: list[bytes], now_ms: int) -> None:
        """Check that plans are those of the scheduler that was elected last."""
        fence = words[3 + int(words[2])]
        newest = server.execute([b"GET", wire.FENCE.encode()], now_ms)
        if fence != newest:
            raise Broken(f"plans of scheduler {fence.decode()}, {newest.decode()} is active")

    def _check_order(self, meta: bytes, entry: bytes, _block: bytes, *numbers: bytes) -> None:
        """Check that a pushed block begins where the one before it ended."""
        count, _tokens, end = map(int, numbers)
        if end - count != self._pushed[meta]:
            raise Broken(
                f"{entry.decode()} was added to what has been pushed up to {self._pushed[meta]}"
            )

    def _check_drained(self, key: bytes, upto: int, starts: Iterable[bytes]) -> None:
        """Check that only results are deleted that are wholly on disk."""
        there = self._results.get(key, {})  # a crash may have taken all that were ever there
        for start in starts:
            data = there.get(start)
            if data is None:
                continue
            result = decode(Result, data)
            if result.start + result.count > upto:
                raise Broken(
                    f"the result of {result.start} to {result.start + result.count} was deleted, "
                    f"with {upto} chunks on disk"
                )

    @staticmethod
    def _check_holes(added: list[int]) -> None:
        """Check that no chunks had to be sent again: what a log's end loses is lost everywhere."""
        if added:
            raise Broken(f"chunks were lost, and sent again: start and count {added}")
