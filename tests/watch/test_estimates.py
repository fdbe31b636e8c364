"""Tests of what a job is estimated to take: samples, speeds that are measured, and what is kept."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.records import Completion
from embedfarm.contract.settings import DEFAULT_MODEL, Settings
from embedfarm.contract.spending import Estimate
from embedfarm.readers import CorpusOptions
from embedfarm.runs.budget import keep_estimate, read_estimate
from embedfarm.runs.request import Request
from embedfarm.watch import corpus_sample
from embedfarm.watch.corpus_sample import RUN_CHUNKS, CorpusSample, take_sample
from embedfarm.watch.trial_run import TimedCompletion, paces_of
from tests.contract.little_job import heartbeat
from tests.farm.harness import run, texts_of, write_corpus


def request_for(corpus: Path, model: str = "null:4", **fields: object) -> Request:
    """Return the request to embed a corpus."""
    spec = JobSpec(model=model, **fields)  # type: ignore[arg-type] # any of its fields
    return Request((str(corpus),), CorpusOptions(), skip_bad_rows=False, spec=spec, sink="npy")


def test_a_sample_is_from_all_over_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of neighbours from all over are taken, in no order, and each chunk is measured."""
    monkeypatch.setattr(corpus_sample, "SAMPLE_CHUNKS_MAX", 10 * RUN_CHUNKS)
    texts = [f"{index} {'x' * (index // 10)}" for index in range(6500)]
    sample = take_sample(request_for(write_corpus(tmp_path / "c.jsonl", texts)), Settings())
    assert len(sample.lengths) == len(texts)
    assert sample.texts == [texts[index] for index in sample.indices]
    assert sample.lengths[0] < sample.lengths[-1] == len(texts[-1]) // 4 + 2
    starts = sample.indices[::RUN_CHUNKS]
    assert starts != sorted(starts)
    assert np.mean(sample.indices) == pytest.approx(3250, rel=0.1)
    assert len(sample.texts) <= 10 * RUN_CHUNKS


@pytest.mark.parametrize("count", [0, 1, RUN_CHUNKS + 1])
def test_a_small_corpus_is_all_of_its_sample(tmp_path: Path, count: int) -> None:
    """Each chunk of a small corpus is in its sample, once."""
    texts = list(texts_of(count))
    sample = take_sample(request_for(write_corpus(tmp_path / "c.jsonl", texts)), Settings())
    assert sorted(sample.indices) == list(range(count))


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 256),
        ({"max_length": 8}, 8),
        ({"max_length": 999}, 256),
        ({"long": "error"}, 256),
        ({"long": "windows"}, 4 * 256 - 20),  # as the model goes through them
        ({"long": "windows", "long_overlap": 1 << 50}, 900 + 2 + 6 * (2 + 127)),  # is refused
    ],
)
def test_long_texts_count_as_the_model_takes_them(
    tmp_path: Path, fields: dict[str, object], tokens: int
) -> None:
    """A text over the model's own limit counts as much of it as is kept, or all of its windows."""
    corpus = write_corpus(tmp_path / "c.jsonl", ["word " * 900])
    sample = take_sample(request_for(corpus, DEFAULT_MODEL, **fields), Settings())
    assert sample.lengths.tolist() == [tokens]


def completion(worker: str, seconds: float, **others: object) -> Completion:
    """Return a micro-batch of 100 chunks and 1000 tokens."""
    done = Completion(
        worker=worker, model="m", job="j", chunks=100, tokens=1000, padded_tokens=1000,
        real_tokens=1000, seconds=seconds, overhead_seconds=0.0,
    )  # fmt: skip
    return msgspec.structs.replace(done, **others)


SAMPLE = CorpusSample(np.full(1000, 20), [""] * 1000, list(range(1000)))


def test_speeds_and_prices_of_workers() -> None:
    """A worker that warms up is not judged by that, and each has its devices and its price."""
    heard = [
        TimedCompletion(0.0, completion("dear", 9.0, first=True)),
        TimedCompletion(1.0, completion("dear", 1.0, overhead_seconds=0.5)),
        TimedCompletion(1.0, completion("slow", 4.0, first=True)),
    ]
    dear = msgspec.structs.replace(heartbeat("dear"), devices=2, device_cost_per_hour=3600.0)
    found = paces_of(heard, [dear, heartbeat("slow")], SAMPLE)
    # A token of the model is two estimated ones: 100 chunks of 20, and 1000 tokens.
    assert [each.tokens_per_second for each in found] == [2000, 500]
    assert [each.device_seconds for each in found] == [2 * 0.5 / 2000, 4 / 2000]
    assert [each.cost for each in found] == [2 * 0.5 / 2000, 0]


def test_workers_are_no_faster_than_the_clock() -> None:
    """Where all of them wait for something else, what they do together by the clock counts."""
    heard = [TimedCompletion(float(second), completion("one", 0.5)) for second in range(11)]
    (found,) = paces_of(
        heard, [heartbeat("one")], CorpusSample(np.full(1100, 20), [], list(range(1100)))
    )
    assert found.tokens_per_second == pytest.approx(2000)
    assert found.device_seconds == pytest.approx(0.5 / 2000)


def test_an_estimate_is_kept_for_its_request(tmp_path: Path) -> None:
    """An estimate is found again by the run of the same request, and by no other."""
    out, request = tmp_path / "out", request_for(tmp_path / "c.jsonl")
    made = Estimate(1.5, 2.5, 0.1, 3.0)
    assert read_estimate(out, request) == Estimate()
    keep_estimate(out, request, made)
    assert read_estimate(out, request) == made
    assert read_estimate(out, request_for(tmp_path / "c.jsonl", "null:8")) == Estimate()
    (out / ".embedfarm" / "estimate.json").write_text("nonsense", encoding="utf-8")
    assert read_estimate(out, request) == Estimate()


def test_the_estimate_stands_beside_the_truth(tmp_path: Path) -> None:
    """A job that was planned says at its end what was estimated, and what it took."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", list(texts_of(3000)))
    words = ("embed", corpus, "--out", tmp_path / "out", "--model", "null:16:20000")
    here = ("--devices", "cpu", "--workers", "2")
    price = {"EMBEDFARM_DEVICE_COST_PER_HOUR": "3600"}
    planned = run(*words, *here, "--plan", environment=price)
    assert planned.returncode == 0, planned.stderr
    assert "3,000 chunks" in planned.stdout
    assert "cost" in planned.stdout
    assert not list((tmp_path / "out").glob("*.parquet"))
    done = run(*words, *here, environment=price)
    assert done.returncode == 0, done.stderr
    assert "estimated were" in done.stdout
    said = json.loads((tmp_path / "out" / "_manifest.json").read_text(encoding="utf-8"))
    estimate, took = said["estimate"], sum(each["cost"] for each in said["workers"].values())
    assert estimate["estimated_cost"] == pytest.approx(took, rel=0.25)
    assert not (tmp_path / "out" / ".embedfarm").exists()


def test_standard_input_has_no_plan(tmp_path: Path) -> None:
    """A corpus that can be read once only is refused, with what to do."""
    words = ("embed", "-", "--out", tmp_path / "out", "--model", "null:4", "--plan")
    refused = run(*words, stdin=b'{"text": "a"}\n')
    assert refused.returncode == 2
    assert "put it into a file" in refused.stderr
    assert not (tmp_path / "out").exists()
