"""Tests of exporting a finished output into another format."""

import shutil
from pathlib import Path

import pytest

from embedfarm.collector.export import export
from embedfarm.collector.manifest import About, ManifestError, OutputError, read_manifest
from embedfarm.collector.output import Output
from embedfarm.collector.output_directory import State, read_state
from embedfarm.collector.sinks import holding_sinks, open_sink
from embedfarm.collector.verify import verify
from embedfarm.contract.records import ChunkError, Result, Rows, text_checksums
from tests.collector.places import damage
from tests.farm.harness import null_vectors

TEXTS = [f"text {n}" for n in range(40)]
IDS = [f"id {n}" for n in range(40)]


def make(out: Path, sink: str, *, ids: bool) -> None:
    """Make an output of four parts, in which two chunks failed."""
    with Output(out, {"model": "m"}, sink=sink, part_bytes_max=10 * 8 * 4) as output:
        for start in range(0, 40, 10):
            texts = TEXTS[start : start + 10]
            result = Result(
                start=start,
                count=10,
                dimensions=8,
                dtype="<f4",
                vectors=null_vectors(texts, 8).tobytes(),
                checksums=text_checksums(texts),
                ids=IDS[start : start + 10] if ids else None,
                errors=[ChunkError(index=start, reason="odd")] if start in {0, 30} else [],
            )
            output.add(result)
        settings = {"model": "m", "format": sink}
        output.finish(40, About(job="j", model="m", fingerprint={}, source={}, settings=settings))


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("sink", holding_sinks())
@pytest.mark.parametrize("other", holding_sinks())
def test_every_format_into_every_other(tmp_path: Path, sink: str, other: str, *, ids: bool) -> None:
    """An export has the same rows, ids and failures; a second one changes nothing."""
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, sink, ids=ids)
    manifest = export(source, target, other)
    assert verify(target, iter([Rows(TEXTS, IDS if ids else None)])) == []
    assert (manifest.count, manifest.failed, manifest.format) == (40, 2, other)
    assert manifest.settings == {"model": "m", "format": other}
    before = read_manifest(source)
    readers = open_sink(sink, source), open_sink(other, target)
    for parts in zip(before.parts, manifest.parts, strict=True):
        one, same = (
            reader.read(part, before.layout) for reader, part in zip(readers, parts, strict=True)
        )
        assert (one.matrix == same.matrix).all()
        assert one.ids == same.ids
    times = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    export(source, target, other)
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == times


@pytest.mark.parametrize("sink", holding_sinks())
def test_a_damaged_part_is_not_exported(tmp_path: Path, sink: str) -> None:
    """An export of vectors that are not those that were written is refused by name."""
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, sink, ids=True)
    damage(source, read_manifest(source).parts[1])
    with pytest.raises(OutputError, match="has other bytes than were written"):
        export(source, target, "npy")
    assert read_state(target) is not State.FINISHED


def test_an_interrupted_export_begins_again(tmp_path: Path) -> None:
    """An interrupted export begins again, and files of another output stop it."""
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, "parquet", ids=True)
    export(source, target, "npy")
    (target / "_manifest.json").unlink()
    with pytest.raises(OutputError, match="files of another output"):
        export(source, target, "npy")
    (target / ".embedfarm").mkdir(exist_ok=True)
    (target / ".embedfarm" / "export.json").touch()
    export(source, target, "npy")
    assert verify(target) == []


@pytest.mark.parametrize("sink", holding_sinks())
def test_an_export_begins_again_in_another_format(tmp_path: Path, sink: str) -> None:
    """An export that is wanted in another format leaves nothing of one that was cut off."""
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, "parquet", ids=True)
    export(source, target, sink)
    (target / "_manifest.json").unlink()
    for path in target.glob("*.npy"):
        path.rename(f"{path}.partial")
    (target / ".embedfarm").mkdir()
    (target / ".embedfarm" / "export.json").touch()
    export(source, target, "parquet" if sink == "npy" else "npy")
    assert verify(target) == []


def test_rows_that_were_skipped_are_listed_beside_an_export(tmp_path: Path) -> None:
    """An export has the list of the rows of the corpus that became no chunk."""
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, "parquet", ids=True)
    (source / "_skipped.jsonl").write_text('{"file": "corpus.jsonl"}\n')
    export(source, target, "npy")
    assert (target / "_skipped.jsonl").read_text() == '{"file": "corpus.jsonl"}\n'
    assert verify(target) == []


def test_an_export_is_of_the_output_as_it_is(tmp_path: Path) -> None:
    """An export says no to an output that was made anew by a job of the same id."""
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, "parquet", ids=True)
    export(source, target, "npy")
    shutil.rmtree(source)
    make(source, "parquet", ids=True)
    with pytest.raises(OutputError, match="not an export of this output"):
        export(source, target, "npy")


def test_an_export_that_has_lost_a_file(tmp_path: Path) -> None:
    """An export that was finished, and has lost a file, says so."""
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, "parquet", ids=True)
    export(source, target, "npy")
    (target / "embeddings.npy").unlink()
    with pytest.raises(OutputError, match=r"was finished, but embeddings\.npy is gone"):
        export(source, target, "npy")


def test_what_is_no_place_for_an_export(tmp_path: Path) -> None:
    """An export refuses an unfinished output, another finished one, and the output itself."""
    source, other = tmp_path / "source", tmp_path / "other"
    with pytest.raises(ManifestError):
        export(source, other, "npy")
    make(source, "parquet", ids=True)
    make(other, "npy", ids=True)
    with pytest.raises(OutputError, match="not an export"):
        export(source, other, "jsonl")
    with pytest.raises(OutputError, match="not an export"):
        export(source, source, "jsonl")
    unfinished = tmp_path / "unfinished"
    with (
        Output(unfinished, {}, sink="npy", part_bytes_max=9) as output,
        pytest.raises(OutputError),
    ):
        export(source, unfinished, output._format)
    with pytest.raises(OutputError, match="not finished"):
        export(source, unfinished, "npy")
