"""Tests of the interactive lane with real workers: who answers, and in what time."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from embedfarm.contract import wire
from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.lane import Lane, LaneLate, LaneRefused, LaneUnserved, TextsFailed, cut
from embedfarm.contract.load_forecast import seconds_until_loaded
from embedfarm.contract.model_files import resolve
from embedfarm.contract.records import Block
from embedfarm.contract.similarity import cosine
from embedfarm.workers import lane_loader, model_room, model_store
from embedfarm.workers.budgets import Budgets
from embedfarm.workers.embedder import Embedder
from embedfarm.workers.engines.engine import DeviceFailed, Engine, Finish, Tokenised
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.host_memory import AvailableMemory
from embedfarm.workers.leases import MicroBatch
from embedfarm.workers.timings import Timings
from embedfarm.workers.worker import Worker
from tests.farm.test_model import mixed_texts
from tests.support import LiveServer, wait_until
from tests.workers.running import slow_process, worker_on, working
from tests.workers.support import (
    NULL,
    FakeEngine,
    block_of,
    create_job,
    embedded,
    let_models_take,
    micro_batch,
    null_vectors,
    plan_blocks,
)

SPEC = JobSpec(model=NULL)
FAST = f"{NULL}:1000000"  # tokens per second
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
SLOW = "null:8:2000"  # tokens per second
SECONDS = 20.0  # every answer must be there by then


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """A farm without a scheduler."""
    return FarmClient(client)


@pytest.fixture
def lane(client: redis.Redis) -> Lane:
    """The lane on the test's server."""
    return Lane(client)


def done(job: Job) -> bool:
    """Whether every chunk of a job has a result."""
    status = job.status()
    return status.chunks_done == status.chunk_count


def load(worker: Worker, spec: JobSpec = SPEC) -> None:
    """Load a model before the first request."""
    worker.models.load(spec)


# An idle farm.


def test_an_idle_worker_loads_what_is_asked_for(server: LiveServer, lane: Lane) -> None:
    """A worker that has no model yet loads the request's, and answers with its vectors."""
    with working(worker_on(server)):
        found = lane.embed(SPEC, ["one", "", "x" * 100_000], SECONDS)
    assert found.dtype == np.float32
    assert np.array_equal(found, null_vectors(["one", "", "x" * 100_000]))


@pytest.mark.alone
def test_an_idle_farm_answers_in_milliseconds(server: LiveServer, lane: Lane) -> None:
    """An idle farm answers in less than 50 ms, far below the 250 ms of a poll."""
    worker = worker_on(server, lane_wait_seconds=0.0)
    load(worker)
    with working(worker):
        lane.embed(SPEC, ["first"], SECONDS)
        times = []
        for index in range(20):
            began = time.monotonic()
            lane.embed(SPEC, [f"text {index}"], SECONDS)
            times.append(time.monotonic() - began)
    assert np.median(times) < 0.05


def test_stored_types_do_not_matter(server: LiveServer, lane: Lane) -> None:
    """A model's lane answers in float32 for all specs that differ in the stored type only."""
    worker = worker_on(server)
    load(worker)
    with working(worker):
        for stored in ("float32", "float16", "ubinary", "int8"):
            spec = JobSpec(model=NULL, vector_dtype=stored)
            assert np.array_equal(lane.embed(spec, ["a"], SECONDS), null_vectors(["a"]))


def test_several_requests_share_a_run(server: LiveServer, farm: FarmClient, lane: Lane) -> None:
    """Requests that come within `lane_wait_seconds` of the first are run together.

    The wait is seconds long here, so that the threads' own pace does not matter.
    """
    worker = worker_on(server, lane_wait_seconds=1.0)
    load(worker)
    with working(worker), ThreadPoolExecutor(8) as pool:
        wait_until(farm.workers)
        began = time.monotonic()
        asked = {str(n): pool.submit(lane.embed, SPEC, [str(n)], SECONDS) for n in range(8)}
        for text, future in asked.items():
            assert np.array_equal(future.result(), null_vectors([text]))
        wait_until(lambda: worker.embedder.lane_seconds)
        served = worker.embedder.lane_seconds
        assert served <= time.monotonic() - began - 1, "waiting for others is no work"
    assert worker.lane.tally["pieces"] == 8
    assert worker.lane.tally["rounds"] < 8


# Beside a job.


def test_requests_go_before_a_job(server: LiveServer, farm: FarmClient, lane: Lane) -> None:
    """A request is answered between the device batches of a job, and both have right vectors."""
    blocks = [block_of(0, 3000)]
    texts = blocks[0].texts
    job = create_job(farm, blocks, model=SLOW)  # 3 s on the device
    spec = JobSpec(model=SLOW)
    with working(worker_on(server, batch_tokens_max=100)) as worker:
        wait_until(lambda: worker._current)
        for index in range(3):
            found = lane.ask(spec, [f"asked {index}"], SECONDS)
            assert np.array_equal(found.matrix(), null_vectors([f"asked {index}"]))
            assert found.token_count == 1
        assert not done(job)
        wait_until(lambda: done(job))
        wait_until(lambda: [beat.lane["pieces"] for beat in farm.workers()] == [3])
    assert np.array_equal(embedded(job), null_vectors(texts))
    account = farm.reports.accounts("j")[worker.name]
    assert account.seconds["lane"] == pytest.approx(worker.embedder.lane_seconds)


def test_device_batches_are_full_size_again_when_requests_are_over(
    server: LiveServer, lane: Lane
) -> None:
    """A request makes device batches short for `lane_quiet_seconds`, no longer and no shorter."""
    quiet = 2.0
    worker = worker_on(server, lane_batch_seconds=0.02, lane_quiet_seconds=quiet)
    load(worker)
    with working(worker):
        assert worker.lane.batch_seconds() == 0, "nobody has asked yet"
        began = time.monotonic()
        lane.embed(SPEC, ["asked"], SECONDS)
        assert worker.lane.batch_seconds() == 0.02
        answered = time.monotonic()
        wait_until(lambda: not worker.lane.batch_seconds())
        assert time.monotonic() - began >= quiet
        assert time.monotonic() - answered <= quiet + 1


def test_real_vectors_beside_a_job(server: LiveServer, farm: FarmClient, lane: Lane) -> None:
    """Answers of MiniLM in float32 beside a job are the vectors of `encode`."""
    spec = JobSpec(model=MODEL, dtype="float32", engine="torch")
    texts = mixed_texts(200)
    job = farm.job("j")
    job.create(spec, 0)
    blocks = [
        Block(start=start, texts=texts[start : start + 20], token_count=2000)
        for start in range(0, 200, 20)
    ]
    job.push([(block, encode(block)) for block in blocks])
    job.close(200)
    asked = [["one short question", "", texts[0]], texts[7:12], ["word " * 20_000]]
    worker = worker_on(server, lease_seconds=60.0)
    load(worker, spec)
    with working(worker):
        wait_until(lambda: worker._current)
        found = [lane.embed(spec, each, SECONDS) for each in asked]
        assert not done(job)
    model = SentenceTransformer(str(resolve(MODEL)), device="cpu")
    for each, vectors in zip(asked, found, strict=True):
        assert cosine(vectors, model.encode(each)).min() >= 0.9999


def test_a_jobs_rate_is_its_own(server: LiveServer, farm: FarmClient, lane: Lane) -> None:
    """A job's reported rate is not lowered by the time that goes to requests."""
    blocks = [block_of(100 * index, 100) for index in range(40)]
    job = create_job(farm, blocks, model=SLOW)  # 4 s
    plan_blocks(farm, worker_on(server).name, 10)  # micro-batches that dwarf what is around them
    texts = ["x" * 400] * 2  # 0.05 s, as a text that repeats is run once
    with working(worker_on(server, batch_tokens_max=100)) as worker:
        wait_until(lambda: worker._current)
        while not done(job):
            lane.embed(JobSpec(model=SLOW), texts, SECONDS)
        rate = worker.committer.tokens_per_second
    total = worker.committer.total
    assert worker.embedder.lane_seconds > 0.2 * total.seconds["forward"], "the lane took a part"
    per_real_token = sum(block.token_count for block in blocks) / job.status().real_tokens_done
    alone = total.real_tokens / total.seconds["forward"]
    assert rate == pytest.approx(alone * per_real_token, rel=0.15)


def test_a_worker_at_work_loads_what_fits_beside(
    server: LiveServer, farm: FarmClient, lane: Lane
) -> None:
    """A request for another model is answered while a job goes on, where both models fit."""
    job = create_job(farm, [block_of(0, 4000)], model=SLOW)  # 4 s
    with working(worker_on(server, batch_tokens_max=100)) as worker:
        wait_until(lambda: worker._current)
        assert np.array_equal(lane.embed(SPEC, ["a"], SECONDS), null_vectors(["a"]))
        assert not done(job)
        assert worker.models.resident.find(engine_key(JobSpec(model=SLOW)))
        wait_until(lambda: done(job))
        assert {each.spec.model for each in worker.models.resident} == {SLOW, NULL}


def test_a_request_gets_a_turn_where_nothing_fits_beside(
    server: LiveServer, farm: FarmClient, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for `lane_swap_seconds`; then a job's model goes for it, and comes back."""
    let_models_take(monkeypatch, 2)
    opened = count_opened(monkeypatch)
    blocks = [block_of(start, 200) for start in range(0, 4000, 200)]
    job = create_job(farm, blocks, model=SLOW)  # 4 s
    with working(worker_on(server, models_bytes_max=3, lane_swap_seconds=1.5)) as worker:
        wait_until(lambda: worker._current)
        began = time.monotonic()
        assert np.array_equal(lane.embed(SPEC, ["a"], SECONDS), null_vectors(["a"]))
        assert time.monotonic() - began > 1.5
        assert not done(job)
        wait_until(lambda: done(job))
    assert opened == [SLOW, NULL, SLOW]


def test_until_then_the_client_is_told_so(
    server: LiveServer, farm: FarmClient, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job keeps its model for a while, and a request that waits no longer than that is late."""
    let_models_take(monkeypatch, 2)
    job = create_job(farm, [block_of(0, 4000)], model=SLOW)  # 4 s
    with working(worker_on(server, models_bytes_max=3)) as worker:
        wait_until(lambda: worker._current)
        with pytest.raises(LaneLate):
            lane.embed(SPEC, ["a"], 1.5)
        (beat,) = farm.workers()
        assert seconds_until_loaded([beat], SPEC, time.time()) >= beat.yields_in_seconds
        assert 7 < beat.yields_in_seconds < 9, "10 s after the request came"
        assert worker.models.resident.find(engine_key(JobSpec(model=SLOW)))
        wait_until(lambda: done(job))
        assert np.array_equal(lane.embed(SPEC, ["a"], SECONDS), null_vectors(["a"]))


def test_requests_and_jobs_take_turns(
    server: LiveServer, farm: FarmClient, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that never end do not keep a job from its end, nor a job them from answers."""
    let_models_take(monkeypatch, 2)
    opened = count_opened(monkeypatch)
    monkeypatch.setattr(lane_loader, "TURN_SECONDS_MIN", 0.1)
    blocks = [block_of(start, 100) for start in range(0, 4000, 100)]
    job = create_job(farm, blocks, model=SLOW)  # 4 s
    answered, began = 0, time.monotonic()
    with working(worker_on(server, models_bytes_max=3, lane_swap_seconds=0.2)) as worker:
        wait_until(lambda: worker._current)
        while not done(job):
            lane.embed(SPEC, ["a"], SECONDS)
            answered += 1
    assert answered > 10
    # Before each swap a request waits for `lane_swap_seconds`, and then its model has a turn.
    turns = (time.monotonic() - began) / (0.2 + lane_loader.TURN_SECONDS_MIN)
    assert 2 <= opened.count(NULL) <= opened.count(SLOW) <= 1 + turns


def test_who_cannot_be_answered_in_time_is_told_at_once(
    server: LiveServer, farm: FarmClient, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that would wait in vain while jobs have their turn are told so at once."""
    let_models_take(monkeypatch, 2)
    job = long_job(farm)
    other = JobSpec(model="null:4")
    with working(worker_on(server, models_bytes_max=3, lane_swap_seconds=0.2)) as worker:
        plan_blocks(farm, worker.name, 5)  # a quarter of a second, and no gap between two leases
        wait_until(lambda: worker._current)
        lane.embed(SPEC, ["a"], SECONDS)
        wait_until(lambda: not worker.lane_loader.engines())
        began = time.monotonic()
        with pytest.raises(LaneLate, match="no worker loads the model in time: its device works"):
            lane.embed(other, ["a"], 6.0)
        assert time.monotonic() - began < 5
        seconds = seconds_until_loaded(farm.workers(), other, time.time())
        assert 3 < seconds < 11
        wait(seconds)
        assert lane.embed(other, ["a"], 2.0).shape == (1, 4)
        assert not done(job)


def test_who_comes_again_when_told_finds_the_model(
    server: LiveServer, farm: FarmClient, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that waits for less than a model takes gets an answer when it was told to return."""
    let_models_take(monkeypatch, 2)
    monkeypatch.setattr(lane_loader, "LOADS_WORTH", 1.0)
    job = long_job(farm)
    with working(worker_on(server, models_bytes_max=3, lane_swap_seconds=4.0)) as worker:
        plan_blocks(farm, worker.name, 5)  # a quarter of a second, and no gap between two leases
        for _ in range(2):
            wait_until(lambda: not worker.lane_loader.engines() and worker._current)
            with pytest.raises(LaneLate):
                lane.embed(SPEC, ["a"], 2.5)
            wait(seconds_until_loaded(farm.workers(), SPEC, time.time()))
            assert np.array_equal(lane.embed(SPEC, ["a"], 2.5), null_vectors(["a"]))
        assert not done(job)


def test_only_one_worker_gives_way(
    server: LiveServer, farm: FarmClient, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several workers at work loads the model of a caller that has left, no other does."""
    let_models_take(monkeypatch, 2)
    opened = count_opened(monkeypatch)
    job = long_job(farm)
    settings: dict[str, Any] = {"models_bytes_max": 3, "lane_swap_seconds": 4.0}
    with (
        working(worker_on(server, **settings)) as first,
        working(worker_on(server, "cpu-1", **settings)) as second,
    ):
        wait_until(lambda: first._current and second._current)
        with pytest.raises(LaneLate):
            lane.embed(SPEC, ["a"], 2.5)
        wait_until(lambda: NULL in opened)
        wait(2.0)  # whoever else wanted to give way would have, at the same time
        assert opened.count(NULL) == 1
        assert not done(job)


def test_nobody_gives_way_for_a_request_that_is_over(
    server: LiveServer, farm: FarmClient, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job keeps its model where a request was answered or withdrawn before its time was up."""
    let_models_take(monkeypatch, 2)
    opened = count_opened(monkeypatch)
    long_job(farm)
    with working(worker_on(server, models_bytes_max=3, lane_swap_seconds=4.0)) as worker:
        plan_blocks(farm, worker.name, 5)  # a quarter of a second, and no gap between two leases
        wait_until(lambda: worker._current)
        pieces = cut(SPEC, ["a"], SECONDS)
        entries = lane.send(pieces)
        wait_until(lambda: worker.lane_loader.yields_in_seconds() < 3.0)
        lane._withdraw(pieces, entries)
        wait_until(lambda: worker.lane_loader.yields_in_seconds() >= 4.0)
        wait(4.0)
        assert opened == [SLOW]


def long_job(farm: FarmClient) -> Job:
    """Make a job of 60 s for one worker, longer than all that follows."""
    return create_job(farm, [block_of(start, 100) for start in range(0, 60_000, 100)], model=SLOW)


def wait(seconds: float) -> None:
    """Let time pass, as a caller does that was told to come again."""
    threading.Event().wait(seconds)


def count_opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the names of the models noted that are loaded from now on, and return them."""
    opened: list[str] = []

    def load_counted(*arguments: Any) -> Engine:  # noqa: ANN401 # those of open_engine
        opened.append(arguments[0].model)
        return NullEngine.open(arguments[0])

    monkeypatch.setattr(model_store, "open_engine", load_counted)
    return opened


def test_a_worker_at_work_serves_other_prompts(
    server: LiveServer, farm: FarmClient, lane: Lane
) -> None:
    """A worker at work on documents answers queries with other prompts on the same weights."""
    job = create_job(farm, [block_of(0, 4000)], model=SLOW)  # 4 s
    queries = [JobSpec(model=SLOW, task="query"), JobSpec(model=SLOW, prompt="p: ")]
    with working(worker_on(server, batch_tokens_max=100)) as worker:
        wait_until(lambda: worker._current)
        for spec in queries:
            found = lane.embed(spec, ["a"], SECONDS)
            assert np.array_equal(found, null_vectors(["a"]))
        assert not done(job)
        wait_until(lambda: done(job))


def test_jobs_with_other_prompts_share_a_model(
    server: LiveServer, farm: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that differ in their prompts only share one loaded model."""
    opened = count_opened(monkeypatch)
    prompts = ["", "p: ", "q: "]
    jobs = [
        create_job(farm, [block_of(0, 5), block_of(5, 5)], name=f"j{n}", prompt=prompt)
        for n, prompt in enumerate(prompts)
    ]
    with working(worker_on(server)):
        wait_until(lambda: all(map(done, jobs)))
    assert len(opened) == 1
    assert [farm.reports.fingerprint(job.id)["prompt"] for job in jobs] == prompts


def test_a_model_is_gone_before_the_next_one_is_loaded(
    server: LiveServer, farm: FarmClient, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two do not fit, a model that answered requests is gone before another one loads."""
    let_models_take(monkeypatch, 2)
    opened: list[weakref.ref[Engine]] = []

    def load_alone(*arguments: Any) -> Engine:  # noqa: ANN401 # those of open_engine
        wait_until(lambda: gc.collect() >= 0 and not any(ref() for ref in opened))
        engine = NullEngine.open(arguments[0])
        opened.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(model_store, "open_engine", load_alone)
    with working(worker_on(server, models_bytes_max=3)):
        for model in ("null:4", "null:12"):
            lane.embed(JobSpec(model=model), ["a", "b"], SECONDS)
        job = create_job(farm, [block_of(0, 5)])
        wait_until(lambda: done(job))
        lane.embed(JobSpec(model="null:4"), ["a", "b"], SECONDS)
    assert len(opened) == 4


def test_devices_share_a_request(server: LiveServer, lane: Lane) -> None:
    """Two devices share a request of seconds, and answer sooner than one alone would."""
    spec = JobSpec(model=SLOW)
    workers = [worker_on(server, f"cpu-{number}") for number in range(2)]
    texts = [f"{index:03} " + "x" * 96 for index in range(100)]  # 25 tokens each: 1.25 s
    for worker in workers:
        load(worker, spec)
    with working(workers[0]), working(workers[1]):
        lane.ask(spec, texts[:50], SECONDS)  # from then on they know their speed
        began = time.monotonic()
        answer = lane.ask(spec, texts, SECONDS)
        seconds = time.monotonic() - began
    assert np.array_equal(answer.matrix(), null_vectors(texts))
    assert set(answer.worker.split(",")) == {worker.name for worker in workers}
    assert answer.token_count == 2500
    assert seconds < 0.8 * answer.seconds  # the sum of both


# What goes wrong.


def test_a_killed_workers_request_is_answered(server: LiveServer, farm: FarmClient) -> None:
    """A request of a worker that got kill -9 is answered by another, soon after the lease ends."""
    lane, spec, text = Lane(farm.client), JobSpec(model=FAST), "x" * 4000
    with ThreadPoolExecutor() as pool:
        with slow_process(server):  # 1,000 tokens take it 100 s
            asked = pool.submit(lane.embed, spec, [text], 60.0)
            wait_until(lambda: is_taken(lane, spec), 30)
        began = time.monotonic()
        other = worker_on(server, lane_lease_seconds=1.0)
        load(other, spec)
        with working(other):
            found = asked.result()
            seconds = time.monotonic() - began
    assert np.array_equal(found, null_vectors([text]))
    assert seconds < 5


def is_taken(lane: Lane, spec: JobSpec) -> bool:
    """Whether the only request is held by some worker."""
    return lane.waiting(engine_key(spec)) and lane.oldest(engine_key(spec)) is None


def test_a_request_in_hand_is_kept(server: LiveServer, lane: Lane) -> None:
    """A request that takes longer than its lease stays with its worker."""
    model = JobSpec(model="null:8:40")
    slow, other = (worker_on(server, f"cpu-{n}", lane_lease_seconds=1.2) for n in range(2))
    for worker in (slow, other):
        load(worker, model)
    with working(slow), ThreadPoolExecutor() as pool:
        asked = pool.submit(lane.ask, model, ["x" * 600], SECONDS)
        wait_until(lambda: slow.lane._held.tokens)
        with working(other):
            answer = asked.result()
    assert answer.worker == slow.name
    assert answer.seconds > 2.4
    assert other.lane.tally["pieces"] == 0


def test_a_late_request_is_told_so(server: LiveServer, lane: Lane) -> None:
    """A worker that comes to a request after its time answers that, and does not embed it."""
    worker = worker_on(server)
    load(worker)
    pieces = cut(SPEC, ["a"], 0.01)
    lane.send(pieces)
    wait_until(lambda: waited_seconds(lane) > pieces[0].timeout_seconds)
    with working(worker):
        (answer,) = lane._wait(pieces, time.monotonic() + SECONDS)
    assert answer.late
    assert answer.reason == "no worker was free within 0.01 s"
    assert worker.lane.tally["pieces"] == 0


def waited_seconds(lane: Lane) -> float:
    """The seconds that the only request has been waiting."""
    oldest = lane.oldest(engine_key(SPEC))
    return 0.0 if oldest is None else oldest.waited_seconds


def test_a_model_that_nobody_has(server: LiveServer, lane: Lane) -> None:
    """A request for a model that no worker can load is refused with the reason, and others work."""
    with working(worker_on(server)), working(worker_on(server, "cpu-1")):
        for _ in range(2):
            with pytest.raises(LaneRefused, match="no worker can load the model: 'null:nonsense'"):
                lane.embed(JobSpec(model="null:nonsense"), ["a"], SECONDS)
        assert np.array_equal(lane.embed(SPEC, ["a"], SECONDS), null_vectors(["a"]))


def test_no_memory_now_is_said_to_pass(
    server: LiveServer, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for a model that nobody has memory for now is late: it may be asked again."""
    let_models_take(monkeypatch, 2)
    monkeypatch.setattr(model_room, "device_memory", lambda _: AvailableMemory(4, 1))
    with working(worker_on(server)), pytest.raises(LaneLate, match=r"not now: .* memory are free"):
        lane.embed(SPEC, ["a"], SECONDS)


def test_where_nobody_is_known_to_live_nothing_is_refused(
    server: LiveServer, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats that have all lapsed, as after an outage, say nothing of other workers."""
    with working(worker_on(server)):
        monkeypatch.setattr(FarmClient, "workers", lambda _: [])
        with pytest.raises(LaneLate, match="no answer within"):
            lane.embed(JobSpec(model="null:nonsense"), ["a"], 1.5)


def test_a_prompt_that_the_model_does_not_have(
    server: LiveServer, farm: FarmClient, lane: Lane
) -> None:
    """A worker at work refuses an unknown prompt at once, though it loads nothing meanwhile."""
    job = create_job(farm, [block_of(0, 4000)], model=SLOW)  # 4 s
    with working(worker_on(server, batch_tokens_max=100)) as worker:
        wait_until(lambda: worker._current)
        with pytest.raises(LaneUnserved, match="no prompt 'other'"):
            lane.embed(JobSpec(model=SLOW, prompt_name="other"), ["a"], SECONDS)
        assert not done(job)


def test_a_model_that_is_not_there_costs_no_other(server: LiveServer, lane: Lane) -> None:
    """A worker keeps its model when it is asked for one that does not exist."""
    worker = worker_on(server)
    load(worker)
    engine = worker.models.resident.find(engine_key(SPEC))
    with working(worker):
        with pytest.raises(LaneRefused, match="no worker can load the model"):
            lane.embed(JobSpec(model="/no/such/model"), ["a"], SECONDS)
        assert worker.models.resident.find(engine_key(SPEC)) is engine is not None


def test_a_damaged_request_is_told_so(server: LiveServer, lane: Lane) -> None:
    """A damaged request, or one in another model's lane, is answered with the reason."""
    worker = worker_on(server)
    load(worker)
    first, misplaced = cut(SPEC, ["a"], SECONDS), cut(JobSpec(model="null:4"), ["a"], SECONDS)
    lane.send(first)
    for name, data in (("damaged", b"nonsense"), ("misplaced", encode(misplaced[0]))):
        lane.client.xadd(wire.lane_key(engine_key(SPEC)), {"id": name, "piece": data})
    with working(worker):
        deadline = time.monotonic() + SECONDS
        named = [[msgspec.structs.replace(first[0], id=name)] for name in ("damaged", "misplaced")]
        reasons = [lane._wait(pieces, deadline)[0].reason for pieces in [first, *named]]
    assert reasons[0] == ""
    assert "LanePiece" in reasons[1]
    assert reasons[2] == "its model is not the one of its lane"


class Picky(FakeEngine):
    """An engine that raises for one text, and gives nothing usable for another."""

    def refuse(self, texts: Sequence[str]) -> None:
        """Raise an error as a model with a bug does."""
        if any("bad" in text for text in texts):
            raise ValueError("cannot be")

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return NaN for "nan"."""
        vectors = super().vectors(texts)
        vectors[[row for row, text in enumerate(texts) if text == "nan"]] = np.nan
        return vectors


def test_a_bad_text_costs_only_itself(
    server: LiveServer, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that the model cannot take fails for its client alone, though others share its run."""
    monkeypatch.setattr(model_store, "open_engine", lambda *_: Picky())
    monkeypatch.setattr(model_store, "open_reference", lambda *_: None)
    worker = worker_on(server)
    load(worker)
    with ThreadPoolExecutor() as pool:
        bad = pool.submit(lane.embed, SPEC, ["fine", "bad", "nan", ""], SECONDS)
        good = pool.submit(lane.embed, SPEC, ["fine", "better"], SECONDS)
        wait_until(lambda: lane.client.xlen(wire.lane_key(engine_key(SPEC))) == 2)
        with working(worker):
            assert np.array_equal(good.result(), FakeEngine().vectors(["fine", "better"]))
            with pytest.raises(TextsFailed) as caught:
                bad.result()
    assert caught.value.reasons == {
        1: "the model raised ValueError: cannot be",
        2: "the model gave a vector that is not finite in float32",
        3: "the tokenizer makes no token of it",
    }
    assert np.array_equal(caught.value.vectors[:1], FakeEngine().vectors(["fine"]))
    assert worker.lane.tally["rounds"] == 1


class Deadly(NullEngine):
    """An engine whose device one text brings down."""

    def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Raise `DeviceFailed` where a text has 8 tokens."""
        if 8 in batch.lengths[rows]:
            raise DeviceFailed("gone")
        return super().forward(batch, rows)


def test_a_deadly_request_takes_nobody_with_it(
    server: LiveServer, farm: FarmClient, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that shared a run with one that kills workers are answered; that one is refused."""
    monkeypatch.setattr(model_store, "open_engine", lambda spec, *_: Deadly.open(spec))
    deadly, stop = "x" * 32, threading.Event()

    def work(number: int) -> None:
        """Keep a worker alive, as a supervisor does."""
        while not stop.is_set():
            worker = worker_on(
                server, f"cpu-{number}", lane_wait_seconds=0.2, lane_lease_seconds=0.5
            )
            load(worker)
            ending = threading.Thread(
                target=lambda worker=worker: stop.wait() and worker.stop.set()
            )
            ending.start()
            with contextlib.suppress(DeviceFailed):
                worker.run()

    with ThreadPoolExecutor() as pool:
        working_on = [pool.submit(work, number) for number in range(2)]
        try:
            wait_until(lambda: len(farm.workers()) == 2)
            asked = {text: pool.submit(lane.ask, SPEC, [text], 60.0) for text in ("a", deadly, "b")}
            for text in "ab":
                assert np.array_equal(asked[text].result().matrix(), null_vectors([text]))
            with pytest.raises(LaneRefused, match="died or hung 3 times"):
                asked[deadly].result()
        finally:
            stop.set()
        for future in working_on:
            future.result()


def test_a_server_that_restarts(server: LiveServer, lane: Lane) -> None:
    """Requests are answered again after the server was killed and started."""
    worker = worker_on(server)
    load(worker)
    with working(worker):
        lane.embed(SPEC, ["before"], SECONDS)
        server.kill()
        server.start()
        assert np.array_equal(again(lane, "after"), null_vectors(["after"]))


def again(lane: Lane, text: str) -> NDArray[np.float32]:
    """Ask again until the connection is there, and return the vectors."""
    found: list[NDArray[np.float32]] = []

    def ask() -> bool:
        with contextlib.suppress(*UNAVAILABLE):
            found.append(lane.embed(SPEC, [text], SECONDS))
        return bool(found)

    wait_until(ask)
    return found[0]


def test_a_stop_finishes_what_was_taken(server: LiveServer, lane: Lane) -> None:
    """A request that a worker holds at a stop is still answered by it."""
    model = JobSpec(model="null:8:100")
    worker = worker_on(server)
    load(worker, model)
    with ThreadPoolExecutor() as pool:
        with working(worker):
            asked = pool.submit(lane.ask, model, ["x" * 200], SECONDS)
            wait_until(lambda: worker.lane._held.tokens)
        assert asked.result().worker == worker.name


# Requests and device batches on the device.


class Asked:
    """A stand-in for the lane, whose requests come up at given looks."""

    def __init__(self, batches: dict[int, MicroBatch], limit_seconds: float = 0.0) -> None:
        self.batches = batches
        self.limit_seconds = limit_seconds
        self.looks = 0
        self.answers: list[tuple[MicroBatch, NDArray[Any]]] = []

    def take(self) -> MicroBatch | None:
        """Return the request that comes up at this look, if any."""
        self.looks += 1
        return self.batches.pop(self.looks, None)

    def answer(self, batch: MicroBatch, vectors: NDArray[Any]) -> None:
        """Keep an answer for the test."""
        self.answers.append((batch, vectors))

    def batch_seconds(self) -> float:
        """Return the same limit all the time."""
        return self.limit_seconds


class Ordered(FakeEngine):
    """An engine that notes starts and ends of device batches; it may work by itself."""

    def __init__(self, *, asynchronous: bool) -> None:
        super().__init__()
        self.asynchronous = asynchronous
        self.steps: list[tuple[str, str]] = []

    def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
        """Note the start, and refuse there unless the device works by itself; else at the end."""
        name = batch.features[rows[0]]
        texts = [batch.features[row] for row in rows]
        self.steps.append(("start", name))
        if not self.asynchronous:
            self.refuse(texts)

        def finish() -> NDArray[np.float32]:
            self.steps.append(("finish", name))
            self.refuse(texts)
            return self.vectors(texts)

        return finish

    def refuse(self, texts: Sequence[str]) -> None:
        """Raise an error as a model with a bug does."""
        if any("bad" in text for text in texts):
            raise ValueError("cannot be")


@given(
    texts=st.lists(st.text("abd", min_size=1, max_size=6), min_size=1, max_size=30),
    asked=st.dictionaries(
        st.integers(1, 20), st.lists(st.text("abd", max_size=6), min_size=1, max_size=8), max_size=4
    ),
    budget=st.integers(6, 40),
    asynchronous=st.booleans(),
)
def test_requests_between_device_batches(
    texts: list[str], asked: dict[int, list[str]], budget: int, *, asynchronous: bool
) -> None:
    """Each request and the job get the vectors of their own texts, whenever requests come."""
    engine = Ordered(asynchronous=asynchronous)
    lane = Asked({at: micro_batch([Block(start=0, texts=t)], engine) for at, t in asked.items()})
    embedder = Embedder(Budgets(batch_tokens_max=budget), requests=lane)
    bulk = micro_batch([Block(start=0, texts=texts)], engine)
    found = [(bulk, embedder.embed(bulk)), *lane.answers]
    assert len(lane.answers) == len(asked) - len(lane.batches)
    for batch, vectors in found:
        own = batch.leases[0].block.texts
        bad = {row for row, text in enumerate(own) if "bad" in text or not text}
        assert set(batch.reasons) == bad
        for row, text in enumerate(own):
            wanted = np.zeros(2) if row in bad else FakeEngine().vectors([text])[0]
            assert np.array_equal(vectors[row], wanted)
    starts = [name for step, name in engine.steps if step == "start"]
    ends = [name for step, name in engine.steps if step == "finish"]
    if asynchronous:
        assert ends == starts, "in the order of their starts"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_batch_at_most_is_before_a_request(*, asynchronous: bool) -> None:
    """A request waits for the running device batch only, and at most one more starts behind it."""
    engine = Ordered(asynchronous=asynchronous)
    bulk = [f"bulk {index}" for index in range(8)]
    lane = Asked({4: micro_batch([Block(start=0, texts=["asked"])], engine)})
    embedder = Embedder(Budgets(batch_tokens_max=6), requests=lane)
    embedder.embed(micro_batch([Block(start=0, texts=bulk)], engine))
    steps = engine.steps
    at = steps.index(("start", "asked"))
    running = [name for step, name in steps[:at] if step == "start"][-1]
    waited = steps[at : steps.index(("finish", "asked"))]
    between = [step for step in waited[1:] if step != ("finish", running)]
    assert len(between) <= asynchronous, "the next one is started behind it, on a busy device"


class Nominal(Timings):
    """Timings that learn 20,000 tokens a second, whatever else the machine does."""

    def observe(
        self, spec: JobSpec, engine: Engine, lengths: NDArray[np.int64], seconds: float
    ) -> None:
        """Learn the nominal time of a device batch in place of the measured one."""
        del seconds
        super().observe(spec, engine, lengths, int(lengths.sum()) / 20_000)


@pytest.mark.parametrize("limit_seconds", [0.0, 0.02])
def test_device_batches_are_short_while_requests_come(limit_seconds: float) -> None:
    """Device batches keep to the limit while requests come, and are full without requests."""
    sizes: list[int] = []

    class Noting(NullEngine):
        def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
            sizes.append(int(batch.lengths[rows].sum()))
            return super().forward(batch, rows)

    engine = Noting.open(JobSpec(model="null:8:20000"))  # 0.02 s are 400 tokens
    requests = Asked({}, limit_seconds=limit_seconds)
    embedder = Embedder(Budgets(batch_tokens_max=2000), timings=Nominal(), requests=requests)
    texts = [f"{index:04}" + "x" * 36 for index in range(1000)]  # 10 tokens each
    batch = micro_batch([Block(start=0, texts=texts)], engine)
    embedder.embed(batch)
    assert sum(sizes) == 10_000
    if limit_seconds:
        assert max(sizes[1:]) <= 450, "the first is not known to be too long"
        assert np.mean(sizes[1:]) >= 250
    else:
        assert sizes == [2000] * 5
