"""Tests of what the monitor of a run takes for a mistake."""

import pytest

from embedfarm.contract import wire
from embedfarm.contract.encoding import encode
from embedfarm.contract.records import Result
from tests.simulation.monitor import DRAIN, Monitor
from tests.simulation.server import ModelServer
from tests.simulation.views import Broken

META, RESULTS, ROOM = (b"ef:{j}:" + name for name in (b"meta", b"res", b"room"))


def make_result(start: int, count: int) -> bytes:
    """Return a result of a block, as it is stored on the server."""
    return encode(
        Result(
            start=start, count=count, dimensions=1, dtype="|i1", vectors=b"1" * count,
            checksums=b"1234" * count, ids=None, errors=[], token_count=count, worker="w",
            seconds=0.1,
        )
    )  # fmt: skip


class Watched:
    """A model server under a monitor, with a paused job."""

    def __init__(self) -> None:
        self.server, self.monitor = ModelServer(), Monitor(lease_ms=1000)
        self.do(b"SCRIPT", b"LOAD", wire.script("drain").encode())
        self.do(b"HSET", META, b"state", b"paused", b"drained_upto", b"0")

    def do(self, *words: bytes) -> None:
        """Execute a command, and let the monitor look at what it changed."""
        before = len(self.server.log)
        reply = self.server.execute(list(words), 0)
        if len(self.server.log) > before:
            self.monitor.look(self.server, list(words), reply, 0)

    def drain(self, upto: int, *starts: int) -> None:
        """Drain results like a command whose output has all chunks below `upto` on disk."""
        upto_word, *words = (str(number).encode() for number in (upto, *starts))
        self.do(b"EVALSHA", DRAIN, b"3", RESULTS, META, ROOM, upto_word, b"", *words)


def test_only_results_on_disk_go() -> None:
    """Draining a result that reaches beyond the chunks on disk is a mistake."""
    watched = Watched()
    for start in (0, 5):
        data = make_result(start, 5)
        watched.server.execute([b"HINCRBY", META, b"result_bytes", str(len(data)).encode()], 0)
        watched.do(b"HSET", RESULTS, str(start).encode(), data)
    watched.drain(5, 0)
    with pytest.raises(Broken, match="5 to 10 was deleted, with 8 chunks on disk"):
        watched.drain(8, 5)


def test_results_that_a_crash_took_go_again() -> None:
    """Draining results that the server has lost is no mistake."""
    Watched().drain(5, 0)
