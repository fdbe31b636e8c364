"""Tests of what the harness must take for a finding, and what it may not."""

import http.server
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import numpy as np
import pytest

from embedfarm.contract.processes import Child
from embedfarm.contract.settings import Settings
from tests.chaos import tenants
from tests.chaos.callers import InteractiveCaller
from tests.chaos.commands import Job, World
from tests.chaos.corpora import Corpus, vectors_of
from tests.chaos.outcome import Outcome
from tests.chaos.roles import Deaths, Role, heeds
from tests.chaos.servers import Servers
from tests.chaos.tally import Tally
from tests.chaos.tenants import NAMES, Door
from tests.chaos.watch import Watch
from tests.support import free_port, wait_until

FORGOTTEN = 7.0
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
    small_jobs=Counter({"RQ": 1, "HTTP": 1}),
    own=Counter(dict.fromkeys(NAMES, 1)),
)


# Bounds.


def test_a_good_run_is_good() -> None:
    """A run with everything barely within its bounds has no findings."""
    assert GOOD.judge(LONG, 3) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recoveries": [("any", 1.0)] * 98 + [("any", 21.0)] * 2}, "recovery took 21.0 s (P99)"),
        ({"recoveries": []}, "nothing was shot at"),
        ({"rate": 69.0}, "throughput was 69% of the quiet one"),
        ({"quiet_rate": 0.0}, "throughput was 0% of the quiet one"),
        ({"idle_seconds_max": 20.1, "idle_longest": "x"}, "a lease was idle for 20.1 s: x"),
        ({"deliveries_max": 5}, "a block was delivered 5 times"),
        ({"lost": 1}, "vectors are lost, doubled or wrong"),
        ({"doubled": 1}, "vectors are lost, doubled or wrong"),
        ({"cosine_min": float("nan")}, "vectors are lost, doubled or wrong"),
        ({"runs": 0}, "no job has ended"),
        ({"answered": 0}, "nobody got a vector by HTTP"),
        ({"small_jobs": Counter(HTTP=1)}, "no job by RQ has ended well"),
        ({"small_jobs": Counter(RQ=1)}, "no job by HTTP has ended well"),
        ({"own": Counter({NAMES[0]: 1})}, f"the reader of {NAMES[1]} saw nothing"),
        ({"leaks": 1}, "a tenant has read of another one 1 times"),
    ],
)
def test_each_bound_is_judged(changed: dict[str, object], said: str) -> None:
    """A run with one figure beyond its bound has just that finding."""
    assert replace(GOOD, **changed).judge(LONG, 3) == [said]  # type: ignore[arg-type]


def test_throughput_of_a_short_run_says_nothing() -> None:
    """A low throughput is no finding of a short run, which one fault decides."""
    assert replace(GOOD, rate=10.0).judge(SHORT, 3) == []


# Recovery.


def test_both_the_farm_and_the_victim_must_be_at_work() -> None:
    """A recovery lasts until chunks are done and the victim works; an error says what is not."""
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
    """A signal excuses one end by that signal, and no end with another status."""
    deaths = Deaths()
    deaths.cause("worker", signal.SIGKILL, lambda _: True)
    deaths.note("worker", -9)
    assert deaths.unasked == []
    deaths.cause("worker", signal.SIGKILL, lambda _: True)
    deaths.note("worker", 1)
    deaths.note("worker", -9)
    assert deaths.unasked == ["worker ended with status 1", "worker ended with status -9"]


def test_a_signal_that_hit_nobody_excuses_nobody() -> None:
    """A signal that hit no process, or does not kill, excuses no end."""
    deaths = Deaths()
    deaths.cause("worker", signal.SIGKILL, lambda _: False)
    deaths.cause("worker", signal.SIGSTOP, lambda _: True)
    deaths.note("worker", -9)
    assert deaths.unasked == ["worker ended with status -9"]


def job_of(folder: Path, deaths: Deaths) -> Job:
    """Make a command whose corpus has three texts, and whose end only one time makes forgotten."""
    corpus = Corpus(folder / "corpus.jsonl")
    corpus.write(["a", "b", "c"])
    (folder / "out").mkdir()
    servers = cast("Servers", SimpleNamespace(forgot=lambda at: at == FORGOTTEN))
    world = World(Settings(), servers, deaths, folder / "switches", "m")
    return Job(corpus, folder / "out", "nightly", world)


def test_who_ends_well_in_spite_of_a_signal_leaves_no_excuse(tmp_path: Path) -> None:
    """A command that ends well after a signal leaves no excuse for the next one's death."""
    deaths = Deaths()
    job, log = job_of(tmp_path, deaths), tmp_path / "corpus.log"
    script = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print(1, flush=True)"
    job.words = [sys.executable, "-c", f"{script}; signal.pause()"]
    running = threading.Thread(target=job.run)
    running.start()
    wait_until(lambda: log.exists() and log.read_text())
    job.signal(signal.SIGTERM)
    running.join()
    job.signal(signal.SIGTERM)  # nobody is there
    deaths.note("embed", -signal.SIGTERM)
    assert deaths.unasked == ["embed ended with status -15"]


def role(folder: Path, script: str, deaths: Deaths) -> Role:
    """Start a process that is kept alive."""
    return Role(Child("victim", [sys.executable, "-c", script], {}), folder, Settings(), deaths)


def test_a_role_that_ends_by_itself_is_noted(tmp_path: Path) -> None:
    """A role that ends by itself is noted, even with status 0."""
    deaths = Deaths()
    with closing(role(tmp_path, "print('done')", deaths)):
        wait_until(lambda: deaths.unasked)
    assert deaths.unasked == ["victim ended with status 0 done"]


def test_our_own_doings_are_not_noted(tmp_path: Path) -> None:
    """A kill, a restart and the end of a role are not noted."""
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
    """Return deaths without an entry."""
    return Deaths()


@pytest.fixture
def servers(tmp_path: Path, deaths: Deaths) -> Iterator[Servers]:
    """Start a server, and end it and its successors afterwards."""
    with closing(Servers(tmp_path / "log", tmp_path / "s", Settings(), deaths)) as servers:
        yield servers


def test_a_server_that_dies_by_itself_is_noted(servers: Servers, deaths: Deaths) -> None:
    """A server that dies by itself is noted, and one that we killed is not."""
    first = servers._node.pid
    servers.kill()
    wait_until(lambda: servers._node.pid not in {0, first})
    assert deaths.unasked == []
    os.kill(servers._node.pid, signal.SIGSEGV)
    wait_until(lambda: deaths.unasked)
    assert deaths.unasked == ["server ended with status -11"]


def test_a_loss_excuses_nothing_after_it(servers: Servers, deaths: Deaths) -> None:
    """A failover excuses only what was done while its replica did not hear of it."""
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
def web(
    answer: Callable[[http.server.BaseHTTPRequestHandler], object],
) -> Iterator[InteractiveCaller]:
    """Start a server that answers each request by a function, and yield a caller of it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self)

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield caller(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def caller(port: int) -> InteractiveCaller:
    """Return a caller at a port, for one text whose vector is [1, 0]."""
    tally = Tally()
    known = vectors_of(["text"], np.asarray([[1, 0]], np.float32))
    return InteractiveCaller([Door(port, tally)], "m", known, tally)


def ask(caller: InteractiveCaller) -> None:
    """Ask once for the vector of the text."""
    caller.ask_for(caller.doors[0], "text")


def reply(handler: http.server.BaseHTTPRequestHandler, status: int, words: str = "") -> None:
    """Answer a request."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(words)))
    handler.end_headers()
    handler.wfile.write(words.encode())


def counts(caller: InteractiveCaller) -> tuple[int, int, int, int]:
    """Return the requests that were answered, refused, answered wrongly and not answered."""
    tally = caller.tally
    return tally.answered, tally.refused, len(tally.wrong), len(tally.unanswered)


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
    """Right vectors, refusals and wrong answers are told apart."""
    with web(partial(reply, status=status, words=words)) as asking:
        before = time.monotonic()
        ask(asking)
    assert counts(asking) == expected
    assert (asking.tally.served > before) == (asking.tally.answered == 1)


def test_a_restart_is_no_finding() -> None:
    """A server that is not there, or hangs up, counts as a refusal."""
    asking = caller(free_port())
    ask(asking)
    assert counts(asking) == (0, 1, 0, 0)
    with web(lambda handler: handler.connection.close()) as asking:
        ask(asking)
    assert counts(asking) == (0, 1, 0, 0)


def test_silence_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes a request and never answers is a finding."""
    monkeypatch.setattr(tenants, "ANSWER_SECONDS_MAX", 0.2)
    told = threading.Event()
    with web(lambda _: told.wait(20)) as asking:
        ask(asking)
        told.set()
    assert counts(asking) == (0, 0, 0, 1)
    assert httpx.ReadTimeout.__name__ in asking.tally.unanswered[0]
