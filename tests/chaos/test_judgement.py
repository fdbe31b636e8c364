"""Would the harness say so? What it must take for a finding, and what it may not."""

import http.server
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from embedfarm.processes import Child
from embedfarm.settings import Settings
from tests.chaos import callers
from tests.chaos.callers import Callers
from tests.chaos.outcome import Outcome
from tests.chaos.roles import Deaths, Job, Role, heeds
from tests.chaos.servers import Servers
from tests.chaos.watch import Watch
from tests.support import free_port, wait_until

LONG = 1800.0
SHORT = 60.0
GOOD = Outcome(
    recoveries=[("SIGKILL web", 19.0)] * 100,
    runs=1,
    chunks=10,
    quiet_rate=100.0,
    rate=71.0,
    deliveries_max=4,
    idle_seconds_max=19.0,
    answered=1,
    small_jobs=1,
)


# Bounds.


def test_a_good_run_is_good() -> None:
    """Everything within its bounds, if barely."""
    assert GOOD.judge(LONG, 3) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recoveries": [("any", 1.0)] * 98 + [("any", 21.0)] * 2}, "recovery took 21.0 s (P99)"),
        ({"recoveries": []}, "nothing was shot at"),
        ({"rate": 69.0}, "throughput was 69% of the quiet one"),
        ({"quiet_rate": 0.0}, "throughput was 0% of the quiet one"),
        ({"idle_seconds_max": 20.1}, "a lease was idle for 20.1 s"),
        ({"deliveries_max": 5}, "a block was delivered 5 times"),
        ({"lost": 1}, "vectors are lost, doubled or wrong"),
        ({"doubled": 1}, "vectors are lost, doubled or wrong"),
        ({"cosine_min": float("nan")}, "vectors are lost, doubled or wrong"),
        ({"runs": 0}, "no job has ended"),
        ({"answered": 0}, "nobody got a vector by HTTP"),
        ({"small_jobs": 0}, "no job through RQ has ended well"),
    ],
)
def test_each_bound_is_judged(changed: dict[str, object], said: str) -> None:
    """One thing is beyond its bound, and that is what is said."""
    assert replace(GOOD, **changed).judge(LONG, 3) == [said]  # type: ignore[arg-type]


def test_throughput_of_a_short_run_says_nothing() -> None:
    """One fault decides it."""
    assert replace(GOOD, rate=10.0).judge(SHORT, 3) == []


# Recovery.


def test_both_the_farm_and_the_victim_must_be_at_work() -> None:
    """The later of the two counts; which of them is missing is said."""
    watch = Watch("unix:///nowhere")
    since = time.monotonic()
    watch.moved_after = since - 0.01
    with pytest.raises(TimeoutError, match="no chunk is done"):
        watch.recovery_seconds(since, 0.2, lambda _: True)
    watch.moved_after = since + 0.01
    with pytest.raises(TimeoutError, match="what was hit does not work"):
        watch.recovery_seconds(since, 0.2, lambda _: False)
    later = time.monotonic()
    watch.moved_after = later + 0.01
    assert watch.recovery_seconds(later, 9, lambda _: time.monotonic() > later + 0.5) >= 0.5


# Deaths.


def test_an_end_is_excused_by_the_signal_that_it_died_of() -> None:
    """Once, and by no other status."""
    deaths = Deaths()
    deaths.cause("worker", signal.SIGKILL, lambda _: True)
    deaths.note("worker", -9)
    assert deaths.unasked == []
    deaths.cause("worker", signal.SIGKILL, lambda _: True)
    deaths.note("worker", 1)
    deaths.note("worker", -9)
    assert deaths.unasked == ["worker ended with status 1", "worker ended with status -9"]


def test_a_signal_that_hit_nobody_excuses_nobody() -> None:
    """Nor one that does not kill."""
    deaths = Deaths()
    deaths.cause("worker", signal.SIGKILL, lambda _: False)
    deaths.cause("worker", signal.SIGSTOP, lambda _: True)
    deaths.note("worker", -9)
    assert deaths.unasked == ["worker ended with status -9"]


def test_who_ends_well_in_spite_of_a_signal_leaves_no_excuse(tmp_path: Path) -> None:
    """A command that was just about to end, and the death of the next one."""
    deaths, job = Deaths(), Job([], Settings(), tmp_path / "log")
    script = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print(1, flush=True)"
    job.words = [sys.executable, "-c", f"{script}; signal.pause()"]
    running = threading.Thread(target=job.run, args=[deaths])
    running.start()
    wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text())
    job.signal(signal.SIGTERM, deaths)
    running.join()
    job.signal(signal.SIGTERM, deaths)  # nobody is there
    deaths.note("embed", -signal.SIGTERM)
    assert deaths.unasked == ["embed ended with status -15"]


def role(folder: Path, script: str, deaths: Deaths) -> Role:
    """A process that is kept alive."""
    return Role(Child("victim", [sys.executable, "-c", script], {}), folder, Settings(), deaths)


def test_a_role_that_ends_by_itself_is_noted(tmp_path: Path) -> None:
    """Though its status be 0."""
    deaths = Deaths()
    with closing(role(tmp_path, "print('done')", deaths)):
        wait_until(lambda: deaths.unasked)
    assert deaths.unasked == ["victim ended with status 0 done"]


def test_our_own_doings_are_not_noted(tmp_path: Path) -> None:
    """A kill, a restart, and the end."""
    deaths = Deaths()
    script = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); signal.pause()"
    with closing(role(tmp_path, script, deaths)) as victim:
        first = victim.pid
        victim.kill()
        wait_until(lambda: victim.pid not in {0, first})
        victim.restart()
        wait_until(lambda: heeds(victim.pid, signal.SIGTERM))
    assert deaths.unasked == []


# Servers.


@pytest.fixture
def deaths() -> Deaths:
    """Of one test."""
    return Deaths()


@pytest.fixture
def servers(tmp_path: Path, deaths: Deaths) -> Iterator[Servers]:
    """A server and its successors."""
    with closing(Servers(tmp_path / "log", tmp_path / "s", Settings(), deaths)) as servers:
        yield servers


def test_a_server_that_dies_by_itself_is_noted(servers: Servers, deaths: Deaths) -> None:
    """One that we killed is not."""
    first = servers._node.pid
    servers.kill()
    wait_until(lambda: servers._node.pid not in {0, first})
    assert deaths.unasked == []
    os.kill(servers._node.pid, signal.SIGSEGV)
    wait_until(lambda: deaths.unasked)
    assert deaths.unasked == ["server ended with status -11"]


def test_a_loss_excuses_nothing_after_it(servers: Servers, deaths: Deaths) -> None:
    """Only what was done on a server of which a replica had not heard all."""
    began = time.time()
    assert not servers.forgot(began)
    servers.fail_over(0.5)
    [(since, until)] = servers._losses
    assert servers.forgot(until - 0.25)
    assert not servers.forgot(since - 0.01)
    assert not servers.forgot(time.time())
    assert deaths.unasked == []


# Callers.


@contextmanager
def web(answer: Callable[[http.server.BaseHTTPRequestHandler], object]) -> Iterator[Callers]:
    """Who asks a server that does with each request what it is told."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield asker(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asker(port: int) -> Callers:
    """Who asks at a port, for one text whose vector is [1, 0]."""
    return Callers("", port, "m", ["text"], np.asarray([[1, 0]], np.float32), Path())


def reply(handler: http.server.BaseHTTPRequestHandler, status: int, words: str = "") -> None:
    """Answer a request."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(words)))
    handler.end_headers()
    handler.wfile.write(words.encode())


def tally(callers: Callers) -> tuple[int, int, int, int]:
    """Requests that were answered, refused, answered wrongly and not answered."""
    return callers.answered, callers.refused, len(callers.wrong), len(callers.unanswered)


@pytest.mark.parametrize(
    ("status", "words", "expected"),
    [
        (200, '{"data": [{"embedding": [2, 0]}]}', (1, 0, 0, 0)),
        (200, '{"data": [{"embedding": [0, 1]}]}', (0, 0, 1, 0)),
        (503, "", (0, 1, 0, 0)),
        (429, "", (0, 1, 0, 0)),
        (500, "", (0, 0, 1, 0)),
        (504, "", (0, 0, 1, 0)),
    ],
)
def test_answers(status: int, words: str, expected: tuple[int, int, int, int]) -> None:
    """What is right, what may be, and what is wrong."""
    with web(partial(reply, status=status, words=words)) as callers:
        before = time.monotonic()
        callers.ask_for(0)
    assert tally(callers) == expected
    assert (callers.served > before) == (callers.answered == 1)


def test_a_restart_is_no_finding() -> None:
    """Nobody listens, or who did is gone in the midst."""
    callers = asker(free_port())
    callers.ask_for(0)
    assert tally(callers) == (0, 1, 0, 0)
    with web(lambda handler: handler.connection.close()) as callers:
        callers.ask_for(0)
    assert tally(callers) == (0, 1, 0, 0)


def test_silence_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes a request and never answers."""
    monkeypatch.setattr(callers, "ANSWER_SECONDS_MAX", 0.2)
    told = threading.Event()
    with web(lambda _: told.wait(20)) as asking:
        asking.ask_for(0)
        told.set()
    assert tally(asking) == (0, 0, 0, 1)
    assert httpx.ReadTimeout.__name__ in asking.unanswered[0]
