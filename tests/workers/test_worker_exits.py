"""Tests of what a host says of its workers that end."""

import logging
import time

import pytest
import redis

from embedfarm.contract.farm_timeline import Timeline
from embedfarm.contract.processes import Exit
from embedfarm.workers.supervisor import WORKER, describe_exit, tell_exits
from tests.support import LiveServer, wait_until

ENDED = Exit(f"{WORKER}cpu-0", -9, time.time(), restarted=True, count=2)


@pytest.mark.parametrize(
    ("status", "words"),
    [(3, "exit status 3"), (-9, "killed by SIGKILL"), (-200, "killed by signal 200")],
)
def test_an_end_in_words(status: int, words: str) -> None:
    """An exit status says whether a signal ended the process, and which, if it has a name."""
    assert describe_exit(status) == words


def test_an_end_is_in_the_timeline(server: LiveServer, client: redis.Redis) -> None:
    """The timeline says which worker ended and why, and nothing of one that was asked to end."""
    tell_exits(server.url)(Exit(ENDED.name, 0, time.time(), restarted=False, count=1))
    tell_exits(server.url)(ENDED)
    wait_until(lambda: Timeline(client).newest(9))
    (event,) = Timeline(client).newest(9)
    assert event.worker.endswith(":cpu-0")
    assert "killed by SIGKILL; it is started again (restart 2)" in event.sentence


def test_an_end_while_the_server_is_away(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has what the timeline cannot get."""
    server.stop()
    with caplog.at_level(logging.WARNING):
        tell_exits(server.url)(ENDED)
        wait_until(lambda: "the timeline does not say so, server away" in caplog.text, 60)
