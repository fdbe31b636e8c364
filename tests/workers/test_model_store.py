"""Tests of which models a worker loads, and what becomes of the one that it has."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import redis
import torch

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_reports import NO_ROOM
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.watch.overview import read_jobs
from embedfarm.workers import models
from embedfarm.workers.engines import sentence_transformer
from embedfarm.workers.models import ModelStore
from embedfarm.workers.watchdog import Watchdog
from tests.workers.tiny_models import mean_pooled

NAME = "sentence-transformers/all-MiniLM-L6-v2"
GOOD = JobSpec(model="null:8")


@pytest.fixture
def store(client: redis.Redis) -> ModelStore:
    """A worker's models, of which one is loaded for a job."""
    settings = Settings()
    store = ModelStore(FarmClient(client), "w", "cpu", settings, Watchdog(settings))
    give(client, "good", GOOD)
    assert store.prepare("good") is not None
    return store


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
    store: ModelStore, client: redis.Redis, spec: JobSpec, words: str
) -> None:
    """A job whose model or engine is not to be had is refused; the loaded model stays."""
    engine = store.prepare("good")
    give(client, "bad", spec)
    assert store.prepare("bad") is None
    assert words in store.farm.reports.refusals("bad")["w"]
    assert store.prepare("good") is engine
    assert store.loaded


def test_a_refusal_is_taken_back(
    store: ModelStore, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that can embed a job after all no longer counts as one that refuses it."""
    monkeypatch.setattr(models, "REFUSAL_SECONDS", 0.0)
    directory = tmp_path / "late"
    give(client, "early", JobSpec(model=str(directory)))
    assert store.prepare("early") is None
    mean_pooled(tmp_path / "whole").save(str(directory))
    assert store.prepare("early") is not None
    assert store.farm.reports.refusals("early") == {}
    (facts,) = (job for job in read_jobs(store.farm, ["early"]))
    assert facts.refused == {}


def test_no_room_is_said_to_pass(
    store: ModelStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker without memory for a model refuses its job for a while, and says that it passes."""

    def fill(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    give(client, "j", JobSpec(model=NAME, dtype="float32", engine="torch"))
    with monkeypatch.context() as full:
        full.setattr(sentence_transformer, "SentenceTransformer", fill)
        assert store.prepare("j") is None
    assert store.refused("j")
    reason = store.farm.reports.refusals("j")["w"]
    assert reason.startswith(NO_ROOM)
    assert "CUDA out of memory" in reason
    assert store.prepare("j") is not None
    assert store.farm.reports.refusals("j") == {}


@pytest.mark.parametrize("damage", ["cut", "header", "{", json.dumps([1])])
def test_damaged_files_cost_no_model(
    store: ModelStore, client: redis.Redis, tmp_path: Path, damage: str
) -> None:
    """A model whose files cannot be those of a model is refused; the loaded model stays."""
    engine = store.prepare("good")
    directory = damaged(tmp_path, damage)
    give(client, "bad", JobSpec(model=str(directory)))
    assert store.prepare("bad") is None
    assert str(directory) in store.farm.reports.refusals("bad")["w"]
    assert store.prepare("good") is engine
    shutil.rmtree(directory)
