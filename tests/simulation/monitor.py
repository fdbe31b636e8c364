"""What must hold at every step of a run, as the server sees it."""

import hashlib
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

from embedfarm import wire
from tests.simulation.server import ModelServer

RECONCILE: Final = hashlib.sha1(
    wire.script("reconcile").encode(), usedforsecurity=False
).hexdigest()


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

    def look(self, server: ModelServer, words: list[bytes], reply: object, now_ms: int) -> None:
        """Check a command that has just changed something.

        Raises:
            Broken: What it did is not allowed.
        """
        if server is not self._server:  # it has started again, on what its log has
            self._server = server
            self._holders.clear()
        for key in words[1:]:
            if key.endswith((b"}:in", b"}:retry")):
                self._check_leases(server, key, now_ms)
        if reply == b"published" and wire.SCHEDULER.encode() in words:
            self._check_fence(server, words, now_ms)
        if words[1:] and words[1] == RECONCILE.encode() and reply:
            self._check_holes(cast("list[list[int]]", reply)[-1])

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

    @staticmethod
    def _check_holes(added: list[int]) -> None:
        """There are none: whatever a server loses with its log's end it has lost everywhere."""
        if added:
            raise Broken(f"chunks were lost, and sent again: start and count {added}")
