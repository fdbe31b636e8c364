"""Tests of the supervisor, with real child processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract import processes
from embedfarm.contract.processes import Child, Exit, Supervisor
from tests.support import wait_until

IMPORTS: Final = "import signal, threading;"
READY: Final = "print('ready', flush=True);"
FOREVER: Final = f"{IMPORTS}{READY} threading.Event().wait(60)"
STUBBORN: Final = f"{IMPORTS} signal.signal(15, signal.SIG_IGN);{READY} threading.Event().wait(60)"


def python(program: str, name: str = "child") -> Child:
    """A child that runs a Python program."""
    return Child(name, [sys.executable, "-c", program], {})


def output(directory: Path, name: str = "child") -> str:
    """What a child has written so far."""
    log = directory / f"{name}.log"
    return log.read_text() if log.is_file() else ""


def gone(pid: int) -> bool:
    """Whether a process has ended; an orphan's zombie waits for an init that may not reap."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_killed_child_starts_again(tmp_path: Path) -> None:
    """A child that got kill -9 runs again under another pid, and its exit is on record."""
    with Supervisor([python(FOREVER)], tmp_path, drain_seconds=10) as supervisor:
        wait_until(lambda: output(tmp_path).count("ready") == 1)
        first = supervisor.pids["child"]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: output(tmp_path).count("ready") == 2)
        assert supervisor.pids["child"] != first
        assert [(e.name, e.status, e.restarted) for e in supervisor.exits] == [("child", -9, True)]
        assert supervisor.exits[0].time == pytest.approx(time.time(), abs=60)
        assert supervisor.failed is None


def test_back_off_grows_between_starts(tmp_path: Path) -> None:
    """A child that dies at once starts again after 0.1, 0.2 and 0.4 s at least."""
    with Supervisor([python("raise SystemExit(3)")], tmp_path, drain_seconds=10) as supervisor:
        wait_until(lambda: len(supervisor.exits) >= 4)
        times = [ended.time for ended in supervisor.exits]
    for before, after, pause in zip(times, times[1:], (0.1, 0.2, 0.4), strict=False):
        assert after - before >= pause


@given(st.floats(0, 100), st.floats(0, 100))
def test_back_off_is_bounded_and_resets(pause: float, lived_seconds: float) -> None:
    """A pause is 0.1 to 5 s, does not shrink after a short life, and resets after one of 10 s."""
    following = processes.next_pause(pause, lived_seconds)
    assert 0.1 <= following <= 5.0
    if lived_seconds >= 10:
        assert following == 0.1
    else:
        assert following >= min(pause, 5.0)


def test_stop_drains(tmp_path: Path) -> None:
    """SIGTERM lets a child finish what it does before `stop` returns; it counts as no failure."""
    program = (
        "from embedfarm.contract.processes import stop_when_asked; stop = stop_when_asked();"
        f"{READY} stop.wait(60); print('drained')"
    )
    children = [python(program, name) for name in ("a", "b")]
    with Supervisor(children, tmp_path, drain_seconds=10) as supervisor:
        wait_until(lambda: all("ready" in output(tmp_path, name) for name in ("a", "b")))
    assert all("drained" in output(tmp_path, name) for name in ("a", "b"))
    assert {(e.status, e.restarted) for e in supervisor.exits} == {(0, False)}
    assert supervisor.failed is None
    assert supervisor.pids == {}
    supervisor.stop()


def test_stop_reaches_a_child_that_is_starting(tmp_path: Path) -> None:
    """A stop that comes just before the child's process exists is not lost."""
    supervisor = Supervisor([], tmp_path, drain_seconds=10)
    supervisor.stop()
    with supervisor._spawn(python(FOREVER)) as process:
        assert process.wait(10) == -signal.SIGTERM


def test_stop_signal_is_the_childs_own(tmp_path: Path) -> None:
    """A child with another stop signal gets that one."""
    child = Child("child", [sys.executable, "-c", FOREVER], {}, stop_signal=signal.SIGUSR1)
    with Supervisor([child], tmp_path, drain_seconds=10) as supervisor:
        wait_until(lambda: "ready" in output(tmp_path))
    assert [e.status for e in supervisor.exits] == [-signal.SIGUSR1]


def test_a_signal_stops_whatever_is_done(tmp_path: Path) -> None:
    """A signal stops a process even while its thread holds the lock of the stop event."""
    program = (
        "from embedfarm.contract.processes import stop_when_asked; stop = stop_when_asked();"
        f"{READY} all(iter(lambda: not stop.wait(0), False)); print('stopped')"
    )
    children = [python(program, name) for name in "abcdefgh"]
    with Supervisor(children, tmp_path, drain_seconds=60) as supervisor:
        wait_until(lambda: all("ready" in output(tmp_path, each.name) for each in children), 60)
    assert all("stopped" in output(tmp_path, each.name) for each in children)
    assert {each.status for each in supervisor.exits} == {0}


@pytest.mark.paced
def test_child_that_ignores_the_stop_is_killed(tmp_path: Path) -> None:
    """All children together have `drain_seconds` to end; then they get SIGKILL."""
    children = [python(STUBBORN, name) for name in ("a", "b", "c")]
    with Supervisor(children, tmp_path, drain_seconds=0.5) as supervisor:
        wait_until(lambda: all("ready" in output(tmp_path, name) for name in ("a", "b", "c")))
        begun = time.monotonic()
    assert 0.5 <= time.monotonic() - begun < 3
    assert [e.status for e in supervisor.exits] == [-9, -9, -9]


@pytest.mark.paced
def test_stop_does_not_wait_for_the_back_off(tmp_path: Path) -> None:
    """A child that waits for its restart does not hold up the stop."""
    exits = threading.Semaphore(0)
    with Supervisor(
        [python("raise SystemExit(3)")], tmp_path, 30, on_exit=lambda _: exits.release()
    ):
        for _ in range(3):
            assert exits.acquire(timeout=10)
        begun = time.monotonic()
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("by", ["stop", "crash"])
def test_grandchildren_end_with_the_child(by: str, tmp_path: Path) -> None:
    """A grandchild that ignores SIGTERM dies with its group, whether the child stops or crashes."""
    program = (
        "import subprocess, sys, threading;"
        f"p = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], stdout=subprocess.PIPE);"
        "p.stdout.readline(); print('grandchild', p.pid, 'up', flush=True);"
        "threading.Event().wait(60)"
    )
    with Supervisor([python(program)], tmp_path, drain_seconds=10) as supervisor:
        wait_until(lambda: "up" in output(tmp_path))
        grandchild = int(output(tmp_path).split()[1])
        assert not gone(grandchild)
        if by == "crash":
            os.kill(supervisor.pids["child"], signal.SIGKILL)
            wait_until(lambda: gone(grandchild))
    wait_until(lambda: gone(grandchild))


def test_fatal_status_is_reported_with_the_log(tmp_path: Path) -> None:
    """A configuration error is not tried again; its error carries the end of the log, not all."""
    program = "print('x' * 9000); print('no such model', flush=True); raise SystemExit(2)"
    ended: list[Exit] = []
    reported = threading.Event()

    def report(one: Exit) -> None:
        ended.append(one)
        reported.set()

    with Supervisor([python(program)], tmp_path, drain_seconds=10, on_exit=report) as supervisor:
        assert reported.wait(10)
        assert [(e.name, e.status, e.restarted) for e in ended] == [("child", 2, False)]
        assert str(supervisor.failed).startswith("child ended with status 2")
        assert str(supervisor.failed).endswith("no such model\n")
        assert len(str(supervisor.failed)) < 5000


def test_end_without_being_asked_is_reported(tmp_path: Path) -> None:
    """A child that ends by itself with status 0 is not started again, and that is a failure."""
    with Supervisor([python("print('bye')")], tmp_path, drain_seconds=10) as supervisor:
        wait_until(lambda: supervisor.failed)
        wait_until(lambda: len(supervisor.exits) == 1)
        assert str(supervisor.failed).endswith("bye\n")
    assert len(supervisor.exits) == 1


def test_missing_program_starts_nothing(tmp_path: Path) -> None:
    """A program that does not exist is an error that names child and program, before any start."""
    supervisor = Supervisor(
        [python(FOREVER, "good"), Child("server", ["no-such-program"], {})], tmp_path, 10
    )
    with pytest.raises(FileNotFoundError, match="server: no program 'no-such-program'"):
        supervisor.start()
    assert supervisor.pids == {}


def test_start_that_the_system_refuses_is_retried(tmp_path: Path) -> None:
    """A child whose log cannot be opened is started once it can."""
    obstacle = tmp_path / "child.log"
    obstacle.mkdir()
    with Supervisor([python(FOREVER)], tmp_path, drain_seconds=10) as supervisor:
        wait_until(lambda: supervisor.exits)
        assert (supervisor.exits[0].status, supervisor.exits[0].restarted) == (127, True)
        obstacle.rmdir()
        wait_until(lambda: "ready" in output(tmp_path))


def test_environment_is_added(tmp_path: Path) -> None:
    """A child sees the supervisor's environment and its own additions."""
    program = "import os; print(os.environ['PATH'] and os.environ['CUDA_VISIBLE_DEVICES'])"
    child = Child("child", [sys.executable, "-c", program], {"CUDA_VISIBLE_DEVICES": "GPU-1"})
    with Supervisor([child], tmp_path, drain_seconds=10):
        wait_until(lambda: output(tmp_path) == "GPU-1\n")


LIFELINE_CHILD: Final = (
    "import os, threading; from embedfarm.contract.processes import watch_parent_pipe;"
    "end = threading.Event(); watch_parent_pipe(end.set); print(os.getpid(), flush=True);"
    "end.wait(60) and print('noticed', flush=True)"
)
SUPERVISE: Final = """
import sys, threading
from pathlib import Path
from embedfarm.contract.processes import Child, Supervisor
child = Child("child", sys.argv[3:], {}, die_with_parent=sys.argv[2] == "tied")
with Supervisor([child], Path(sys.argv[1]), drain_seconds=10) as supervisor:
    threading.Event().wait(60)
"""


def supervise(directory: Path, tie: str, command: list[str]) -> "subprocess.Popen[bytes]":
    """Start a process that supervises one child."""
    return subprocess.Popen([sys.executable, "-c", SUPERVISE, str(directory), tie, *command])


def test_child_notices_that_its_supervisor_was_killed(tmp_path: Path) -> None:
    """A child whose supervisor got kill -9 notices by the parent pipe, and ends by itself."""
    with supervise(tmp_path, "untied", [sys.executable, "-c", LIFELINE_CHILD]) as supervisor:
        wait_until(lambda: output(tmp_path).endswith("\n"))
        supervisor.kill()
    pid = int(output(tmp_path).split()[0])
    wait_until(lambda: gone(pid))
    assert "noticed" in output(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system signals a parent's death")
def test_tied_child_dies_with_its_supervisor(tmp_path: Path) -> None:
    """A program that does not watch the parent pipe gets SIGTERM when its supervisor is killed."""
    command = ["sh", "-c", "echo $$; grep SigIgn /proc/$$/status; exec cat /dev/zero > /dev/null"]
    with supervise(tmp_path, "tied", command) as supervisor:
        wait_until(lambda: re.search("SigIgn:.*\n$", output(tmp_path)))
        supervisor.kill()
    assert output(tmp_path).count("\n") == 2, output(tmp_path)
    pid, _, ignored = output(tmp_path).split()
    wait_until(lambda: gone(int(pid)))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not int(ignored, 16) >> (number - 1) & 1, "Python's own choice, not the program's"


def test_lifeline_of_an_unsupervised_process_is_ignored() -> None:
    """A process with a closed stdin and no supervisor does not take that for a supervisor's end."""
    program = (
        "import threading; from embedfarm.contract.processes import watch_parent_pipe;"
        "end = threading.Event(); watch_parent_pipe(end.set);"
        "print(threading.active_count(), end.is_set())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert ended.stdout == b"1 False\n"


def test_lifeline_does_not_disturb_the_exit(tmp_path: Path) -> None:
    """A child that ends while it watches the parent pipe exits with its own status, silently."""
    program = (
        "import sys; from embedfarm.contract.processes import watch_parent_pipe;"
        "import threading; watch_parent_pipe(print); threading.Event().wait(0.2); sys.exit(2)"
    )
    with Supervisor([python(program)], tmp_path, drain_seconds=10) as supervisor:
        wait_until(lambda: supervisor.exits)
    assert supervisor.exits[0].status == 2
    assert output(tmp_path) == ""


def test_a_child_that_cannot_start_is_told(tmp_path: Path) -> None:
    """A child that fails at each start gives an error with the end of its log, and starts again."""
    broken = Child("broken", [sys.executable, "-c", "raise SystemExit('no such library')"], {})
    sound = Child("sound", [sys.executable, "-c", "import time; time.sleep(60)"], {})
    with Supervisor([broken, sound], tmp_path, 5.0) as supervisor:
        wait_until(lambda: supervisor.unstartable("broken") is not None, 30)
        assert "no such library" in str(supervisor.unstartable("broken"))
        assert supervisor.unstartable() is None, "others go on"
        assert supervisor.failed is None
        starts = len(supervisor.exits)
        wait_until(lambda: len(supervisor.exits) > starts, 30)
