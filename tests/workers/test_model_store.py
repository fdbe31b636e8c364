"""Tests of which models a worker loads, and what becomes of the one that it has."""

import errno
import json
import shutil
import struct
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import redis
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.job_reports import NOT_NOW
from embedfarm.contract.job_spec import JobSpec, weights_key
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.watch.overview import read_jobs
from embedfarm.workers import job_engines, model_store
from embedfarm.workers.engines import sentence_transformer
from embedfarm.workers.engines.engine import (
    DeviceFailed,
    Engine,
    ModelUnavailable,
    OutOfMemory,
)
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.job_engines import REFUSAL_SECONDS, JobEngines
from embedfarm.workers.model_store import ModelStore
from embedfarm.workers.watchdog import Watchdog
from tests.workers.tiny_models import mean_pooled

NAME = "sentence-transformers/all-MiniLM-L6-v2"
GOOD = JobSpec(model="null:8")


@pytest.fixture
def engines(client: redis.Redis) -> JobEngines:
    """A worker's engines, of which one is loaded for a job."""
    engines = engines_of(client, Settings())
    give(client, "good", GOOD)
    assert engines.prepare("good") is not None
    return engines


def engines_of(client: redis.Redis, settings: Settings) -> JobEngines:
    """Engines of a worker that has loaded nothing."""
    farm = FarmClient(client)
    models = ModelStore(farm, "w", "cpu", settings, Watchdog(settings))
    return JobEngines(farm, "w", models)


def give(client: redis.Redis, name: str, spec: JobSpec) -> None:
    """Give the farm a job."""
    FarmClient(client).job(name).create(spec, 0)


def damaged(directory: Path, damage: str) -> Path:
    """Write a model's files, of which one is damaged; return their directory."""
    mean_pooled(directory / "whole").save(str(directory / "model"))
    weights = directory / "model" / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:-1])
    elif damage == "header":
        weights.write_bytes(struct.pack("<Q", 1 << 62) + whole[8:])
    else:
        (directory / "model" / "config.json").write_text(damage)
    return directory / "model"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (JobSpec(model="null:nothing"), "is not null:"),
        (JobSpec(model="/no/such/directory"), "is no directory"),
        (
            JobSpec(model=NAME, engine="nowhere"),
            "no engine 'nowhere'",
        ),
    ],
)
def test_what_is_not_to_be_had_costs_no_model(
    engines: JobEngines, client: redis.Redis, spec: JobSpec, words: str
) -> None:
    """A job whose model or engine is not to be had is refused; the loaded model stays."""
    engine = engines.prepare("good")
    give(client, "bad", spec)
    assert engines.prepare("bad") is None
    assert words in engines.farm.reports.refusals("bad")["w"]
    assert engines.prepare("good") is engine
    assert engines.models.has_any


def test_a_refusal_is_taken_back(
    engines: JobEngines, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that can embed a job after all no longer counts as one that refuses it."""
    monkeypatch.setattr(job_engines, "REFUSAL_SECONDS", 0.0)
    directory = tmp_path / "late"
    give(client, "early", JobSpec(model=str(directory)))
    assert engines.prepare("early") is None
    mean_pooled(tmp_path / "whole").save(str(directory))
    assert engines.prepare("early") is not None
    assert engines.farm.reports.refusals("early") == {}
    (facts,) = (job for job in read_jobs(engines.farm, ["early"]))
    assert facts.refused == {}


def test_no_room_is_said_to_pass(
    engines: JobEngines, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker without memory for a model refuses its job for a while, and says that it passes."""

    def fill(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    give(client, "j", JobSpec(model=NAME, dtype="float32", engine="torch"))
    with monkeypatch.context() as full:
        full.setattr(sentence_transformer, "SentenceTransformer", fill)
        assert engines.prepare("j") is None
    assert engines.refused("j")
    reason = engines.farm.reports.refusals("j")["w"]
    assert reason.startswith(NOT_NOW)
    assert "CUDA out of memory" in reason
    assert engines.prepare("j") is not None
    assert engines.farm.reports.refusals("j") == {}


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (RuntimeError("no libfoo.so"), False),
        (OSError("libfoo.so: cannot open shared object file"), False),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (MemoryError("no 3 GiB"), True),
        (OutOfMemory("CUDA out of memory"), True),
    ],
)
def test_a_load_that_raises_anything_costs_its_job_only(
    engines: JobEngines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    *,
    passes: bool,
) -> None:
    """A job whose model fails to load in whatever way is refused; the worker serves all others."""

    def fail(*_: object) -> Engine:
        raise error

    bad, name = JobSpec(model="null:4"), type(error).__name__
    give(engines.farm.client, "bad", bad)
    with monkeypatch.context() as broken:
        broken.setattr(model_store, "open_engine", fail)
        assert engines.prepare("bad") is None
    reason = f"null:4 does not load: {name}: {error}"
    assert engines.farm.reports.refusals("bad")["w"] == f"{NOT_NOW if passes else ''}{reason}"
    assert [each.exc_info[1] for each in caplog.records if each.exc_info] == [error]
    assert engines.farm.loads.attempts("w", weights_key(bad)).count == 0
    give(engines.farm.client, "other", JobSpec(model="null:2"))
    assert engines.prepare("other") is not None
    assert engines.prepare("good") is not None


def test_a_variant_that_raises_anything_costs_its_job_only(
    engines: JobEngines, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that a loaded model fails to be made ready for is refused; the model's others go on."""

    def fail(*_: object) -> None:
        raise RuntimeError("no libfoo.so")

    monkeypatch.setattr(NullEngine, "for_job", fail)
    give(client, "bad", msgspec.structs.replace(GOOD, dimensions=4))
    assert not engines.needs_load("bad")
    assert engines.prepare("bad") is None
    assert "RuntimeError: no libfoo.so" in engines.farm.reports.refusals("bad")["w"]
    assert engines.prepare("good") is not None


def test_a_device_that_fails_in_a_load_ends_the_worker(
    engines: JobEngines, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is not to blame for its device, which only a new process can use again."""

    def fail(*_: object) -> Engine:
        raise DeviceFailed("CUDA error: unspecified launch failure")

    monkeypatch.setattr(model_store, "open_engine", fail)
    give(client, "j", JobSpec(model="null:4"))
    with pytest.raises(DeviceFailed):
        engines.prepare("j")


@pytest.mark.parametrize("damage", ["cut", "header", "{", json.dumps([1])])
def test_damaged_files_cost_no_model(
    engines: JobEngines, client: redis.Redis, tmp_path: Path, damage: str
) -> None:
    """A model whose files cannot be those of a model is refused; the loaded model stays."""
    engine = engines.prepare("good")
    directory = damaged(tmp_path, damage)
    give(client, "bad", JobSpec(model=str(directory)))
    assert engines.prepare("bad") is None
    assert str(directory) in engines.farm.reports.refusals("bad")["w"]
    assert engines.prepare("good") is engine
    shutil.rmtree(directory)


@pytest.mark.parametrize("engine", ["torch", "openvino", "auto"])
def test_other_options_of_the_same_weights_load_nothing(
    client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Jobs share what is loaded though they differ in length, or in how they name what they get."""
    settings = Settings(engine_cache=tmp_path / "cache")
    engines = engines_of(client, settings)
    opened = []

    def count(spec: JobSpec, device: str, settings: Settings) -> Engine:
        opened.append(spec)
        return open_engine(spec, device, settings)

    monkeypatch.setattr(model_store, "open_engine", count)
    mean_pooled(tmp_path / "files").save(str(tmp_path / "model"))
    plain = JobSpec(model=str(tmp_path / "model"), engine=engine)
    give(client, "plain", plain)
    first = engines.prepare("plain")
    assert first is not None
    named = {"engine": first.name, "dtype": first.fingerprint["dtype"]}
    vectors = []
    changes: list[dict[str, Any]] = [{"max_length": 7}, {"dtype": named["dtype"]}, named]
    for number, fields in enumerate(changes):
        give(client, f"j{number}", msgspec.structs.replace(plain, **fields))
        vectors.append(embed(engines.prepare(f"j{number}")))
    assert [each.engine for each in opened] == [engine]
    np.testing.assert_array_equal(vectors[1], embed(first))
    assert not np.allclose(vectors[0], vectors[1], atol=1e-3)  # they were cut


def test_another_engine_is_loaded(client: redis.Redis, tmp_path: Path) -> None:
    """A job for another engine, or in another precision, does not get the one that is loaded."""
    settings = Settings(engine_cache=tmp_path / "cache")
    engines = engines_of(client, settings)
    mean_pooled(tmp_path / "files").save(str(tmp_path / "model"))
    plain = JobSpec(model=str(tmp_path / "model"), engine="torch", dtype="float32")
    others = [plain]
    others += [msgspec.structs.replace(plain, engine="openvino")]
    others += [msgspec.structs.replace(plain, dtype="bfloat16")]
    for number, spec in enumerate(others):
        give(client, f"j{number}", spec)
        engine = engines.prepare(f"j{number}")
        assert engine is not None
        assert (engine.name, engine.fingerprint["dtype"]) == (spec.engine, spec.dtype)
    give(client, "odd", JobSpec(model="null:8", engine="nowhere"))
    give(client, "null", JobSpec(model="null:8"))
    assert engines.prepare("null") is not None
    assert engines.prepare("odd") is None
    assert "no engine 'nowhere'" in engines.farm.reports.refusals("odd")["w"]


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_a_model_whose_files_have_changed_is_loaded_anew(
    engine: str, client: redis.Redis, tmp_path: Path
) -> None:
    """A new job has the files as they are now; one of before is refused those, and not lied to."""
    engines = engines_of(client, Settings(engine_cache=tmp_path / "cache"))
    mean_pooled(tmp_path / "files").save(str(tmp_path / "model"))
    spec = JobSpec(model=str(tmp_path / "model"), engine=engine, dtype="float32")
    give(client, "before", spec)
    before = engines.prepare("before")
    weights = tmp_path / "model" / "model.safetensors"
    save_file({name: tensor.roll(1, 0) for name, tensor in load_file(weights).items()}, weights)
    assert not engines.needs_load("before")
    give(client, "while", spec)
    engines.models.room.in_use = lambda: {engine_key(spec)}
    assert not engines.needs_load("while")
    assert engines.prepare("while") is None
    reason = engines.farm.reports.refusals("while")["w"]
    assert reason.startswith(NOT_NOW)
    assert "have changed" in reason
    engines.models.room.in_use = set
    give(client, "after", spec)
    assert engines.needs_load("after")
    assert not np.allclose(embed(engines.prepare("after")), embed(before), atol=1e-3)
    assert not engines.needs_load("before")
    assert engines.prepare("before") is None
    assert "weights" in engines.farm.reports.refusals("before")["w"]


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_a_reference_is_of_the_same_files(engine: str, client: redis.Redis, tmp_path: Path) -> None:
    """A model whose files have changed since it was loaded is compared with none in float32."""
    engines = engines_of(client, Settings(engine_cache=tmp_path / "cache"))
    mean_pooled(tmp_path / "files").save(str(tmp_path / "model"))
    spec = JobSpec(model=str(tmp_path / "model"), engine=engine, dtype="bfloat16")
    give(client, "j", spec)
    opened = engines.prepare("j")
    assert opened is not None
    assert engines.models.open_reference(opened, spec) is not None
    weights = tmp_path / "model" / "model.safetensors"
    save_file({name: tensor.roll(1, 0) for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(ModelUnavailable, match="have changed"):
        engines.models.open_reference(opened, spec)
    if engine == "openvino":
        with pytest.raises(ModelUnavailable, match="have changed"):
            assert opened.exact_twin


def test_a_load_left_behind_by_a_stop_counts_as_none(
    client: redis.Redis, engines: JobEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is asked to stop while it loads a model has not been ended by the load."""
    counts = []

    def stop(spec: JobSpec, *_: object) -> Engine:
        model = weights_key(spec)
        counts.append(engines.farm.loads.attempts("w", model).count)
        engines.models.leave()
        counts.append(engines.farm.loads.attempts("w", model).count)
        raise ModelError("it is no matter here")

    monkeypatch.setattr(model_store, "open_engine", stop)
    give(client, "j", JobSpec(model="null:4"))
    assert engines.prepare("j") is None
    assert counts == [1, 0]


def test_a_load_is_forgotten_when_the_server_is_back(
    client: redis.Redis, engines: JobEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that ended while the server was away is no longer counted once it is back."""
    spec, loads, end = JobSpec(model="null:4"), engines.farm.loads, engines.farm.loads.end

    def away(*_: object) -> None:
        raise redis.ConnectionError("away")

    give(client, "j", spec)
    monkeypatch.setattr(loads, "end", away)
    assert engines.prepare("j") is not None
    assert loads.attempts("w", weights_key(spec)).count == 1
    monkeypatch.setattr(loads, "end", end)
    engines.models.forget_loads()
    assert loads.attempts("w", weights_key(spec)).count == 0


def test_a_load_that_a_crash_brings_back_is_forgotten(
    client: redis.Redis, engines: JobEngines
) -> None:
    """A server that forgets that a load has ended is told again after the outage."""
    spec, loads = JobSpec(model="null:4"), engines.farm.loads
    give(client, "j", spec)
    assert engines.prepare("j") is not None
    loads.begin("w", weights_key(spec))  # as it was before the load had ended
    engines.models.forget_loads()
    assert loads.attempts("w", weights_key(spec)).count == 1, "no outage was noticed"
    engines.models.recover()
    engines.models.forget_loads()
    assert loads.attempts("w", weights_key(spec)).count == 0


def test_a_job_that_is_refused_again_is_logged_once(
    client: redis.Redis,
    engines: JobEngines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A reason is logged when it is new: the worker looks at the job again for ever."""
    monkeypatch.setattr(job_engines, "REFUSAL_SECONDS", 0.0)
    give(client, "j", JobSpec(model="/no/such/directory"))
    with caplog.at_level("WARNING", logger=job_engines.__name__):
        assert [engines.prepare("j") for _ in range(5)] == [None] * 5
    assert len([each for each in caplog.messages if "job j refused" in each]) == 1


@pytest.mark.parametrize(
    ("kind", "seconds"), [(ModelError, 400.0), (ModelUnavailable, REFUSAL_SECONDS)]
)
def test_a_load_that_takes_long_to_fail_is_not_repeated_soon(
    client: redis.Redis,
    engines: JobEngines,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[ModelError],
    seconds: float,
) -> None:
    """Workers that try a model one after the other refuse it together in the end, if for good."""
    clock = Mock(wraps=time, monotonic=Mock(return_value=100.0))

    def fail(*_: object) -> Engine:
        clock.monotonic.return_value += 40.0
        raise kind("its weights are of another make")

    for module in (model_store, job_engines):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(model_store, "open_engine", fail)
    give(client, "j", JobSpec(model="null:4"))
    assert engines.prepare("j") is None
    clock.monotonic.return_value += seconds - 0.1
    assert engines.refused("j")
    clock.monotonic.return_value += 0.2
    assert not engines.refused("j")


def embed(engine: Engine | None) -> NDArray[np.float32]:
    """Vectors of some texts, of which one is long."""
    assert engine is not None
    batch = engine.tokenise(["a text", "another text that is longer " * 9])
    return engine.forward(batch, np.arange(len(batch.lengths)))
