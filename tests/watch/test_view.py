"""Tests of the view of the farm in one look, on the real server."""

import json
from typing import Any

import msgspec
import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.pace import TimedMicroBatch
from embedfarm.contract.settings import Settings
from embedfarm.watch.view import ENDED_MAX, JOBS_MAX, FarmReader
from tests.contract.little_job import CHUNKS, COMPLETION, SAMPLE, embed, heartbeat, make_job

BLOCKS = 5


def beat(farm: FarmClient, name: str, **facts: Any) -> None:  # noqa: ANN401 -- fields of any type
    """Send a heartbeat of a worker with some facts."""
    farm.beat(msgspec.structs.replace(heartbeat(name), **facts), 60)


def report(farm: FarmClient, **facts: Any) -> None:  # noqa: ANN401 -- fields of any type
    """Report a completed micro-batch."""
    farm.statistics.report(msgspec.structs.replace(COMPLETION, **facts), 100)


def embed_two(farm: FarmClient) -> None:
    """Make a job of five blocks: two are embedded, one with a failed chunk, and one is leased."""
    job = make_job(farm.client, BLOCKS)
    job.close(BLOCKS * CHUNKS)
    entries = job.stream.read("one", 3)
    job.stream.commit([embed(entries[0]), embed(entries[1], 3)])


def test_figures_of_a_busy_farm(client: redis.Redis) -> None:
    """Each figure is what jobs, workers and micro-batches amount to, and goes into JSON."""
    farm = FarmClient(client)
    farm.plans.elect("scheduler", 60)
    embed_two(farm)
    gpu = {"memory_used_bytes": 3.0, "memory_total_bytes": 8.0, "temperature_celsius": 61.0}
    beat(farm, "one", state="busy", job="little", model="null:2", device_facts=gpu)
    beat(farm, "two", device_facts={"rss_bytes": 5.0})
    report(farm)
    view = FarmReader(farm).read()
    assert (view.tokens_per_second, view.chunks_per_second) == pytest.approx((36, 4))
    assert (view.backlog_chunks, view.backlog_tokens) == (3 * CHUNKS, 3 * 10 * CHUNKS)
    assert view.backlog_seconds == pytest.approx((1.5, 1.5))
    assert (view.reading, view.chunks_failed, view.jobs_total) == (0, 1, 1)
    assert view.scheduler_active
    (job,) = view.jobs
    assert (job.job, job.waiting_blocks, job.chunks_left) == ("little", 2, 6)
    assert job.seconds_left == pytest.approx((1.5, 1.5))
    assert (job.tokens_per_second, job.chunks_per_second) == pytest.approx((36, 4))
    one, two = view.workers
    assert (one.state, one.job, one.share, two.state, two.share) == ("busy", "little", 1, "idle", 0)
    assert (one.memory_used_bytes, one.temperature_celsius) == (3, 61)
    assert (two.memory_used_bytes, two.temperature_celsius) == (5, None)
    assert json.loads(msgspec.json.encode(view))["backlog_chunks"] == 6


def test_an_empty_farm_has_a_view(client: redis.Redis) -> None:
    """An empty farm has a view that says that scheduler and workers are missing."""
    view = FarmReader(FarmClient(client)).read()
    assert (view.tokens_per_second, view.backlog_chunks, view.backlog_seconds) == (0, 0, (0, 0))
    assert (view.jobs, view.workers, view.rates) == ((), (), ())
    assert [each.text for each in view.bottlenecks] == [
        "no scheduler: workers go on by their own rates",
        "no workers",
    ]


def test_a_reader_adds_what_is_new_to_its_curves(client: redis.Redis) -> None:
    """A second look has the first sample once, the second after it, and shares out of both."""
    farm = FarmClient(client)
    reader = FarmReader(farm)
    beat(farm, "one")
    beat(farm, "two")
    farm.statistics.sample(SAMPLE)
    assert [each.tokens_per_second for each in reader.read().rates] == [1.8]
    farm.statistics.sample(
        msgspec.structs.replace(SAMPLE, workers={"two": (54, 6)}, jobs={"other": (54, 6)})
    )
    view = reader.read()
    assert [each.chunks_per_second for each in view.rates] == pytest.approx([0.2, 0.6])
    assert [each.share for each in view.workers] == [0.25, 0.75]
    assert (view.rates[0].backlog_tokens, view.rates[0].workers_alive) == (60, 1)


def test_samples_widen_what_is_foretold(client: redis.Redis) -> None:
    """The end is forecast from the pace now and the averages: 4 and 0.1 chunks/s give a range."""
    farm = FarmClient(client)
    embed_two(farm)
    beat(farm, "one", state="busy")
    farm.statistics.sample(msgspec.structs.replace(SAMPLE, seconds=20.0))
    report(farm)
    (job,) = FarmReader(farm).read().jobs
    assert job.seconds_left == pytest.approx((6 / 4, 6 / 0.1))


def test_only_live_workers_have_a_pace(client: redis.Redis) -> None:
    """A worker that loads a model has the pace of before, and one that is gone has none."""
    farm = FarmClient(client)
    embed_two(farm)
    report(farm)
    for state in ("loading", "busy"):
        beat(farm, "one", state=state)
        view = FarmReader(farm).read()
        assert view.jobs[0].chunks_per_second == view.chunks_per_second == pytest.approx(4)
    farm.leave("one")
    view = FarmReader(farm).read()
    assert (view.jobs[0].seconds_left, view.chunks_per_second) == (None, 0)


def test_no_end_is_foretold_of_a_job_that_stands(client: redis.Redis) -> None:
    """A paused job has no forecast end, and is not in the time for the backlog."""
    farm = FarmClient(client)
    embed_two(farm)
    report(farm)
    farm.job("little").pause()
    view = FarmReader(farm).read()
    assert view.jobs[0].seconds_left is None
    assert view.backlog_seconds is None


def test_a_cancelled_job_is_not_in_work(client: redis.Redis) -> None:
    """A cancelled job is among those that have ended, and in no count of those in work."""
    farm = FarmClient(client)
    embed_two(farm)
    farm.job("little").cancel()
    view = FarmReader(farm).read()
    assert (view.jobs, view.jobs_total) == ((), 0)
    assert [each.job for each in view.ended] == ["little"]
    farm.end("little", "cancelled", "", Settings(), drained_upto=3)
    view = FarmReader(farm).read()
    (job,) = view.ended
    assert (job.job, job.drained_upto, job.ended) == ("little", 3, True)


def test_no_end_is_foretold_of_a_job_that_is_being_read(client: redis.Redis) -> None:
    """A job that is still being read has no forecast end, and is counted as such."""
    farm = FarmClient(client)
    make_job(client, BLOCKS)
    beat(farm, "one")
    report(farm)
    view = FarmReader(farm).read()
    assert (view.jobs[0].chunks_left, view.jobs[0].seconds_left, view.reading) == (None, None, 1)
    assert view.backlog_seconds is not None


def test_jobs_that_have_ended_stay_in_sight(client: redis.Redis) -> None:
    """The last ended jobs are in the view, apart from those that are in work."""
    farm = FarmClient(client)
    embed_two(farm)
    for number in range(ENDED_MAX + 2):
        make_job(client, 1, f"job-{number}").end("finished", "", 60)
    view = FarmReader(farm).read()
    assert [each.job for each in view.jobs] == ["little"]
    assert [each.job for each in view.ended] == ["job-6", "job-5", "job-4", "job-3", "job-2"]
    assert view.backlog_chunks == 3 * CHUNKS


def test_a_place_without_a_job_is_no_job(client: redis.Redis) -> None:
    """A place that is reserved for a job to come does not count as a job."""
    farm = FarmClient(client)
    farm.admit("coming", 10)
    view = FarmReader(farm).read()
    assert (view.jobs, view.jobs_total) == ((), 0)
    assert not any("jobs are looked at" in each.text for each in view.bottlenecks)


def test_the_newest_jobs_are_looked_at(client: redis.Redis) -> None:
    """A view of more than a thousand jobs has the newest, oldest first, and says so."""
    names = {f"job-{number:04}": number for number in range(JOBS_MAX + 5)}
    pipe = client.pipeline()
    for name in names:
        pipe.hset(wire.JobKeys(name).meta, mapping={"spec": b"", "state": "closed"})
    pipe.zadd(wire.JOBS, names)
    pipe.execute()
    view = FarmReader(FarmClient(client)).read()
    assert [each.job for each in view.jobs] == list(names)[5:]
    assert view.jobs_total == JOBS_MAX + 5
    assert view.bottlenecks[-1].text == "only the newest 1,000 of 1,005 jobs are looked at"


def test_a_look_takes_few_round_trips(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes eight round trips, however many jobs and workers there are."""
    farm, pool, trips = FarmClient(client), client.connection_pool, list[None]()
    for number in range(4):
        make_job(client, 1, f"job-{number}")
        beat(farm, f"worker-{number}")
    connection = pool.get_connection

    def counted(*words: Any, **options: Any) -> Any:  # noqa: ANN401 -- whatever the pool takes
        trips.append(None)
        return connection(*words, **options)

    monkeypatch.setattr(pool, "get_connection", counted)
    assert len(FarmReader(farm).read().jobs) == 4
    assert len(trips) == 8


def test_what_others_wrote_is_skipped(client: redis.Redis) -> None:
    """Samples and completions of another version, or none at all, hide no others."""
    farm = FarmClient(client)
    farm.statistics.sample(SAMPLE)
    client.xadd(wire.SAMPLES, {"sample": b"\x02" + encode(SAMPLE)[1:]})
    client.xadd(wire.SAMPLES, {"other": b""})
    report(farm)
    client.xadd(wire.EVENTS, {"done": b"\x02"})
    client.xadd(wire.EVENTS, {"job": "little"})
    assert [sample for _, sample in farm.statistics.samples(60)] == [SAMPLE]
    assert [len(bars) for bars in farm.statistics.recent_batches(60).values()] == [1]
    assert len(FarmReader(farm).read().rates) == 1


def test_samples_end_when_they_were_noted(client: redis.Redis) -> None:
    """Samples and bars come with the server's time, oldest first, and older ones stay out."""
    farm = FarmClient(client)
    client.xadd(wire.SAMPLES, {"sample": encode(SAMPLE)}, id="1000-0")
    report(farm, worker="two", chunks=7)
    report(farm, worker="two", chunks=8)
    report(farm)
    farm.statistics.sample(SAMPLE)
    seconds, microseconds = client.time()
    now = seconds + microseconds / 1e6
    ((end, sample),) = farm.statistics.samples(60)
    assert 0 <= now - end < 30
    assert sample == SAMPLE
    bars = farm.statistics.recent_batches(60)
    assert [bar.chunks for bar in bars["two"]] == [7, 8]
    (bar,) = bars["one"]
    assert bar == TimedMicroBatch(bar.end, 0.5, "little", 2, 18)
    assert 0 <= now - bar.end < 30


def test_an_hour_of_samples_is_kept(client: redis.Redis) -> None:
    """The stream does not grow with the farm's age."""
    farm = FarmClient(client)
    for _ in range(365):
        farm.statistics.sample(SAMPLE)
    assert client.xlen(wire.SAMPLES) == 360


def test_idle_times_slow_the_farm_down(client: redis.Redis) -> None:
    """Samples without progress count in the time for the backlog, once something was done."""
    farm = FarmClient(client)
    embed_two(farm)
    beat(farm, "one")
    idle = msgspec.structs.replace(SAMPLE, workers={}, jobs={})
    for sample in (idle, SAMPLE, idle):
        farm.statistics.sample(sample)
    tokens = 6 * 9  # as the model counts
    assert FarmReader(farm).read().backlog_seconds == pytest.approx([tokens / 0.9] * 2)
