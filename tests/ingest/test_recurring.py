"""Tests of jobs that are enqueued by the clock."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.settings import Recurring, Settings
from embedfarm.ingest.recurring import Timetable, identify
from tests.farm.harness import run
from tests.ingest.rq_farm import START_SECONDS, Door
from tests.support import LiveServer, wait_until

HOURLY: Final = Recurring(cron="30 * * * *", task="cleanup", arguments={"seconds": 5})
DAY: Final = 1_800_057_600.0  # midnight
HOUR: Final = 3600


@pytest.fixture
def timetables(server: LiveServer, client: redis.Redis) -> list[Timetable]:
    """Return the timetables of two processes."""
    settings = Settings(redis_url=server.url, recurring=[HOURLY])
    return [Timetable(client, settings) for _ in range(2)]


def queued(client: redis.Redis) -> list[str]:
    """Return the ids in the queue, oldest first."""
    return [each.decode() for each in client.lrange("rq:queue:embedfarm", 0, -1)]  # type: ignore[union-attr] # a sync client


def job_id(due: float) -> str:
    """Return the id of the run that was due at a time."""
    return f"cleanup-{identify(HOURLY)}-{int(due)}"


def test_a_run_is_enqueued_once(timetables: list[Timetable], client: redis.Redis) -> None:
    """A run is enqueued by one of two processes, even if the other takes over unknowingly."""
    one, other = timetables
    for now in (DAY, DAY + 10, DAY + 1799):
        one.tick(now)
        other.tick(now)
    assert queued(client) == []  # what was due before the setting was there is not made up for
    one.tick(DAY + 1801)
    other.tick(DAY + 1801)
    assert queued(client) == [job_id(DAY + 1800)]
    client.delete(wire.INGEST)
    client.set(wire.recurring_key(identify(HOURLY)), int(DAY))
    other.tick(DAY + 1802)
    one.tick(DAY + 1803)
    assert queued(client) == [job_id(DAY + 1800)]


def test_missed_runs_are_made_up_for_once(timetables: list[Timetable], client: redis.Redis) -> None:
    """Only the newest run is enqueued after ten hours in which nobody was there."""
    one, other = timetables
    one.tick(DAY)
    client.delete(wire.INGEST)
    for now in (DAY + 10 * HOUR, DAY + 10 * HOUR + 1):
        other.tick(now)
    assert queued(client) == [job_id(DAY + 9.5 * HOUR)]


def test_who_lost_the_lock_notes_nothing(timetables: list[Timetable], client: redis.Redis) -> None:
    """A process that slept with the lock in its hand cannot move the newest run, nor back."""
    one, _ = timetables
    one.tick(DAY)
    key = wire.recurring_key(identify(HOURLY))
    before = client.get(key)
    advance: Any = one._advance
    assert advance(keys=[wire.INGEST, key], args=[99, DAY + HOUR, 60, DAY + HOUR]) == 0
    assert advance(keys=[wire.INGEST, key], args=[1, 5, 60, DAY]) == 1
    assert client.get(key) == before


def test_a_clock_that_was_ahead_silences_no_job(
    timetables: list[Timetable], client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that a wrong clock has noted far ahead counts for none, and the log says so."""
    one, other = timetables
    one.tick(DAY)
    one.tick(DAY + 400 * 24 * HOUR)
    wrong = job_id(DAY + 400 * 24 * HOUR - 1800)
    assert queued(client) == [wrong]
    client.delete(wire.INGEST)
    other.tick(DAY + 1)
    assert "more than an hour ahead" in caplog.text
    for now in (DAY + 1801, DAY + 1802, DAY + HOUR + 1801):
        other.tick(now)
    assert queued(client) == [wrong, job_id(DAY + 1800), job_id(DAY + HOUR + 1800)]


def test_a_clock_that_is_a_little_behind(timetables: list[Timetable], client: redis.Redis) -> None:
    """A process that takes over with a clock some minutes behind repeats nothing."""
    one, other = timetables
    one.tick(DAY)
    one.tick(DAY + 1801)
    noted = client.get(wire.recurring_key(identify(HOURLY)))
    client.delete(wire.INGEST, "rq:queue:embedfarm", f"rq:job:{job_id(DAY + 1800)}")
    for now in (DAY + 1200, DAY + 1801, DAY + 1802):
        other.tick(now)
        assert client.get(wire.recurring_key(identify(HOURLY))) == noted
    assert queued(client) == []


@pytest.mark.parametrize("entry", [("61 * * * *", "cleanup"), ("* * * * *", "os.system")])
def test_a_wrong_entry_ends_the_role(server: LiveServer, entry: tuple[str, str]) -> None:
    """A wrong cron expression or task ends the role with status 2, and a sentence names it."""
    setting = f'[{{"cron": "{entry[0]}", "task": "{entry[1]}"}}]'
    done = run("ingest", "--redis", server.url, environment={"EMBEDFARM_RECURRING": setting})
    assert done.returncode == 2
    assert entry[entry[1] != "cleanup"] in done.stderr


def test_two_roles_run_it_once(door: Door, tmp_path: Path) -> None:
    """Two `embedfarm ingest` run each due time of a job once, and enqueue it in JSON."""
    setting = '[{"cron": "* * * * * */2", "task": "cleanup", "arguments": {"seconds": 9}}]'
    with ExitStack() as stack:
        for name in ("one", "two"):
            home = str(tmp_path / name)
            # A lease that a busy machine does not outlast: what looks lost is run again.
            settings = {"recurring": setting, "state_directory": home, "ingest_lease_seconds": 30}
            stack.enter_context(door.ingest(**settings))
        wait_until(lambda: door.queue.finished_job_registry.get_job_count() >= 2, START_SECONDS)
    ids = door.queue.finished_job_registry.get_job_ids()
    due = sorted(int(each.rpartition("-")[2]) for each in ids)
    assert len(set(due)) == len(due)
    assert all(each % 2 == 0 for each in due)
    assert [door.connection.xlen(f"rq:results:{each}") for each in ids] == [1] * len(ids)
