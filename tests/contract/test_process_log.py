"""Tests of the logs of processes, as they are kept on the server."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.process_log import LINE_CHARACTERS_MAX, LINES_MAX, LogSender
from tests.support import LiveServer, wait_until

ENDS = """
import logging, sys
from embedfarm.contract.process_log import send_log
from embedfarm.contract.redaction import start_logging
start_logging(logging.INFO)
send_log(sys.argv[1], "one")
logging.getLogger("x").info("ready for %s", "redis://ann:secret@host/0")
raise RuntimeError("no such device")
"""


@pytest.fixture
def log(server: LiveServer) -> Iterator[logging.Logger]:
    """A logger whose lines are kept under the name "one"."""
    logger, sender = logging.getLogger("test"), LogSender(server.url, "one")
    logger.setLevel(logging.INFO)
    logger.addHandler(sender)
    yield logger
    logger.removeHandler(sender)
    sender.close()
    sender.close()  # as `logging` does at the end of a process, too


def texts(client: redis.Redis) -> list[str]:
    """Return the texts that are kept of "one", oldest first."""
    return [line.text for line in FarmClient(client).logs.tail("one", 2 * LINES_MAX)]


def test_the_newest_lines_are_kept(client: redis.Redis, log: logging.Logger) -> None:
    """About 200 lines of a process are kept, for a day, each no longer than it may be."""
    for number in range(2 * LINES_MAX):
        log.info("line %d", number)
    log.warning("x" * 9000)
    wait_until(lambda: texts(client)[-1:] == ["x" * LINE_CHARACTERS_MAX])
    assert LINES_MAX <= client.xlen(wire.log_key("one")) < 2 * LINES_MAX
    assert FarmClient(client).logs.tail("one", 1)[0].level == "WARNING"
    assert 86_000 < client.ttl(wire.log_key("one")) <= 86_400
    assert list(FarmClient(client).logs.processes()) == ["one"]


def test_one_connection_sends_all(client: redis.Redis, log: logging.Logger) -> None:
    """Lines that come one after the other need no connection each."""

    def connections() -> int:
        return int(client.info("stats")["total_connections_received"])

    log.info("first")
    wait_until(lambda: texts(client)[-1:] == ["first"])
    before = connections()
    log.info("second")
    wait_until(lambda: texts(client) == ["first", "second"])
    log.info("third")
    wait_until(lambda: texts(client) == ["first", "second", "third"])
    assert connections() == before


def test_a_server_that_is_away_is_waited_for(
    server: LiveServer, client: redis.Redis, log: logging.Logger
) -> None:
    """What is logged while the server is away comes later, and blocks nobody meanwhile."""
    log.info("before")
    wait_until(lambda: texts(client) == ["before"])
    server.kill()
    for number in range(3):
        log.info("while %d", number)
    server.start()
    wait_until(lambda: texts(client)[-3:] == ["while 0", "while 1", "while 2"])


def test_how_a_process_ended(server: LiveServer, client: redis.Redis) -> None:
    """The error that ends a process is in its log, with its traceback and without a secret."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, server.url],
        env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    first, last = texts(client)
    assert first == "ready for redis://ann:***@host/0"
    assert last.startswith("ended by an error\nTraceback")
    assert last.endswith("RuntimeError: no such device")
    assert "RuntimeError: no such device" in done.stderr
