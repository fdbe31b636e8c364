"""Tests of engines and precisions side by side."""

import json
from pathlib import Path

import numpy as np
import pytest

from embedfarm.cli.bench import bench
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines import comparison, conversion, sentence_transformer
from embedfarm.workers.engines.comparison import (
    Contender,
    compare_engines,
    contenders,
    recall,
)
from tests.farm.harness import run
from tests.workers.tiny_models import SENTENCES, build


def test_all_engines_of_a_cpu_are_compared(tmp_path: Path) -> None:
    """Each engine has its speed and its loss of accuracy, compared with torch in float32."""
    spec = JobSpec(model=str(build("mean_pooled", tmp_path)))
    settings = Settings(engine_cache=tmp_path / "cache")
    first, *others = compare_engines(spec, "cpu", SENTENCES, 2, settings)
    assert (first.engine, first.dtype) == ("torch", "float32")
    assert (first.times_first, first.recall) == (1.0, 1.0)
    assert first.cosine_least == pytest.approx(1.0)
    assert {(each.engine, each.dtype) for each in others} >= {
        ("openvino", "float32"),
        ("openvino", "int8"),
    }
    for each in (first, *others):
        assert not each.reason
        assert each.tokens_per_second > 0
        assert each.cosine_least > 0.95
        assert len(each.seconds) == 2


def test_the_peak_is_taken_between_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's peak is measured between the runs, not when the model was loaded."""
    for engine in (conversion, sentence_transformer):
        monkeypatch.setattr(engine, "known_peak", lambda *_: 1.0)
    spec = JobSpec(model=str(build("mean_pooled", tmp_path)))
    settings = Settings(engine_cache=tmp_path / "cache")
    for each in compare_engines(spec, "cpu", SENTENCES, 1, settings):
        assert (each.dtype == "int8") is (each.peak_ratio == 0)
        # A tiny model may seem faster than a peak that was measured beside other work; of one
        # operation per second it would do thousands of times as much.
        assert each.peak_ratio < 100, each


def test_what_does_not_run_has_its_reason(tmp_path: Path) -> None:
    """An engine that cannot take the model has the reason: OpenVINO takes no word vectors."""
    spec = JobSpec(model=str(build("static", tmp_path)))
    settings = Settings(engine_cache=tmp_path / "cache")
    first, *others = compare_engines(spec, "cpu", SENTENCES, 1, settings)
    assert first.tokens_per_second > 0
    assert all("transformers" in each.reason for each in others if each.engine == "openvino")


def test_no_model_no_comparison(tmp_path: Path) -> None:
    """A comparison of a model that is not there raises `ModelError` at once."""
    with pytest.raises(ModelError):
        compare_engines(JobSpec(model=str(tmp_path)), "cpu", SENTENCES, 1, Settings())


def test_the_first_is_float32() -> None:
    """The first contender is float32, with which all are compared; int8 comes last."""
    assert (contenders("cpu")[0].dtype, contenders("cpu")[-1].dtype) == ("float32", "int8")


def test_recall_counts_neighbours() -> None:
    """Recall is 1 where vectors are the same or scaled, and small where they are shuffled."""
    random = np.random.default_rng(0)
    vectors = random.standard_normal((1500, 16)).astype(np.float32)
    assert recall(vectors * random.uniform(1, 2, (1500, 1)).astype(np.float32), vectors) == 1.0
    assert recall(vectors[::-1].copy(), vectors) < 0.05
    assert recall(vectors[:3], vectors[:3]) == 1.0


def test_the_verb(tmp_path: Path) -> None:
    """`embedfarm bench` prints a line for each engine, for people and for machines."""
    model = build("mean_pooled", tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": t}) + "\n" for t in SENTENCES), encoding="utf-8")
    words = ("bench", corpus, "--model", model, "--rounds", "1")
    told = json.loads(run(*words, "--json").stdout)
    assert told["chunks"] == len(SENTENCES)
    assert [each["engine"] for each in told["contenders"]][:2] == ["torch", "openvino"]
    assert run("bench", corpus, "--model", model, "--chunks", "1").returncode == 2


def test_what_the_verb_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """People see a line for each engine, and the reason of one that did not run."""
    ran = Contender("openvino", "int8", tokens_per_second=1000.0, times_first=2.5)
    none = Contender("openvino", "float32", reason="takes no word vectors")
    monkeypatch.setattr(comparison, "compare_engines", lambda *_: [ran, none])
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": t}) + "\n" for t in SENTENCES), encoding="utf-8")
    bench([str(corpus)], model=str(build("mean_pooled", tmp_path)), text_field="text")
    shown = capsys.readouterr().out
    for words in ("recall@10", "openvino int8", "2.50", "openvino float32: takes no word vectors"):
        assert words in shown
