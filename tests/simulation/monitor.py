"""What must hold at every step of a run, as the server sees it."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

from embedfarm import wire
from embedfarm.records import Result, decode
from tests.simulation.server import ModelServer


def _sha(script: str) -> bytes:
    """What a client calls it by."""
    return hashlib.sha1(wire.script(script).encode(), usedforsecurity=False).hexdigest().encode()


PUSH: Final = _sha("push")
DRAIN: Final = _sha("drain")
RECONCILE: Final = _sha("reconcile")


class Broken(AssertionError):
    """Something that must never happen did."""


class Holder(NamedTuple):
    """Who has a lease, and since when, in unix milliseconds of the server's clock."""

    worker: bytes
    since_ms: int


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

    def begin(self, server: ModelServer, now_ms: int) -> None:
        """Look at a server that has started, on what its log has."""
        self._server = server
        self._holders.clear()
        self._pushed.clear()
        self._results.clear()
        self._remember(server, {word for _, words in server.log for word in words}, now_ms)

    def look(self, server: ModelServer, words: list[bytes], reply: object, now_ms: int) -> None:
        """Check a command that has just changed something.

        Raises:
            Broken: What it did is not allowed.
        """
        if server is not self._server:
            self.begin(server, now_ms)
        for key in words[1:]:
            if key.endswith((b"}:in", b"}:retry")):
                self._check_leases(server, key, now_ms)
        if reply == b"published" and wire.SCHEDULER.encode() in words:
            self._check_fence(server, words, now_ms)
        script = words[1] if words[1:] else b""
        if script == PUSH and reply == b"added":
            self._check_order(*words[4:])
        elif script == DRAIN:
            self._check_drained(words[3], int(words[6]), words[7:])
        elif script == RECONCILE and reply:
            self._check_holes(cast("list[list[int]]", reply)[-1])
        self._remember(server, set(words), now_ms)

    def _remember(self, server: ModelServer, keys: Collection[bytes], now_ms: int) -> None:
        """How far jobs were pushed, and what results there are, before the next command."""
        for key in keys:
            if key.endswith(b"}:meta"):
                upto = server.execute([b"HGET", key, b"pushed_upto"], now_ms)
                self._pushed[key] = int(cast("bytes", upto or b"0"))
            elif key.endswith(b"}:res"):
                found = server.execute([b"HGETALL", key], now_ms)
                self._results[key] = dict(cast("dict[bytes, bytes]", found))

    def _check_leases(self, server: ModelServer, key: bytes, now_ms: int) -> None:
        """Nobody takes a lease from a worker that has kept it."""
        before = self._holders.get(key, {})
        now = {entry: Holder(*each) for entry, each in server.leases(key).items()}
        for entry, holder in now.items():
            old = before.get(entry)
            if old is None or old.worker == holder.worker:
                continue
            if now_ms - old.since_ms < self.lease_ms:
                raise Broken(
                    f"{holder.worker.decode()} took {entry.decode()} of {key.decode()} from "
                    f"{old.worker.decode()}, which had kept it {now_ms - old.since_ms} ms ago"
                )
        self._holders[key] = now

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
        for start in starts:
            data = self._results[key].get(start)
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
