"""Tests of `embedfarm top`: the farm in a terminal."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import redis
from rich.console import Console

from embedfarm.cli.top import divide, draw, spark
from embedfarm.contract.farm_client import FarmClient
from embedfarm.watch.view import FarmReader, FarmView
from tests.contract.little_job import CHUNKS, COMPLETION, embed, heartbeat, make_job
from tests.farm.harness import COMMAND, run
from tests.support import LiveServer, force_log, wait_until

HOME = b"\x1b[H"  # each screen begins there
HARMFUL = "\x1b[2J\nnotes"


def make_farm(client: redis.Redis, jobs: int = 1, workers: int = 1) -> FarmClient:
    """Make half embedded jobs, one with a failed chunk, and workers, of which the first is busy."""
    farm = FarmClient(client)
    for number in range(jobs):
        job = make_job(client, 2, f"job-{number}")
        job.close(2 * CHUNKS)
        job.stream.commit([embed(job.stream.read("one", 1)[0], *([1] if number == 0 else []))])
    facts = {"memory_used_bytes": 3.0 * 2**30, "temperature_celsius": 61.0}
    for number in range(workers):
        beat = heartbeat(f"worker-{number}")
        busy = {"state": "busy", "job": "job-0", "model": "null:2", "device_facts": facts}
        farm.beat(msgspec.structs.replace(beat, **(busy if number == 0 else {})), 60)
    done = msgspec.structs.replace(COMPLETION, worker="worker-0", job="job-0", real_tokens=6172)
    farm.statistics.report(done, 100)
    return farm


def screen(view: FarmView, width: int, height: int | None, trouble: str = "") -> list[str]:
    """Draw a view, and return its lines."""
    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115 -- as rich takes it
    with contextlib.closing(console.file):
        console.print(draw(view, width, height, trouble))
    return console.export_text().splitlines()


@pytest.fixture
def view(client: redis.Redis) -> FarmView:
    """Return the view of a farm at work."""
    return FarmReader(make_farm(client)).read()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 12)])
def test_it_fits_the_screen(client: redis.Redis, width: int, height: int) -> None:
    """A screen of any size is kept to, and says how many jobs and workers are not shown."""
    view = FarmReader(make_farm(client, jobs=30, workers=50)).read()
    lines = screen(view, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    said = "\n".join(lines)
    assert "more jobs" in said
    assert "more workers" in said


def test_all_is_said_at_80_columns(view: FarmView) -> None:
    """80 columns show rates, backlog, time left, progress, failures, workers and their devices."""
    said = "\n".join(screen(view, 80, 24))
    for words in (
        "12.3k tokens/s",
        "backlog 2 chunks, 20 tokens",
        "1 s left",
        "no scheduler: workers go on by their own rates",
        "job-0",
        "50%",
        "2 of 4",
        "worker-0  busy",
        "100%",
        "3.0 GiB",
        "61",
    ):
        assert words in said, words
    assert next(line for line in said.splitlines() if line.startswith("job-0")).endswith("1")


def test_everything_is_said_without_a_screen(client: redis.Redis) -> None:
    """A view as text has all jobs and workers, however many."""
    view = FarmReader(make_farm(client, jobs=30, workers=50)).read()
    said = "\n".join(screen(view, 80, None))
    assert all(f"job-{number}" in said for number in range(30))
    assert all(f"worker-{number}" in said for number in range(50))


def test_trouble_is_seen_first(view: FarmView) -> None:
    """A server that is away is said above what was last known."""
    lines = screen(view, 80, 24, "the server is away")
    assert "the server is away" in lines[2]
    assert any("job-0" in line for line in lines)


def test_names_move_no_cursor(view: FarmView) -> None:
    """A job's name with control characters is shown without them."""
    named = replace(view, jobs=(replace(view.jobs[0], name=HARMFUL),))
    assert all(line.isprintable() for line in screen(named, 120, 40))


@pytest.mark.parametrize(
    ("room", "jobs", "workers", "lines"),
    [
        (10, 3, 3, (3, 3)),
        (10, 30, 3, (7, 3)),
        (10, 3, 30, (3, 7)),
        (10, 30, 30, (5, 5)),
        (None, 30, 30, (30, 30)),
    ],
)
def test_room_goes_where_it_is_needed(
    room: int | None, jobs: int, workers: int, lines: tuple[int, int]
) -> None:
    """Jobs and workers get half of the lines each, and what the other leaves over."""
    assert divide(room, jobs, workers) == lines


def test_a_curve_in_a_line() -> None:
    """A curve is scaled to its maximum, and has its newest values where there is little room."""
    assert spark([], 5) == ""
    assert spark([0, 0], 5) == ""
    assert spark([99, 0, 4, 8], 3) == " ▄█"


def test_one_snapshot_as_json(client: redis.Redis, server: LiveServer) -> None:
    """`top --json` prints all fields of the view by name."""
    make_farm(client)
    done = run("top", "--json", "--redis", server.url)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts.keys() == set(FarmView.__dataclass_fields__)
    assert facts["backlog_chunks"] == 2
    assert facts["jobs"][0]["chunks_failed"] == 1


def test_one_snapshot_as_text(client: redis.Redis, server: LiveServer) -> None:
    """`top` prints a view and ends where its output is no terminal."""
    make_farm(client)
    done = run("top", "--redis", server.url)
    assert done.returncode == 0, done.stderr
    assert "worker-0  busy" in done.stdout
    assert "\x1b" not in done.stdout


class Terminal:
    """A running `top`, on a terminal of its own."""

    def __init__(self, url: str) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (24, 80))
        self.before = termios.tcgetattr(self.slave)
        self.seen = b""
        os.set_blocking(self.master, False)
        self.process = subprocess.Popen(
            [*COMMAND, "top", "--redis", url],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=os.environ | {"TERM": "xterm-256color"},
            start_new_session=True,
        )

    def read(self) -> bytes:
        """Read what is there, and return all that was printed so far."""
        with contextlib.suppress(BlockingIOError):
            self.seen += os.read(self.master, 1 << 16)
        return self.seen

    def screen(self) -> bytes:
        """Return the newest whole screen."""
        return self.read().rsplit(HOME, 2)[-2]

    def wait(self) -> int:
        """Wait for the end, reading what is printed, and return the exit status."""
        wait_until(lambda: self.read() is not None and self.process.poll() is not None)
        self.read()
        return self.process.wait()


@pytest.fixture
def terminal(client: redis.Redis, server: LiveServer) -> Iterator[Terminal]:
    """Start `top` on a farm at work."""
    make_farm(client)
    terminal = Terminal(server.url)
    wait_until(lambda: b"worker-0" in terminal.read())
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.master)
    os.close(terminal.slave)


@pytest.mark.parametrize("end", ["q", "interrupt", "terminate"])
def test_it_ends_and_leaves_the_terminal_as_it_was(terminal: Terminal, end: str) -> None:
    """`top` ends by q, Ctrl-C or SIGTERM with status 0, and puts the terminal back."""
    if end == "q":
        os.write(terminal.master, b"q")
    else:
        number = signal.SIGINT if end == "interrupt" else signal.SIGTERM
        terminal.process.send_signal(number)
    assert terminal.wait() == 0
    assert b"\x1b[?1049l" in terminal.seen
    assert termios.tcgetattr(terminal.slave) == terminal.before


def test_it_follows_the_farm_over_an_outage(
    terminal: Terminal, client: redis.Redis, server: LiveServer
) -> None:
    """`top` shows a new job at its next look, and an outage until it is over."""
    make_job(client, 1, "newcomer")
    wait_until(lambda: b"newcomer" in terminal.screen())
    force_log(client)
    server.kill()
    wait_until(lambda: b"the server is away" in terminal.screen())
    server.start()
    wait_until(lambda: b"newcomer" in terminal.screen() and b"is away" not in terminal.screen())
