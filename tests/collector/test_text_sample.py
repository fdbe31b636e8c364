"""Tests of the sample of an output's texts: which they are, and what lies beside them."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.collector.manifest import SAMPLE_FILE, About, OutputError
from embedfarm.collector.output import Output
from embedfarm.collector.sample_list import read_sample, write_sample
from embedfarm.collector.text_digests import text_digests
from embedfarm.collector.text_sample import CHARACTERS_MAX, TextSample
from embedfarm.contract.records import ChunkError, Result, text_checksums


def least(texts: list[str], size: int) -> dict[str, int]:
    """The texts with the least digests, with the index of the first row of each."""
    short = [text for text in texts if len(text) <= CHARACTERS_MAX]
    ordered = sorted(set(short), key=lambda text: text_digests([text]))
    return {text: texts.index(text) for text in ordered[:size]}


def found(sample: TextSample) -> dict[str, int]:
    """The texts that a sample has, with their rows."""
    return {each.text: each.index for each in sample.texts}


def add(sample: TextSample, texts: list[str], cuts: list[int], first: int = 0) -> None:
    """Read texts from row `first` on, in batches."""
    bounds = sorted({first, *(cut for cut in cuts if first < cut < len(texts)), len(texts)})
    for start, end in pairwise(bounds):
        sample.add(text_digests(texts[start:end]), texts[start:end], start)


@given(
    st.lists(st.integers(0, 60).map(str), max_size=80),
    st.lists(st.integers(0, 80)),
    st.integers(0, 9),
)
def test_it_depends_on_the_texts_alone(texts: list[str], cuts: list[int], size: int) -> None:
    """Whatever the order, the repeats and the batches, the sample is the texts of least digests."""
    sample = TextSample(Path("unused"), size)
    add(sample, texts, cuts)
    assert found(sample) == least(texts, size)
    sample.begin()
    add(sample, texts[::-1], [])
    assert found(sample).keys() == least(texts, size).keys()


def test_long_texts_are_left_out() -> None:
    """A text of more characters than a sample may have is not kept."""
    texts = ["x" * CHARACTERS_MAX, "y" * (CHARACTERS_MAX + 1), "z"]
    sample = TextSample(Path("unused"), 8)
    add(sample, texts, [])
    assert found(sample) == {texts[0]: 0, "z": 2}


@given(st.integers(0, 50), st.integers(0, 50))
def test_a_later_run_goes_on(
    tmp_path_factory: pytest.TempPathFactory, ahead: int, mark: int
) -> None:
    """A run that reads on from a mark has the sample of all rows, however far the other read."""
    path = tmp_path_factory.mktemp("sample") / "sample.json"
    texts = [f"text {number % 41}" for number in range(50)]
    first = TextSample(path, 5)
    add(first, texts[: max(ahead, mark)], [20])
    first.keep(first.so_far("facts"))
    again = TextSample(path, 5)
    assert not again.recall("other facts")
    assert again.recall("facts")
    add(again, texts, [], mark)
    assert found(again) == least(texts, 5)


def test_what_was_not_kept_is_read_again(tmp_path: Path) -> None:
    """A file that is not there, or is damaged, recalls nothing; who wants none reads none."""
    path = tmp_path / "sample.json"
    assert not TextSample(path, 5).recall("facts")
    path.write_text("{")
    assert not TextSample(path, 5).recall("facts")
    nothing = TextSample(tmp_path / "none.json", 0)
    assert nothing.recall("facts")
    nothing.keep(nothing.so_far("facts"))
    add(nothing, ["0", "1"], [])
    nothing.keep_vectors(result(0, 2), text_digests(["0", "1"]))
    assert not nothing.texts
    assert not nothing.vectors
    assert not (tmp_path / "none.json").exists()


def result(start: int, count: int, failed: tuple[int, ...] = ()) -> Result:
    """A result whose vectors tell the index; some of its chunks failed."""
    vectors = np.arange(start, start + count, dtype=np.float32).repeat(2).reshape(-1, 2) + 1
    vectors[[index - start for index in failed]] = 0
    return Result(
        start=start,
        count=count,
        dimensions=2,
        dtype="<f4",
        vectors=vectors.tobytes(),
        checksums=text_checksums([str(index) for index in range(start, start + count)]),
        errors=[ChunkError(index=index, reason="bad") for index in failed],
    )


@pytest.mark.parametrize("sink", ["parquet", "npy", "jsonl"])
def test_vectors_lie_beside_the_texts(tmp_path: Path, sink: str) -> None:
    """Each text has its own vector, wherever its part is; a chunk that failed is left out."""
    texts = [str(index) for index in range(30)]
    sample = TextSample(tmp_path / "unused", 12)
    add(sample, texts, [])
    failed = min(found(sample).values())
    with Output(tmp_path, {"model": "m"}, sink=sink, part_bytes_max=8 * 7) as output:
        for start in range(0, 30, 5):
            output.add(result(start, 5, (failed,) if start <= failed < start + 5 else ()))
        output.flush()
        listed = write_sample(tmp_path, sample)
        assert listed is not None
        again = write_sample(tmp_path, sample)
        assert again == listed
        about = About(job="j", model="m", fingerprint={}, source={}, sample=listed)
        manifest = output.finish(30, about)
    wanted = sorted(set(found(sample).values()) - {failed})
    read = read_sample(tmp_path, listed)
    assert read.texts == [str(index) for index in wanted]
    assert read.matrix.tolist() == [[index + 1, index + 1] for index in wanted]
    assert pq.read_table(tmp_path / SAMPLE_FILE)["index"].to_pylist() == wanted
    assert manifest.lists == {SAMPLE_FILE: listed.sha256}
    (tmp_path / SAMPLE_FILE).write_bytes(b"PAR1")
    with pytest.raises(OutputError, match="other bytes than were written"):
        read_sample(tmp_path, listed)


@pytest.mark.parametrize("resumed_at", [0, 15])
def test_what_came_by_is_not_read_again(tmp_path: Path, resumed_at: int) -> None:
    """Parts that this run has written are not needed for the list; those of an earlier one are."""
    texts = [str(index) for index in range(30)]
    sample = TextSample(tmp_path / "unused", 12)
    add(sample, texts[:20], [])
    failed = max(found(sample).values())
    with Output(tmp_path, {"model": "m"}, sink="jsonl", part_bytes_max=8 * 5) as output:
        for start in range(0, 30, 5):
            if start == 20:  # texts that leave the sample once others are read
                add(sample, texts, [], 20)
            batch = result(start, 5, (failed,) if start <= failed < start + 5 else ())
            if start >= resumed_at:
                sample.keep_vectors(batch, text_digests(texts[start : start + 5]))
            part = output.add(batch)
            if start >= resumed_at and part is not None and not failed - 5 < start <= failed:
                (tmp_path / part.file).rename(tmp_path / f"gone-{part.file}")
        listed = write_sample(tmp_path, sample)
    assert listed is not None
    assert sample.vectors.keys() <= {each.digest for each in sample.texts}
    wanted = sorted(set(found(sample).values()) - {failed})
    read = read_sample(tmp_path, listed)
    assert read.matrix.tolist() == [[index + 1, index + 1] for index in wanted]


def test_a_chunk_that_failed_when_it_was_made_anew_has_no_vector() -> None:
    """What came by before is dropped; so is everything once the corpus is read from its start."""
    texts = ["0", "1"]
    sample = TextSample(Path("unused"), 2)
    add(sample, texts, [])
    sample.keep_vectors(result(0, 2), text_digests(texts))
    sample.keep_vectors(result(0, 2, (1,)), text_digests(texts))
    assert list(sample.vectors) == [text_digests(["0"])]
    sample.begin()
    assert not sample.vectors


def test_a_list_of_an_earlier_run_goes(tmp_path: Path) -> None:
    """Where no sample is kept any more, that of a run that did not come to its end is removed."""
    with Output(tmp_path, {"model": "m"}, sink="jsonl", part_bytes_max=8) as output:
        output.add(result(0, 2))
        sample = TextSample(tmp_path / "unused", 2)
        add(sample, ["0", "1"], [])
        assert write_sample(tmp_path, sample) is not None
        assert write_sample(tmp_path, TextSample(tmp_path / "unused", 0)) is None
        assert not (tmp_path / SAMPLE_FILE).exists()
        assert write_sample(tmp_path, TextSample(tmp_path / "unused", 0)) is None
