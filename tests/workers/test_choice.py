"""Tests of the engine that is chosen where nobody chose one."""

import errno
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines import choice
from embedfarm.workers.engines.kept_choices import Choice, forget_choices, kept_choices
from embedfarm.workers.engines.opening import engine_name, open_engine
from tests.workers.tiny_models import SENTENCES, build

if TYPE_CHECKING:
    from embedfarm.workers.engines.engine import Engine


def choices(cache: Path) -> list[Choice]:
    """The choices that are remembered in a cache."""
    files = (cache / "choices").glob("*.json")
    return [msgspec.json.decode(file.read_bytes(), type=Choice) for file in files]


def test_the_faster_engine_is_taken_and_remembered(tmp_path: Path) -> None:
    """Both engines are tried once; the faster one is opened then and later, and embeds the same."""
    settings = Settings(engine_cache=tmp_path / "cache")
    spec = JobSpec(model=str(build("mean_pooled", tmp_path)), dtype="float32")
    engine = open_engine(spec, "cpu", settings)
    (found,) = choices(tmp_path / "cache")
    speeds = found.tokens_per_second
    assert set(speeds) == {"torch", "openvino"}
    faster = "openvino" if speeds["openvino"] >= 1.05 * speeds["torch"] else "torch"
    assert found.engine == engine.name == faster
    other = msgspec.structs.replace(found, engine="torch" if faster == "openvino" else "openvino")
    (file,) = (tmp_path / "cache" / "choices").glob("*.json")
    file.write_bytes(msgspec.json.encode(other))
    again = open_engine(spec, "cpu", settings)
    assert again.name == other.engine
    ours, theirs = (
        each.forward(each.tokenise(SENTENCES), np.arange(len(SENTENCES)))
        for each in (engine, again)
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_model_that_only_torch_takes(tmp_path: Path) -> None:
    """A model that only torch takes is opened with torch, and nothing is tried."""
    settings = Settings(engine_cache=tmp_path / "cache")
    engine = open_engine(JobSpec(model=str(build("static", tmp_path))), "cpu", settings)
    assert engine.name == "torch"
    (found,) = choices(tmp_path / "cache")
    assert (found.engine, found.tokens_per_second) == ("torch", {})


def test_workers_that_start_together_try_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker waits for the first one's findings."""
    settings = Settings(engine_cache=tmp_path / "cache")
    spec = JobSpec(model=str(build("static", tmp_path)))
    tried = []
    first_is_in, second_waits = threading.Event(), threading.Event()
    choose, lock = choice._choose, choice._lock

    def slowly(*words: object) -> Choice:
        tried.append(words)
        first_is_in.set()
        assert second_waits.wait(20)
        return choose(spec, "cpu", settings)

    monkeypatch.setattr(choice, "_choose", slowly)
    engines: list[Engine] = []

    def start() -> None:
        engines.append(open_engine(spec, "cpu", settings))

    threads = [threading.Thread(target=start) for _ in range(2)]
    threads[0].start()
    assert first_is_in.wait(20)

    def waiting(path: Path) -> object:
        second_waits.set()
        return lock(path)

    monkeypatch.setattr(choice, "_lock", waiting)
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert (len(engines), len(tried)) == (2, 1)


def test_a_choice_is_made_again_after_a_while(tmp_path: Path) -> None:
    """A choice holds for a month, is listed meanwhile, and goes when somebody asks for that."""
    settings = Settings(engine_cache=tmp_path / "cache")
    spec = JobSpec(model=str(build("static", tmp_path)))
    open_engine(spec, "cpu", settings)
    ((path, made),) = kept_choices(settings).items()
    assert (made.model, made.engine) == (spec.model, "torch")
    for age_days, again in ((29, False), (31, True)):
        older = msgspec.structs.replace(made, tried_at=time.time() - age_days * 86_400)
        path.write_bytes(msgspec.json.encode(older))
        assert bool(kept_choices(settings)) != again
        open_engine(spec, "cpu", settings)
        (kept,) = kept_choices(settings).values()
        assert (kept.tried_at > older.tried_at) == again
    path.write_bytes(b"{")  # as a full disk may have left it
    open_engine(spec, "cpu", settings)
    assert forget_choices("another", settings) == 0
    assert forget_choices(spec.model, settings) == 1
    assert not kept_choices(settings)


@pytest.mark.parametrize("full", [True, False])
def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    full: bool,
) -> None:
    """Where no choice can be kept, it is made at each start, and people are told why once."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = tmp_path / "cache"
    if full:
        monkeypatch.setattr(Path, "write_bytes", refuse)
    else:
        cache.touch()  # where a directory should be
    settings, spec = Settings(engine_cache=cache), JobSpec(model=str(build("static", tmp_path)))
    for _ in range(2):
        assert open_engine(spec, "cpu", settings).name == "torch"
        assert engine_name(spec, "cpu", settings) == ""
    said = [each for each in caplog.messages if "it cannot be kept" in each]
    assert sum(".json" in each for each in said) == 1
    assert len(said) == len(set(said)) == (1 if full else 2)  # no lock either
