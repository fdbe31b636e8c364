"""What must hold at every step of a run, as the server sees it."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from embedfarm import wire
from embedfarm.records import Result, decode
from tests.simulation.server import ModelServer


def _sha(script: str) -> bytes:
    """What a client calls it by."""
    return hashlib.sha1(wire.script(script).encode(), usedforsecurity=False).hexdigest().encode()


PUSH: Final = _sha("push")
END: Final = _sha("end")
CLAIM: Final = _sha("claim")
RELEASE: Final = _sha("release")
SPLIT: Final = _sha("split")
COMMIT: Final = _sha("commit")
STREAMS: Final = (b"}:in", b"}:retry")
UNITS: Final = (b"blocks", b"chunks", b"tokens", b"bytes")
COUNTED: Final = (b"state", b"result_bytes", *(u + e for u in UNITS for e in (b"_in", b"_done")))
DRAIN: Final = _sha("drain")
RECONCILE: Final = _sha("reconcile")


class Broken(AssertionError):
    """Something that must never happen did."""


class Holder(NamedTuple):
    """Who has a lease, since when, in unix ms of the server's clock, and how often it was given."""

    worker: bytes
    since_ms: int
    deliveries: int


def _meta(key: bytes) -> bytes:
    """The key of the counters of a job, of any of its keys."""
    return key[: key.rfind(b":") + 1] + b"meta"


@dataclass
class Monitor:
    """Looks at a server after each of its commands.

    Attributes:
        lease_ms: Time after which a lease that was not renewed may be taken.
    """

    lease_ms: int
    _server: ModelServer | None = None
    _holders: dict[bytes, dict[bytes, Holder]] = field(default_factory=dict)
    _pushed: dict[bytes, int] = field(default_factory=dict)
    _results: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)
    _entries: int = 0
    _tries: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    _left: dict[bytes, int] = field(default_factory=dict)
    _resurrected: set[bytes] = field(default_factory=set)

    def begin(self, server: ModelServer, now_ms: int) -> None:
        """Look at a server that has started, on what its log has."""
        if len(server.log) < self._entries:
            self._resurrected |= self._left.keys()
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
            Broken: What it did is not allowed.
        """
        if server is not self._server:
            self.begin(server, now_ms)
        self._entries = len(server.log)
        script = words[1] if words[1:] else b""
        for key in words[1:]:
            if key.endswith(STREAMS):
                self._check_leases(server, key, now_ms)
        self._count_tries(script, words, reply)
        if reply == b"published" and wire.SCHEDULER.encode() in words:
            self._check_fence(server, words, now_ms)
        if script == PUSH and reply == b"added":
            self._check_order(*words[4:])
        elif script == DRAIN:
            self._check_drained(words[3], int(words[6]), words[7:])
        elif script == RECONCILE and reply:
            self._check_holes(cast("list[list[int]]", reply)[-1])
        elif script == END and reply == b"finished":
            self._check_end(words[3])
        self._remember(server, set(words), now_ms)
        for meta in {_meta(word) for word in words if word.startswith(b"ef:{")}:
            self._count(server, meta, now_ms)

    def _remember(self, server: ModelServer, keys: Collection[bytes], now_ms: int) -> None:
        """How far jobs were pushed, and what results there are, before the next command."""
        for key in keys:
            if key.endswith(b"}:meta"):
                upto = server.execute([b"HGET", key, b"pushed_upto"], now_ms)
                self._pushed[key] = int(cast("bytes", upto or b"0"))
            elif key.endswith(b"}:res"):
                found = server.execute([b"HGETALL", key], now_ms)
                self._results[key] = dict(cast("dict[bytes, bytes]", found))

    def _count(self, server: ModelServer, meta: bytes, now_ms: int) -> None:
        """A job's counters say what is there."""
        values = server.execute([b"HMGET", meta, *COUNTED], now_ms)
        (state, *numbers) = cast("list[bytes | None]", values)
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

    def _check_end(self, meta: bytes) -> None:
        """Nothing is left to do of a job that ends, but what a crash has brought back."""
        if self._left.get(meta) and meta not in self._resurrected:
            raise Broken(f"{meta.decode()} ends with {self._left[meta]} blocks that are not done")

    def _check_leases(self, server: ModelServer, key: bytes, now_ms: int) -> None:
        """Nobody takes a lease from a worker that has kept it."""
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
        """No chunk is given up on after fewer tries than are said.

        A try is a lease that was not handed back. What a server has of a crash is believed.
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
            for attempts in words[18::3]:
                self._check_tries((key, words[8]), int(attempts))

    def _check_tries(self, place: tuple[bytes, bytes], attempts: int) -> None:
        """Of a block that is tried no more."""
        if attempts > self._tries[place]:
            raise Broken(f"{place} is given up after {attempts} tries, of {self._tries[place]}")

    @staticmethod
    def _tried_before(server: ModelServer, key: bytes, entry: bytes, now_ms: int) -> int:
        """Tries of the block that an entry is a piece of."""
        rows = cast("list[Any]", server.execute([b"XRANGE", key, entry, entry], now_ms))
        fields = rows[0][1] if rows else []
        noted = dict(zip(fields[::2], fields[1::2], strict=True))
        return int(noted.get(b"attempts", 0))

    @staticmethod
    def _check_fence(server: ModelServer, words: list[bytes], now_ms: int) -> None:
        """Plans are those of the scheduler that was elected last."""
        fence = words[3 + int(words[2])]
        newest = server.execute([b"GET", wire.FENCE.encode()], now_ms)
        if fence != newest:
            raise Broken(f"plans of scheduler {fence.decode()}, {newest.decode()} is active")

    def _check_order(self, meta: bytes, entry: bytes, _block: bytes, *numbers: bytes) -> None:
        """A block begins where the one before it ended."""
        count, _tokens, end = map(int, numbers)
        if end - count != self._pushed[meta]:
            raise Broken(
                f"{entry.decode()} was added to what has been pushed up to {self._pushed[meta]}"
            )

    def _check_drained(self, key: bytes, upto: int, starts: Iterable[bytes]) -> None:
        """Only results go that are wholly on disk."""
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
        """There are none: whatever a server loses with its log's end it has lost everywhere."""
        if added:
            raise Broken(f"chunks were lost, and sent again: start and count {added}")
