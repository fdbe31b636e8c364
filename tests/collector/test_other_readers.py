"""Tests that other programs read an output as docs/outputs.md says."""

import re
from pathlib import Path
from typing import Any

import pytest

from embedfarm.collector.export import export
from embedfarm.collector.manifest import ERRORS_FILE, SKIPPED_FILE
from embedfarm.collector.search import iter_vectors
from tests.collector.test_patch import COUNT, FAILED, write

TEXT = (Path(__file__).parents[2] / "docs" / "outputs.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an output of several parts with failed chunks and skipped rows, in each format."""
    out = write(tmp_path / "vectors", "parquet", range(COUNT), FAILED, "<f4", ids=True)
    (out / SKIPPED_FILE).write_text('{"place": "corpus.jsonl:3", "reason": "no text"}\n')
    assert (out / ERRORS_FILE).exists()
    for sink in ("npy", "jsonl"):
        export(out, tmp_path / f"vectors-{sink}", sink)
    write(tmp_path / "vectors-stored", "stored", range(COUNT), FAILED, "<f4", ids=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return out


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
@pytest.mark.usefixtures("outputs")
def test_example(example: str) -> None:
    """The code of the document finds all vectors, and nothing else."""
    found: dict[str, Any] = {}
    exec(example, found)  # noqa: S102 -- that of the document
    rows = COUNT if "embeddings.npy" in example else COUNT - len(FAILED)
    assert len(found["vectors"]) == rows


def test_columns_and_order(outputs: Path) -> None:
    """A directory is a table for pyarrow, with the vectors that the output itself has, in order."""
    found: dict[str, Any] = {}
    exec(EXAMPLES[0], found)  # noqa: S102 -- that of the document
    table = found["vectors"]
    assert table.column_names == ["index", "id", "embedding"]
    assert table["embedding"].to_pylist() == [
        row for vectors in iter_vectors(outputs) for row in vectors.matrix.tolist()
    ]
