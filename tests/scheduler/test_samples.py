"""Tests of samples, which count what workers did in some seconds."""

import msgspec
import pytest

from embedfarm.contract.farm_client import FarmClient
from embedfarm.scheduler import samples
from embedfarm.scheduler.samples import SAMPLE_SECONDS, Sampler
from tests.scheduler.live import Start, beat, completion, fill, report
from tests.scheduler.support import farm as farm_state
from tests.scheduler.support import job
from tests.support import wait_until


def test_a_sample_has_what_was_done_since_the_last() -> None:
    """A sample has real tokens and chunks by worker, by job and by both, since the last one."""
    state = farm_state([job(waiting=2), job("other", waiting=1)], {"one": 10.0, "two": None})
    other = msgspec.structs.replace(completion("two", 500, 1.0), job="other", real_tokens=400)
    sampler = Sampler(100.0, SAMPLE_SECONDS)
    sampler.completed([completion("one", 1000, 1.0), other])
    sampler.completed([completion("one", 200, 1.0)])
    sampler.completed([msgspec.structs.replace(completion("two", 100, 1.0), first=True)])
    sample = sampler.take(state, 100.0 + SAMPLE_SECONDS)
    assert sample is not None
    assert sample.workers == {"one": (1200, 12), "two": (500, 6)}
    assert sample.jobs == {"job": (1300, 13), "other": (400, 5)}
    assert sample.job_workers == {"job": {"one": 1200, "two": 100}, "other": {"two": 400}}
    assert (sample.seconds, sample.backlog_tokens, sample.workers_alive) == (10, 300, 2)
    assert sample.started == ["two"]
    nothing = sampler.take(state, 100.0 + 2.5 * SAMPLE_SECONDS)
    assert nothing is not None
    assert (nothing.seconds, nothing.workers, nothing.jobs, nothing.job_workers) == (15, {}, {}, {})
    assert nothing.started == []


def test_jobs_of_one_micro_batch_are_counted_each() -> None:
    """What several jobs got of one micro-batch is theirs, and the worker's once."""
    sampler = Sampler(100.0, SAMPLE_SECONDS)
    jobs = {"job": (700, 7), "other": (300, 3)}
    sampler.completed([msgspec.structs.replace(completion("one", 1000, 1.0), jobs=jobs)])
    sample = sampler.take(farm_state([], {}), 100.0 + SAMPLE_SECONDS)
    assert sample is not None
    assert (sample.workers, sample.jobs) == ({"one": (1000, 10)}, jobs)
    assert sample.job_workers == {"job": {"one": 700}, "other": {"one": 300}}


def test_no_sample_before_its_time() -> None:
    """A sample is taken every ten seconds at most, and nothing is lost meanwhile."""
    state, sampler = farm_state([], {}), Sampler(0.0, SAMPLE_SECONDS)
    sampler.completed([completion("one", 1000, 1.0)])
    assert sampler.take(state, SAMPLE_SECONDS - 0.1) is None
    sample = sampler.take(state, SAMPLE_SECONDS)
    assert sample is not None
    assert sample.workers == {"one": (1000, 10)}


def test_a_standby_goes_on(farm: FarmClient, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples on the server have what was reported before and after a scheduler was replaced."""
    monkeypatch.setattr(samples, "SAMPLE_SECONDS", 0.2)
    fill(farm, 64)
    beat(farm, "worker")

    def chunks() -> int:
        return sum(
            sample.workers.get("worker", (0, 0))[1] for _, sample in farm.statistics.samples(60)
        )

    first = start()
    wait_until(lambda: farm.statistics.samples(60))
    report(farm, "worker", 600, 1.0)
    wait_until(lambda: chunks() == 6)
    second = start()
    first.stop()
    wait_until(lambda: second.scheduler.fence)
    taken = len(farm.statistics.samples(60))
    wait_until(lambda: len(farm.statistics.samples(60)) > taken)
    report(farm, "worker", 300, 1.0)
    wait_until(lambda: chunks() == 9)
    assert {sample.workers_alive for _, sample in farm.statistics.samples(60)} == {1}


def test_a_week_is_kept_in_steps_of_ten_minutes(
    farm: FarmClient, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of ten minutes have the jobs of all workers together, and are read for a day."""
    monkeypatch.setattr(samples, "LONG_SAMPLE_SECONDS", 0.2)
    fill(farm, 64)
    beat(farm, "worker")
    start()
    day = 86_400.0
    wait_until(lambda: farm.statistics.samples(day))
    report(farm, "worker", 600, 1.0)

    def chunks() -> int:
        return sum(each.jobs.get("job", (0, 0))[1] for _, each in farm.statistics.samples(day))

    wait_until(lambda: chunks() == 6)
    assert all(not sample.workers for _, sample in farm.statistics.samples(day))
    assert farm.statistics.samples(3600) == []  # of these ten seconds none is over
