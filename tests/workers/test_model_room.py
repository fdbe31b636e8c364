"""Tests of how many models a worker keeps loaded, and which of them goes for another one."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import redis
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.job_reports import NOT_NOW
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.jobs import Job
from embedfarm.contract.lane import Lane
from embedfarm.contract.model_counts import ModelCounts
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.model_orders import ModelOrder
from embedfarm.contract.settings import Settings
from embedfarm.workers import host_memory, model_room, model_store
from embedfarm.workers.engines import memory
from embedfarm.workers.engines.engine import DeviceFailed, Engine, NoRoom
from embedfarm.workers.engines.memory import predict_bytes
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.host_memory import AvailableMemory
from embedfarm.workers.model_room import MODELS_MAX
from embedfarm.workers.model_store import ModelStore
from embedfarm.workers.watchdog import Watchdog
from tests.support import LiveServer, wait_until
from tests.workers.running import Running, worker_on, working
from tests.workers.support import (
    block_of,
    create_job,
    let_models_take,
)
from tests.workers.tiny_models import DIMENSIONS, bert, mean_pooled

MEBIBYTE = 1 << 20
SIZE = 10  # bytes that a null model is said to take here
WIDE = 24_576  # inside the layers of a model of some twelve mebibytes


def spec_of(number: int) -> JobSpec:
    """The spec of one of many null models."""
    return JobSpec(model=f"null:{number}")


@pytest.fixture
def store(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """A worker's models, of which three fit."""
    let_models_take(monkeypatch, SIZE)
    return store_of(client, models_bytes_max=3 * SIZE)


def store_of(client: redis.Redis, **limits: Any) -> ModelStore:  # noqa: ANN401 # any setting
    """A store of some limits in which nothing is loaded."""
    settings = Settings(**limits)
    return ModelStore(FarmClient(client), "w", "cpu", settings, Watchdog(settings))


def load(store: ModelStore, *numbers: int) -> None:
    """Have null models used in turn, as a worker has."""
    for number in numbers:
        spec = spec_of(number)
        assert store.resident.use(engine_key(spec)) or store.load(spec)


def loaded(store: ModelStore) -> list[str]:
    """The models that are loaded, those first that were not used for longest."""
    return [model.spec.model for model in store.resident]


# What goes.


def test_models_that_fit_stay(store: ModelStore) -> None:
    """Models stay loaded as long as their memory is not wanted."""
    load(store, 1, 2, 3)
    assert loaded(store) == ["null:1", "null:2", "null:3"]


def test_the_one_that_was_not_used_for_longest_goes(store: ModelStore) -> None:
    """The model goes for which no work was taken for longest, and no more than have to."""
    load(store, 1, 2, 3, 1, 4)
    assert loaded(store) == ["null:3", "null:1", "null:4"]


def test_as_many_go_as_have_to(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model takes the place of several, and of all that there are if it has to."""
    load(store, 1, 2, 3)
    let_models_take(monkeypatch, 2 * SIZE)
    load(store, 4)
    assert loaded(store) == ["null:3", "null:4"]
    let_models_take(monkeypatch, 3 * SIZE)
    load(store, 5)
    assert loaded(store) == ["null:5"]


def test_what_is_in_use_stays(store: ModelStore) -> None:
    """A model that work in hand needs never goes; another one waits until there is room."""
    load(store, 1, 2, 3)
    in_hand = {engine_key(spec_of(number)) for number in (1, 2, 3)}
    store.room.in_use = lambda: in_hand
    assert store.load(spec_of(4)) is None
    assert not store.load_beside(spec_of(4))
    assert loaded(store) == ["null:1", "null:2", "null:3"]
    in_hand.discard(engine_key(spec_of(2)))
    assert store.load(spec_of(4))
    assert loaded(store) == ["null:1", "null:3", "null:4"]


def test_what_is_needed_soon_stays_where_a_model_comes_before_its_turn(store: ModelStore) -> None:
    """A model that is loaded ahead takes the place of those that nobody needs, or waits."""
    load(store, 1, 2, 3)
    needed = {engine_key(spec_of(number)) for number in (1, 2, 3)}
    assert not store.load_beside(spec_of(4), needed=needed)
    assert loaded(store) == ["null:1", "null:2", "null:3"]
    assert store.load_beside(spec_of(4), needed=needed - {engine_key(spec_of(2))})
    wait_until(lambda: not store.is_loading)
    assert loaded(store) == ["null:1", "null:3", "null:4"]


def test_an_engine_in_use_keeps_its_model(store: ModelStore) -> None:
    """Work for another option of the same weights keeps them as well."""
    load(store, 1, 2, 3)
    other = JobSpec(model="null:1", prompt="query: ")
    assert store.variant(other)
    store.room.in_use = lambda: {engine_key(other)}
    load(store, 4)
    assert "null:1" in loaded(store)


def test_pinned_models_stay(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned model never goes, neither for another one nor because it is idle."""
    let_models_take(monkeypatch, SIZE)
    limits = {"models_bytes_max": 2 * SIZE, "model_idle_seconds": 1e-9}
    store = store_of(client, models_pinned=("null:1",), **limits)
    load(store, 1, 2, 3)
    assert loaded(store) == ["null:1", "null:3"]
    store.room.unload_idle()
    assert loaded(store) == ["null:1"]
    let_models_take(monkeypatch, 2 * SIZE)
    with pytest.raises(NoRoom, match="pinned models 0 MiB"):
        store.load(spec_of(4))


def test_idle_models_are_unloaded(client: redis.Redis) -> None:
    """A model that was not used for a while goes, but not while work in hand needs it."""
    store = store_of(client, model_idle_seconds=1e-9)
    load(store, 1, 2)
    store.room.in_use = lambda: {engine_key(spec_of(1))}
    store.room.unload_idle()
    assert loaded(store) == ["null:1"]
    store = store_of(client, model_idle_seconds=0)
    load(store, 1)
    store.room.unload_idle()
    assert loaded(store) == ["null:1"], "0 is never"
    store = store_of(client)
    load(store, 1)
    store.room.unload_idle()
    assert loaded(store) == ["null:1"], "that is not long"


def test_small_models_are_not_without_number(client: redis.Redis) -> None:
    """A worker keeps no more models than a heartbeat can name, though they take no memory."""
    store = store_of(client)
    load(store, *range(1, MODELS_MAX + 3))
    assert loaded(store) == [f"null:{number}" for number in range(3, MODELS_MAX + 3)]


def test_states_are_told(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is told with its bytes and times, and why a model failed until it does not."""
    let_models_take(monkeypatch, SIZE)
    store, spec = store_of(client, models_bytes_max=SIZE), spec_of(2)
    load(store, 1)
    [state] = store.states()
    assert (state.model, state.state, state.bytes) == (model_key(spec_of(1)), "ready", SIZE)
    assert 0 < state.load_seconds < time.time() - state.since + 60
    with monkeypatch.context() as failing:
        failing.setattr(model_store, "open_engine", fail)
        with pytest.raises(NoRoom):
            store.load(spec)
    assert [(each.model, each.state, each.reason) for each in store.states()] == [
        (model_key(spec), "failed", "full")
    ]
    load(store, 2)
    assert [(each.model, each.state) for each in store.states()] == [(model_key(spec), "ready")]


def fail(*_: object) -> Engine:
    """Fail in the place of `open_engine`."""
    raise NoRoom("full")


def test_failures_are_not_without_number(client: redis.Redis) -> None:
    """A worker remembers the last models that did not load."""
    store = store_of(client)
    for number in range(model_store.FAILED_MAX + 2):
        with pytest.raises(ModelError):
            store.load(JobSpec(model=f"null:no{number}"))
    states = store.states()
    assert len(states) == model_store.FAILED_MAX
    assert states[-1].model == f"null:no{model_store.FAILED_MAX + 1}|auto|0|auto"


# What does not fit.


def test_a_model_that_can_never_fit_is_refused_for_good(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model beyond the limit, or beyond all memory, is refused and costs no other one."""
    load(store, 1)
    let_models_take(monkeypatch, 3 * SIZE + 1)
    with pytest.raises(ModelError, match=r"takes 0 MiB, and `models_bytes_max` is 0 MiB") as beyond:
        store.load(spec_of(2))
    assert not isinstance(beyond.value, NoRoom)
    assert loaded(store) == ["null:1"]


@pytest.mark.parametrize(("total", "passes"), [(SIZE - 1, False), (9 * SIZE, True)])
def test_no_memory(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, total: int, *, passes: bool
) -> None:
    """Where memory is full for a while that passes, and where there is too little it does not."""
    let_models_take(monkeypatch, SIZE)
    monkeypatch.setattr(model_room, "device_memory", lambda _: AvailableMemory(total, SIZE - 1))
    store = store_of(client)
    with pytest.raises(ModelError, match="of memory") as refused:
        store.load(spec_of(1))
    assert isinstance(refused.value, NoRoom) == passes


def test_memory_that_others_take(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have what is free where no limit is set, and the reserve is left beside them."""
    let_models_take(monkeypatch, SIZE)
    store = store_of(client, models_reserve_bytes=SIZE)
    others = 0
    monkeypatch.setattr(
        model_room,
        "device_memory",
        lambda _: AvailableMemory(5 * SIZE, 5 * SIZE - store.resident.bytes - others),
    )
    load(store, 1, 2, 3, 4, 5)
    assert loaded(store) == ["null:2", "null:3", "null:4", "null:5"]
    others = 2 * SIZE
    load(store, 6)
    assert loaded(store) == ["null:5", "null:6"]
    others = 4 * SIZE
    load(store, 7)
    assert loaded(store) == ["null:7"], "it fits, and the reserve does not"


def test_a_model_of_unknown_size_has_the_device_alone(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others go for a model whose files say nothing; what it took is measured."""
    store = store_of(client)
    load(store, 1, 2)
    for module in (model_room, model_store):
        monkeypatch.setattr(module, "predict_bytes", lambda *_: None)
    taken = iter((100, 107))
    monkeypatch.setattr(model_store, "allocated_bytes", lambda _: next(taken))
    load(store, 3)
    assert [(model.spec.model, model.bytes) for model in store.resident] == [("null:3", 7)]


def test_weights_of_another_format_count_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickled weights take what their file does; so it is where no processor is described."""
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    monkeypatch.setattr(memory, "_computes_in_half", memory._computes_in_half.__wrapped__)
    monkeypatch.setattr(memory, "CPU_FACTS", tmp_path / "none")
    assert predict_bytes(JobSpec(model=str(tmp_path)), "cpu", Settings()) == 1000


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, AvailableMemory(64, 32)),
        ({"a/b/memory.max": "max\n"}, AvailableMemory(64, 32)),
        (
            {
                "a/b/memory.max": "20\n",
                "a/b/memory.current": "15\n",
                "a/b/memory.stat": "anon 9\ninactive_file 4\n",
            },
            AvailableMemory(20, 9),
        ),
        (
            {
                "a/b/memory.max": "max\n",
                "a/memory.max": "40\n",
                "a/memory.current": "39\n",
                "a/memory.stat": "anon 39\n",
            },
            AvailableMemory(40, 1),
        ),
    ],
)
def test_limits_of_containers_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    expected: AvailableMemory,
) -> None:
    """A process in a container has what its control groups leave it, and not the host's memory."""
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "own").write_text("1:name=systemd:/\n0::/a/b\n")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "OWN_GROUP", tmp_path / "own")
    host = psutil.virtual_memory()._replace(total=64, available=32)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    assert host_memory.host_memory() == expected


# Real models.


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Twenty names of one model of some twelve mebibytes."""
    directory = tmp_path_factory.mktemp("models")
    model = SentenceTransformer(
        modules=[bert(directory / "files", WIDE), Pooling(DIMENSIONS)], device="cpu"
    )
    model.save(str(directory / "model"))
    names = [directory / f"model-{number}" for number in range(20)]
    for name in names:
        name.symlink_to(directory / "model", target_is_directory=True)
    return names


@pytest.mark.parametrize("swaps", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_many_models_in_little_memory(
    client: redis.Redis, many: Sequence[Path], swaps: int
) -> None:
    """Twenty models in turn never take more than is allowed, and swaps lose no memory."""
    specs = [JobSpec(model=str(name), dtype="float32", engine="torch") for name in many]
    size = predict_bytes(specs[0], "cpu", Settings())
    assert size is not None
    assert size > 10 * MEBIBYTE
    store = store_of(client, models_bytes_max=3 * size + size // 2)
    process, before = psutil.Process(), 0
    for swap in range(swaps):
        spec = specs[swap % len(specs)]
        assert store.load(spec)
        last = [specs[each % len(specs)].model for each in range(max(0, swap - 2), swap + 1)]
        assert loaded(store) == last
        assert store.resident.bytes == len(last) * size
        if swap == swaps // 4:
            before = process.memory_info().rss
    assert process.memory_info().rss < 1.05 * before


def test_prediction_is_what_is_loaded(client: redis.Redis, tmp_path: Path) -> None:
    """The bytes that a model's files name are those of the parameters that it has once loaded."""
    mean_pooled(tmp_path / "files").save(str(tmp_path / "model"))
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        spec = JobSpec(model=str(tmp_path / "model"), dtype=dtype, engine="torch")
        store = store_of(client)
        engine: Any = store.load(spec)
        elements = sum(each.numel() for each in engine.model.parameters())
        assert predict_bytes(spec, "cpu", Settings()) == width * elements
        assert store.resident.bytes == width * elements


# Beside work.


class SlowLoads:
    """Loads that wait until they are let go on, but for the first one.

    Attributes:
        opened: The models that were opened.
        go_on: Set to let them come to an end.
        failure: What they raise then, if anything.
    """

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.go_on = threading.Event()
        self.failure: Exception | None = None

    def open(self, spec: JobSpec, *_: Any) -> Engine:  # noqa: ANN401 # as open_engine
        """Open a null engine, in the place of `open_engine`."""
        self.opened.append(spec.model)
        if len(self.opened) > 1:
            assert self.go_on.wait(30)
            if self.failure is not None:
                raise self.failure
        return NullEngine.open(spec)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowLoads]:
    """Loads of models that take a while."""
    loads = SlowLoads()
    monkeypatch.setattr(model_store, "open_engine", loads.open)
    yield loads
    loads.go_on.set()


def open_job(client: redis.Redis, name: str, model: str) -> Job:
    """A job that grows."""
    job = FarmClient(client).job(name)
    job.create(JobSpec(model=model), 0)
    return job


def grow(job: Job) -> None:
    """Give a job five more chunks, and wait until they are embedded."""
    start = job.status().pushed_upto
    push(job, start)
    wait_until(lambda: job.status().chunks_done == start + 5)


def push(job: Job, start: int) -> None:
    """Give a job the five chunks from `start` on."""
    block = block_of(start, 5)
    job.push([(block, encode(block))])


def test_the_device_works_while_a_model_is_loaded(
    server: LiveServer, client: redis.Redis, loads: SlowLoads
) -> None:
    """A worker goes on with one job while the model of another is loaded, and keeps both."""
    one, other = open_job(client, "one", "null:8"), open_job(client, "other", "null:4")
    with working(worker_on(server)) as worker:
        grow(one)
        push(other, 0)
        wait_until(lambda: worker.models.loading)
        grow(one)
        assert Lane(client).embed(JobSpec(model="null:8"), ["a"], 20.0).shape == (1, 8)
        assert other.status().chunks_done == 0
        loads.go_on.set()
        wait_until(lambda: other.status().chunks_done == 5)
        for job in (one, other) * 5:
            grow(job)
    assert loads.opened == ["null:8", "null:4"]


def test_what_was_loaded_meanwhile_is_not_loaded_again(store: ModelStore) -> None:
    """Whoever finds a model missing, and asks for it once it is there, has it at once."""
    load(store, 1)
    told: list[str] = []
    assert store.load_beside(spec_of(1), lambda: told.append("loaded"))
    assert (loaded(store), told, store.is_loading) == (["null:1"], ["loaded"], False)


def test_a_load_beside_work_may_fail(
    server: LiveServer, client: redis.Redis, loads: SlowLoads
) -> None:
    """A job whose model does not load beside another one is refused with the reason."""
    reports = FarmClient(client).reports
    one, other = open_job(client, "one", "null:8"), open_job(client, "other", "null:4")
    loads.failure = NoRoom("memory was full")
    loads.go_on.set()
    with working(worker_on(server)):
        grow(one)
        push(other, 0)
        wait_until(lambda: reports.refusals("other"))
        grow(one)
    assert list(reports.refusals("other").values()) == [f"{NOT_NOW}memory was full"]


def test_a_load_beside_work_may_break_the_device(
    server: LiveServer, client: redis.Redis, loads: SlowLoads
) -> None:
    """A worker whose device fails while it loads a model beside others ends with that failure."""
    one, other = open_job(client, "one", "null:8"), open_job(client, "other", "null:4")
    loads.failure = DeviceFailed("it is gone")
    loads.go_on.set()
    running = Running(worker_on(server))
    grow(one)
    push(other, 0)
    running.end()
    assert running.error is loads.failure


def test_a_load_beside_work_without_the_server(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that cannot be counted, since the server is away, is none, and is begun again."""
    store, spec = store_of(client), spec_of(8)

    def lose(*_: object) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as away:
        away.setattr(store.farm.loads, "begin", lose)
        assert store.load_beside(spec)
        wait_until(lambda: not store.is_loading)
    assert not loaded(store)
    assert store.load_beside(spec)
    wait_until(lambda: loaded(store) == [spec.model])


def test_a_worker_yields_to_a_model_that_does_not_fit(
    server: LiveServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two models do not fit, a worker ends what it holds and does both jobs in turn."""
    let_models_take(monkeypatch, SIZE)
    farm = FarmClient(client)
    jobs = [
        create_job(farm, [block_of(start, 5) for start in range(0, 50, 5)], f"j{size}", model)
        for size, model in ((8, "null:8:2000"), (4, "null:4:2000"))
    ]
    with working(worker_on(server, models_bytes_max=SIZE)) as worker:
        wait_until(lambda: all(job.status().chunks_done == 50 for job in jobs), 20)
        assert len(list(worker.models.resident)) == 1


# What is counted.


def test_loads_and_unloads_are_counted(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load is counted with its time, and each unload with its reason, beyond a restart."""
    let_models_take(monkeypatch, SIZE)
    monkeypatch.setattr(model_store, "ORDERS_SECONDS", 0.0)
    farm = FarmClient(client)
    for _ in range(2):  # processes
        store = store_of(client, models_bytes_max=SIZE, model_idle_seconds=1e-9)
        load(store, 1, 2, 1)
        store.room.unload_idle()
        load(store, 2)
        farm.models.unload("null:2")
        store.follow_orders()
        assert not loaded(store)
        store.leave()
    counts = farm.model_counts.all()
    assert counts["null:1"]._replace(load_ms=0) == ModelCounts(4, 0, unloads_room=2, unloads_idle=2)
    assert counts["null:2"]._replace(load_ms=0) == ModelCounts(
        4, 0, unloads_room=2, unloads_order=2
    )


def test_counts_outlast_an_outage(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted while the server was away is handed over when it is back."""
    store = store_of(client)
    load(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store.farm.model_counts, "add", Mock(side_effect=redis.ConnectionError))
        with pytest.raises(redis.ConnectionError):
            store.tally.hand_over()
    store.tally.hand_over()
    store.tally.hand_over()
    assert store.farm.model_counts.all()["null:1"].loads == 1


# What people want.


def states_of(farm: FarmClient) -> dict[str, tuple[str, bool]]:
    """State of each model of the only worker, and whether it is pinned, by name."""
    beats = farm.workers()
    return {
        each.model.partition("|")[0]: (each.state, each.pinned)
        for beat in beats
        for each in beat.models
    }


def test_orders_are_followed(
    server: LiveServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is loaded because somebody wants it, stays while pinned, and goes when unloaded."""
    let_models_take(monkeypatch, SIZE)
    monkeypatch.setattr(model_store, "ORDERS_SECONDS", 0.0)
    farm = FarmClient(client)
    farm.models.load("null:4")
    farm.models.pin("null:4", pinned=True)
    with working(worker_on(server, models_bytes_max=2 * SIZE, model_idle_seconds=0.5)):
        wait_until(lambda: states_of(farm) == {"null:4": ("ready", True)})
        job = create_job(farm, [block_of(0, 10)], model="null:8")
        wait_until(lambda: job.status().chunks_done == 10)
        job.delete()
        wait_until(lambda: states_of(farm) == {"null:4": ("ready", True)})  # the other is idle
        farm.models.unload("null:4")
        wait_until(lambda: not states_of(farm))
        again = create_job(farm, [block_of(0, 10)], name="again", model="null:4")
        wait_until(lambda: again.status().chunks_done == 10)


def test_a_model_in_use_goes_when_it_is_not(store: ModelStore) -> None:
    """Work in hand keeps a model that is to be unloaded; so does nothing afterwards."""
    load(store, 1)
    in_use = {engine_key(spec_of(1))}
    store.room.in_use = lambda: in_use
    store.farm.models.unload("null:1")
    store.room.follow(store.farm.models.all())
    assert loaded(store) == ["null:1"]
    in_use.clear()
    store.room.follow(store.farm.models.all())
    assert not loaded(store)
    load(store, 1)
    store.room.follow(store.farm.models.all())
    assert loaded(store) == ["null:1"], "it was loaded since"


def test_an_order_is_followed_once_whatever_clocks_say(store: ModelStore) -> None:
    """An unload order by a clock that is ahead is about what is loaded, not what comes later."""
    load(store, 1)
    orders = {"null:1": ModelOrder(unload_at=time.time() + 3600)}
    store.room.follow(orders)
    assert not loaded(store)
    load(store, 1)
    store.room.follow(orders)
    assert loaded(store) == ["null:1"]


def test_a_pin_keeps_a_model_from_going(store: ModelStore) -> None:
    """The others go for a new model, though they were used later."""
    load(store, 1, 2, 3)
    store.farm.models.pin("null:1", pinned=True)
    store.room.follow(store.farm.models.all())
    load(store, 4)
    assert set(loaded(store)) == {"null:1", "null:3", "null:4"}


def test_a_wanted_model_that_cannot_be_had(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not load is tried once for each order, and noted with the reason."""
    monkeypatch.setattr(model_store, "ORDERS_SECONDS", 0.0)
    tried: list[str] = []

    def refuse(spec: JobSpec, _settings: Settings) -> None:
        tried.append(spec.model)
        raise ModelError("no such model")

    monkeypatch.setattr(model_store, "look_at", refuse)
    store.farm.models.load("none")
    for _ in range(3):
        store.follow_orders()
    assert tried == ["none"]
    assert [(each.state, each.reason) for each in store.states()] == [("failed", "no such model")]
    store.farm.models.load("none")
    store.follow_orders()
    assert tried == ["none", "none"]
