"""Tests of the list of what has changed between two outputs."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedfarm.collector.changes import write_changes
from embedfarm.collector.manifest import CHANGES_FILE, About, OutputError, read_manifest
from embedfarm.collector.output import Output
from embedfarm.collector.text_digests import text_digests
from embedfarm.contract.records import ChunkError, Result, text_checksums

ABOUT: Final = About(job="j", model="m", fingerprint={}, source={}, created=0.0)
CORPORA: Final = st.lists(
    st.tuples(st.integers(0, 9).map("id {}".format), st.sampled_from("abcd")),
    min_size=1,
    max_size=12,
)  # ids repeat, too


def write(directory: Path, rows: Sequence[tuple[str, str]], sink: str, *, finish: bool) -> Path:
    """Write an output of ids and texts, in parts of three chunks; every text "d" fails."""
    with Output(directory, {}, sink=sink, part_bytes_max=12) as output:
        for start in range(0, len(rows), 3):
            ids, texts = (list(column) for column in zip(*rows[start : start + 3], strict=True))
            failed = [start + at for at, text in enumerate(texts) if text == "d"]
            result = Result(
                start=start, count=len(ids), dimensions=1, dtype="<f4", ids=ids,
                vectors=np.ones(len(ids), "<f4").tobytes(), checksums=text_checksums(texts),
                errors=[ChunkError(index=index, reason="bad") for index in failed],
            )  # fmt: skip
            output.add(result, text_digests(texts))
        output.flush()
        if finish:
            output.finish(len(rows), ABOUT)
    return directory


def expected(
    before: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]]
) -> list[dict[str, Any]]:
    """What the list is to hold, by dictionaries."""
    first: dict[str, int] = {}
    for index, (name, _) in enumerate(before):
        first.setdefault(name, index)
    found = []
    for index, (name, text) in enumerate(after):
        there = first.get(name)
        if there is None:
            change = "added"
        elif before[there][1] != text:
            change = "changed"
        elif there != index:
            change = "moved"
        else:
            continue
        found.append({"id": name, "change": change, "index": index, "index_before": there})
    gone = first.keys() - {name for name, _ in after}
    return found + [
        {"id": name, "change": "removed", "index": None, "index_before": first[name]}
        for name in sorted(gone, key=first.__getitem__)
    ]


@settings(max_examples=60, deadline=None)
@given(before=CORPORA, after=CORPORA, sink=st.sampled_from(["parquet", "npy", "jsonl"]))
def test_the_list_is_that_of_a_dictionary(
    before: list[tuple[str, str]], after: list[tuple[str, str]], sink: str
) -> None:
    """Each chunk that was added, changed, moved or removed is listed, and no other is."""
    with TemporaryDirectory() as home:
        old = write(Path(home) / "old", before, sink, finish=True)
        new = write(Path(home) / "new", after, sink, finish=False)
        (index := Path(home) / "index").mkdir()
        changes = write_changes(new, old, read_manifest(old), index)
        listed = pq.read_table(new / CHANGES_FILE).to_pylist()
        assert listed == expected(before, after)
        kinds = [each["change"] for each in listed]
        assert [changes.added, changes.changed, changes.moved, changes.removed] == [
            kinds.count(kind) for kind in ("added", "changed", "moved", "removed")
        ]
        shutil.rmtree(index)
        index.mkdir()
        assert write_changes(new, old, read_manifest(old), index) == changes


def test_a_part_that_is_gone_ends_it(tmp_path: Path) -> None:
    """Where the other output has lost a part nothing is listed."""
    rows = [(f"id {n}", "a") for n in range(9)]
    old = write(tmp_path / "old", rows, "parquet", finish=True)
    new = write(tmp_path / "new", rows, "parquet", finish=False)
    next(old.glob("part-*3.parquet")).unlink()
    (index := tmp_path / "index").mkdir()
    with pytest.raises((OutputError, FileNotFoundError), match="part-"):
        write_changes(new, old, read_manifest(old), index)
    assert not (new / CHANGES_FILE).exists()
