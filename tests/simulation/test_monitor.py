"""What the monitor of a run takes for a mistake, and what not."""

import pytest

from embedfarm import wire
from embedfarm.records import Result, encode
from tests.simulation.monitor import DRAIN, Broken, Monitor
from tests.simulation.server import ModelServer

META, RESULTS, ROOM = (b"ef:{j}:" + name for name in (b"meta", b"res", b"room"))


def make_result(start: int, count: int) -> bytes:
    """Of a block, as it is on the server."""
    return encode(
        Result(
            start=start, count=count, dimensions=1, dtype="|i1", vectors=b"1" * count,
            checksums=b"1234" * count, ids=None, errors=[], token_count=count, worker="w",
            seconds=0.1,
        )
    )  # fmt: skip


class Watched:
    """A server under a monitor."""

    def __init__(self) -> None:
        self.server, self.monitor = ModelServer(), Monitor(lease_ms=1000)
        self.do(b"SCRIPT", b"LOAD", wire.script("drain").encode())
        self.do(b"HSET", META, b"state", b"paused")

    def do(self, *words: bytes) -> None:
        """A command, and a look at what it did."""
        before = len(self.server.log)
        reply = self.server.execute(list(words), 0)
        if len(self.server.log) > before:
            self.monitor.look(self.server, list(words), reply, 0)

    def drain(self, upto: int, *starts: int) -> None:
        """What the command asks for whose output has all below `upto`."""
        numbers = [str(number).encode() for number in (upto, *starts)]
        self.do(b"EVALSHA", DRAIN, b"3", RESULTS, META, ROOM, *numbers)


def test_only_results_on_disk_go() -> None:
    """One that goes beyond is a mistake."""
    watched = Watched()
    for start in (0, 5):
        data = make_result(start, 5)
        watched.server.execute([b"HINCRBY", META, b"result_bytes", str(len(data)).encode()], 0)
        watched.do(b"HSET", RESULTS, str(start).encode(), data)
    watched.drain(5, 0)
    with pytest.raises(Broken, match="5 to 10 was deleted, with 8 chunks on disk"):
        watched.drain(8, 5)


def test_results_that_a_crash_took_go_again() -> None:
    """The command had them, wrote them, and does not know that the server forgot them all."""
    Watched().drain(5, 0)
