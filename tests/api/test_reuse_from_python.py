"""Tests of `embedfarm.embed(…, reuse=…)`: vectors and files of another output, from Python."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import pytest

import embedfarm
from embedfarm.collector.manifest import OutputError
from tests.farm.harness import null_vectors, texts_of
from tests.runs.test_by_reference import shared

TEXTS: Final = list(texts_of(200))


@pytest.fixture(scope="module")
def farm() -> Iterator[embedfarm.Farm]:
    """Keep a private farm of one worker warm."""
    with embedfarm.Farm(model="null:16", devices="cpu", workers=1) as farm:
        yield farm


@pytest.fixture
def old(
    farm: embedfarm.Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> embedfarm.Embeddings:
    """Return an output of several parts."""
    monkeypatch.setenv("EMBEDFARM_PART_BYTES_MAX", str(50 * 4 * 16))
    monkeypatch.setenv("EMBEDFARM_BLOCK_CHUNKS_MAX", "25")
    return farm.embed(pd.DataFrame({"text": TEXTS}), out=tmp_path / "old", progress=False)


@pytest.mark.parametrize("by_reference", [True, False])
def test_parts_that_stay_the_same(
    farm: embedfarm.Farm, old: embedfarm.Embeddings, tmp_path: Path, *, by_reference: bool
) -> None:
    """A table with more rows has the old vectors; by reference it has the old files, too."""
    texts, out = [*TEXTS, "more"], tmp_path / "out"
    made = farm.embed(
        pd.DataFrame({"text": texts}), out=out, progress=False, reuse=[old.path],
        by_reference=by_reference,
    )  # fmt: skip
    np.testing.assert_array_equal(made.matrix, null_vectors(texts, 16))
    assert made.manifest.reused == {str(old.path): 200}
    files = {part.file for part in old.manifest.parts}
    assert len(files) > 2
    assert shared(out, old.path) == (files if by_reference else set())
    assert not made.verify()


def test_what_is_refused(farm: embedfarm.Farm, old: embedfarm.Embeddings, tmp_path: Path) -> None:
    """Parts are taken of an output that is reused, and into its format."""
    before = len(farm.jobs())
    with pytest.raises(OutputError, match="that --reuse names"):
        farm.embed(TEXTS, out=tmp_path / "out", progress=False, by_reference=True)
    with pytest.raises(OutputError, match="both have to be parquet or both jsonl"):
        farm.embed(
            TEXTS, out=tmp_path / "out", progress=False, reuse=[old.path], by_reference=True,
            output_format="npy",
        )  # fmt: skip
    assert len(farm.jobs()) == before
