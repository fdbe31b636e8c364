"""Tests of the benchmark of many workers, with few of them."""

from pathlib import Path

import pytest

import embedfarm
from benchmarks import crowd


def test_what_workers_cost_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job of ten workers, of which two are killed, is measured and has all its vectors."""
    monkeypatch.setattr(crowd, "WARM_SECONDS", 2.0)
    load = crowd.run(tmp_path, 10, 2.0, 1000.0)
    assert load.chunks > 0
    assert load.commands > load.micro_batches > 0
    assert 0 < load.server < 1
    assert 0 < load.stats.decision_seconds_mean <= load.stats.decision_seconds_p99


def test_a_wrong_vector_is_found(tmp_path: Path) -> None:
    """The vectors of other texts than a corpus has are refused."""
    corpus = crowd.write(tmp_path / "corpus.jsonl", 8)
    embedfarm.embed(corpus, out=tmp_path / "out", model=f"null:{crowd.DIMENSIONS}", progress=False)
    crowd.compare(tmp_path / "out", corpus)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(reversed(corpus.read_text().splitlines(keepends=True))))
    with pytest.raises(SystemExit, match="has not the vectors"):
        crowd.compare(tmp_path / "out", other)
