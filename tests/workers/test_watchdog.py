"""Tests of the watchdog: it finds work that hangs, and nothing else."""

import os
import signal
import subprocess
import sys
import threading
from typing import Final

import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings
from embedfarm.workers.watchdog import LOCKED_SECONDS_MIN, LOOK_SECONDS_MAX, Watchdog, Watched
from tests.support import LiveServer, wait_until
from tests.workers.support import block_of, create_job

SETTINGS = Settings(hang_seconds=1.0, hang_factor=4)
TTL_SECONDS = 4.0


def nothing() -> float:
    """A limit that is over at once."""
    return 0.0


def look_after(watchdog: Watchdog, watched: Watched, seconds: float) -> Watched | None:
    """The result of a look that comes so many seconds after the one before."""
    watched._seen -= seconds  # time is passing for it
    return watchdog.look()


def test_limits_follow_the_prediction() -> None:
    """A limit is the predicted time by the factor, with a minimum that counts if it is unknown."""
    watchdog = Watchdog(SETTINGS)
    assert [watchdog.bound(seconds) for seconds in (0.01, 0.25, 2.0, 0.0)] == [1.0, 1.0, 8.0, 4.0]


def test_what_takes_too_long_is_found() -> None:
    """Work that exceeds its own limit is found, and no longer once it has ended."""
    watchdog = Watchdog(SETTINGS)
    with watchdog.watch("other", lambda: 100.0), watchdog.watch("this", lambda: 3.0):
        other, this = watchdog._watched  # to let time pass
        looks = [look_after(watchdog, this, 0.9) for _ in range(4)]
        assert looks == [None, None, None, this]
        assert other.spent < 1.0
    assert watchdog.look() is None


def test_time_in_which_nothing_ran_does_not_count() -> None:
    """Time in which the process or machine was stopped counts as one look, at most a second."""
    watchdog = Watchdog(SETTINGS)
    with watchdog.watch("this", nothing):
        (watched,) = watchdog._watched  # to let time pass
        assert look_after(watchdog, watched, 3600.0) is None
        assert watched.spent <= LOOK_SECONDS_MAX


def test_what_stops_others_does_not_count_for_them() -> None:
    """While something stops all else, its own time alone counts; afterwards that of all again."""
    watchdog = Watchdog(SETTINGS)
    with watchdog.watch("waiting", lambda: 2.0):
        (waiting,) = watchdog._watched  # to let time pass
        with watchdog.watch("load", lambda: 100.0, stops_others=True):
            load = watchdog._watched[1]
            for _ in range(4):
                waiting._seen -= 1.0
                assert look_after(watchdog, load, 1.0) is None
            assert waiting.spent == 0.0
            assert load.spent >= 4.0
        looks = [look_after(watchdog, waiting, 0.9) for _ in range(3)]
    assert looks == [None, None, waiting]


def test_it_looks_until_it_is_over() -> None:
    """A watchdog hands a hang over once; without one it ends with the worker."""
    ended, found = threading.Event(), list[str]()
    watchdog = Watchdog(SETTINGS)
    with watchdog.watch("this", nothing):
        watchdog.run(ended, lambda hung: found.append(hung.what))
    assert found == ["this"]
    ended.set()
    watchdog.run(ended, lambda hung: found.append(hung.what))
    assert found == ["this"]


LOCKED_AT_ITS_END: Final = """
import threading
from embedfarm.contract.settings import Settings
from embedfarm.workers import watchdog
from tests import poison_worker
vars(watchdog)["LOCKED_SECONDS_MIN"] = 0.5
ended = threading.Event()
threading.Timer(0.1, ended.set).start()
watchdog.Watchdog(Settings(hang_seconds=0.5, hang_factor=1)).run(ended, print)
poison_worker.hold_lock(busy={busy})
"""


@pytest.mark.parametrize("busy", [True, False])
def test_a_process_that_is_locked_at_its_end_is_ended(*, busy: bool) -> None:
    """A stage that was left behind, and holds the interpreter's lock, does not keep the process.

    It may be at work, or wait for something that never comes; the log says where.
    """
    command = [sys.executable, "-c", LOCKED_AT_ITS_END.format(busy=busy)]
    done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 1
    assert "in hold_lock" in done.stderr


def test_a_loaded_machine_locks_nothing() -> None:
    """However short the limits of a device batch are, threads may wait for the lock for seconds."""
    assert Watchdog(Settings(hang_seconds=0.1, hang_factor=1)).lock_limit() == LOCKED_SECONDS_MIN
    assert Watchdog(Settings()).lock_limit() > LOCKED_SECONDS_MIN


def test_a_stopped_process_does_not_hang(server: LiveServer, client: redis.Redis) -> None:
    """A worker stopped in mid-batch for long goes on after SIGCONT and ends well."""
    farm = FarmClient(client)
    job = create_job(farm, [block_of(0, 300)], model="null:8:300")
    limits = {"HANG_SECONDS": 3, "HANG_FACTOR": 1, "HEARTBEAT_TTL_SECONDS": TTL_SECONDS}
    environment = os.environ | {f"EMBEDFARM_{name}": str(v) for name, v in limits.items()}
    environment["EMBEDFARM_REDIS_URL"] = server.url
    command = [sys.executable, "-m", "embedfarm.workers.main", "--device", "cpu-0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        wait_until(lambda: [beat.state for beat in farm.workers()] == ["busy"], 30)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not farm.workers(), 30)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: job.status().embedded, 30)
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, job.status().chunks_done) == (0, 300), errors
