"""Tests of vectors that are there already: where they are found, and how results are filled."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from embedfarm.collector.digest_index import NOWHERE
from embedfarm.collector.known_vectors import Known, KnownVectors
from embedfarm.collector.manifest import About, OutputError, read_failures, read_manifest
from embedfarm.collector.output import Output
from embedfarm.collector.output_reader import OutputReader
from embedfarm.collector.source_check import RowsDiffer, SourceCheck
from embedfarm.collector.text_digests import DIGESTS_FILE, text_digests
from embedfarm.contract.records import ChunkError, Result, Rows, text_checksums

ABOUT: Final = About(job="j", model="m", fingerprint={}, source={}, created=0.0)
BAD: Final = 7  # a text that cannot be embedded
# Few texts, so that most stand several times, and rows are cut into results at any place.
CORPORA: Final = st.lists(
    st.lists(st.integers(0, 12), min_size=1, max_size=6), min_size=1, max_size=9
)


def vector(text: str, salt: int = 0) -> list[float]:
    """The vector of a text; each output has its own, to tell them apart."""
    return [float(text) + 1, salt]


def embed(start: int, rows: Rows, salt: int) -> Result:
    """The result that a worker gives for some rows, without those that are known."""
    new = [n for n in range(len(rows.texts)) if not (rows.known and rows.known[n])]
    texts = [rows.texts[n] for n in new]
    return Result(
        start=start, count=len(rows.texts), dimensions=2, dtype="<f4",
        vectors=np.array([vector(text, salt) for text in texts], "<f4").tobytes(),
        checksums=text_checksums(texts), known=rows.known, worker="w",
        errors=[
            ChunkError(index=start + n, reason="bad", attempts=2)
            for n in new if rows.texts[n] == str(BAD)
        ],
    )  # fmt: skip


def write(
    directory: Path, batches: Sequence[Sequence[int]], outputs: Sequence[Known], sink: str,
    salt: int,
) -> None:  # fmt: skip
    """Write an output of some texts; it is closed and opened again after each part."""
    at = directory.with_name(f"{directory.name} known")
    done = 0
    while done < sum(map(len, batches)):
        with Output(directory, {}, sink=sink, part_bytes_max=50) as output:
            source, start = SourceCheck(), 0
            source.known = known = KnownVectors(at, 30, directory, outputs)
            source.begin(output.parts)
            for batch in batches:
                rows = source.feed(Rows(list(map(str, batch)), None))
                made, start = embed(start, rows, salt), start + len(batch)
                if start <= output.buffered.stop:
                    continue
                accepted = source.accept(made)
                assert accepted is not None
                filled = known.fill(accepted, source.places(made), output)
                before = output.chunks_reused
                output.add(filled.result, source.digests(made), filled.reused)
                assert output.chunks_reused == before + sum(filled.reused.values())
                if output.buffered.stop == output.next_index and start > done:
                    break
            done = start
            if done == sum(map(len, batches)):
                manifest = output.finish(done, ABOUT)
                assert output.chunks_reused == sum(manifest.reused.values())


def read(directory: Path) -> NDArray[np.float32]:
    """All vectors of an output, zero where a chunk has failed."""
    with OutputReader(directory) as reader:
        parts, start = [], 0
        while (chunks := reader.read(start, 10**6)) is not None:
            parts.append(np.where(chunks.batch.good[:, None], chunks.batch.matrix, 0))
            start = chunks.end
    return np.concatenate(parts)


@settings(max_examples=60, deadline=None)
@given(old=CORPORA, older=CORPORA, new=CORPORA, sink=st.sampled_from(["npy", "parquet", "jsonl"]))
def test_each_text_has_the_first_vector_that_there_is(
    old: list[list[int]], older: list[list[int]], new: list[list[int]], sink: str
) -> None:
    """A text is taken from the first output that has it, or from the first row, and once made."""
    with TemporaryDirectory() as home:
        outputs: list[Known] = []
        for salt, batches in enumerate((old, older)):
            directory = Path(home) / str(salt)
            write(directory, batches, (), sink, salt)
            outputs.append(Known(directory, read_manifest(directory)))
        out = Path(home) / "out"
        write(out, new, outputs, sink, 2)
        texts = [text for batch in new for text in batch]
        had: dict[int, int] = {}
        for salt, batches in ((1, older), (0, old)):
            had |= {text: salt for batch in batches for text in batch if text != BAD}
        expected = [
            [0, 0] if text == BAD else vector(str(text), had.get(text, 2)) for text in texts
        ]
        assert read(out).tolist() == expected
        failed = [each.index for each in read_failures(out)]
        assert failed == [at for at, text in enumerate(texts) if text == BAD]
        manifest = read_manifest(out)
        embedded = len({text for text in texts if text not in had})
        assert sum(each.chunks for each in manifest.workers.values()) == embedded
        assert sum(manifest.reused.values()) == len(texts) - embedded


def test_a_result_without_its_vectors_is_not_written(tmp_path: Path) -> None:
    """A result that lacks vectors is refused where nobody knows them."""
    result = embed(0, Rows(["1", "2"], None, b"\0\1"), 0)
    with (
        Output(tmp_path, {}, sink="npy", part_bytes_max=50) as output,
        pytest.raises(OutputError, match="lacks vectors"),
    ):
        output.add(result)
    source = SourceCheck()
    source.begin([])
    source.feed(Rows(["1", "2"], None))
    with pytest.raises(RowsDiffer):
        source.accept(result)
    source.known = KnownVectors(tmp_path / "known", 1, tmp_path, ())
    source.begin([])
    source.feed(Rows(["1", "2"], None))
    assert source.places(result).tolist() == [NOWHERE, NOWHERE]
    with pytest.raises(RowsDiffer):
        source.accept(result)


def test_an_output_that_was_begun_without_digests_goes_on(tmp_path: Path) -> None:
    """Rows before are not known where an earlier version has kept no digests of them."""
    write(tmp_path / "old", [[1, 2, 3]], (), "npy", 0)
    for there in (True, False):
        known = KnownVectors(tmp_path / "known", 1, tmp_path / "old", ())
        known.begin(2)
        found = known.find(text_digests(["1", "3", "3"]), 2)
        assert found.tolist() == ([0, NOWHERE, 3] if there else [NOWHERE, NOWHERE, 3])
        (tmp_path / "old" / DIGESTS_FILE).unlink(missing_ok=True)


def test_vectors_of_another_layout_are_not_taken(tmp_path: Path) -> None:
    """An output whose vectors have another type or size than the workers' ends the run."""
    write(tmp_path / "old", [[1, 2]], (), "npy", 0)
    old = Known(tmp_path / "old", read_manifest(tmp_path / "old"))
    known = KnownVectors(tmp_path / "known", 1, tmp_path / "out", [old])
    source = SourceCheck()
    source.known = known
    source.begin([])
    rows = source.feed(Rows(["2", "3"], None))
    assert rows.known == b"\1\0"
    result = Result(
        start=0, count=2, dimensions=3, dtype="<f4", vectors=bytes(12),
        checksums=text_checksums(["3"]), known=rows.known,
    )  # fmt: skip
    with (
        Output(tmp_path / "out", {}, sink="npy", part_bytes_max=50) as output,
        pytest.raises(OutputError, match="vectors of 2 float32, and the workers make 3 float32"),
    ):
        known.fill(result, source.places(result), output)
