"""Tests of what the judge of an output accepts, and what it refuses."""

from itertools import count
from pathlib import Path
from random import Random

import numpy as np
import pytest

from embedfarm.collector.output import Output
from embedfarm.collector.output_reader import Chunks, OutputReader
from embedfarm.contract.records import Result, text_checksums
from tests.simulation.corpora import Corpus, Version
from tests.simulation.judge import Failure, Stored, expected_vectors, judge
from tests.simulation.pages import Pages
from tests.simulation.user_steps import EDITS
from tests.simulation.views import GONE, Broken, View, Views

OLD, NEW = ["a", "b", "c"], ["b", "a", "c", "d"]
META = b"ef:{j}:meta"


def stored(texts: list[str], attempts: dict[int, int] | None = None) -> Stored:
    """Return an output that was made from some texts."""
    return Stored(len(texts), dict(enumerate(expected_vectors(texts))), attempts or {})


def versions(*held: list[str]) -> list[Version]:
    """Return versions of a source, in the order of the arguments, at 0 s, 1 s and so on."""
    return [Version(float(since), texts) for since, texts in enumerate(held)]


@pytest.mark.parametrize("texts", [OLD, NEW])
def test_each_state_of_the_source_is_right(texts: list[str]) -> None:
    """An output may be any version of its source that there was during the run."""
    judge(stored(texts), versions(NEW, OLD), [], 1)


@pytest.mark.parametrize("texts", [["a", "b", "c", "d"], ["b", "a", "c"], ["a", "c"], []])
def test_a_mixture_is_wrong(texts: list[str]) -> None:
    """An output that is no version of its source as a whole is refused."""
    with pytest.raises(Failure):
        judge(stored(texts), versions(NEW, OLD), [], 1)


def test_a_chunk_that_failed_is_named_and_was_tried() -> None:
    """The judge wants deadly texts to have failed, and no chunk to fail after too few tries."""
    judge(stored(OLD, {1: 3}), versions(OLD), ["b"], 3)
    with pytest.raises(Failure, match="deadly texts not named"):
        judge(stored(OLD), versions(OLD), ["b"], 3)
    with pytest.raises(Failure, match="too few tries"):
        judge(stored(OLD, {1: 2}), versions(OLD), [], 3)


def make_corpus(directory: Path, files: int) -> Corpus:
    """Make twenty texts in some files; each look at the clock takes a second."""
    clock = count()
    paths = [directory / f"{number}.jsonl" for number in range(files)]
    corpus = Corpus(paths, lambda: float(next(clock)), Random(1))
    corpus.write(corpus.make_texts(20))
    return corpus


@pytest.mark.parametrize("files", [1, 3])
def test_a_corpus_remembers_what_it_held(tmp_path: Path, files: int) -> None:
    """The files hold the newest version, and `since` returns the versions held since a moment."""
    corpus = make_corpus(tmp_path, files)
    for _ in range(5):
        for edit in EDITS:
            before = corpus.versions[-1]
            edit(corpus)
            lines = [line for path in corpus.files for line in path.read_text().splitlines()]
            assert len(lines) == len(corpus.rows)
            for line, row in zip(lines, corpus.rows, strict=True):
                assert row is None or f'"{row}"' in line
            newest = corpus.versions[-1]
            assert corpus.since(newest.since - 0.5) == [newest, before]
            assert corpus.since(newest.since) == [newest]
    corpus.mend()
    assert not corpus.is_bad


def test_a_page_that_changes_is_noticed(tmp_path: Path) -> None:
    """A page that a client has read and that is gone later raises an error."""
    pages = Pages()
    pages.read(tmp_path)  # nothing there yet
    pages.seen[0, 4] = "something"
    with pytest.raises(AssertionError, match="gone"):
        pages.check(tmp_path)


def test_pages_are_read_while_others_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may read more pages while those before are read again."""
    pages, vector, read = Pages(), np.ones(1, "<f4").tobytes(), OutputReader.read

    def read_slowly(reader: OutputReader, start: int, count: int) -> Chunks | None:
        pages.seen[start + 100, start + 101] = "of another client"
        return read(reader, start, count)

    with Output(tmp_path, {"model": "m"}, sink="jsonl", part_bytes_max=1) as output:
        output.add(Result(0, 1, 1, dtype="<f4", vectors=vector, checksums=text_checksums(["a"])))
        pages.read(tmp_path)
        monkeypatch.setattr(OutputReader, "read", read_slowly)
        pages.check(tmp_path)
    assert len(pages.seen) == 2


@pytest.mark.parametrize("ending", [b"", b"\0"])
def test_a_page_whose_line_lacks_its_end_is_only_away(tmp_path: Path, ending: bytes) -> None:
    """What a loss of power may leave of a line's end is no error, but a torn line is."""
    pages, vector = Pages(), np.ones(1, "<f4").tobytes()
    with Output(tmp_path, {"model": "m"}, sink="jsonl", part_bytes_max=1) as output:
        for start in range(2):
            sums = text_checksums(["a"])
            output.add(Result(start, 1, 1, dtype="<f4", vectors=vector, checksums=sums))
        pages.read(tmp_path)
        assert list(pages.seen) == [(0, 1), (1, 2)]
        journal = tmp_path / ".embedfarm" / "parts.jsonl"
        whole = journal.read_bytes()
        journal.write_bytes(whole[:-1] + ending)
        pages.check(tmp_path)
        journal.write_bytes(whole[:-2] + ending)
        with pytest.raises(AssertionError, match="chunks 1 to 1 are gone"):
            pages.check(tmp_path)


def test_clients_see_nothing_that_cannot_be() -> None:
    """Chunks that are undone and a job that is open again after its end raise errors."""
    views = Views()
    views.see(META, View(b"1", b"open", 5), lost=False)
    views.see(META, View(b"1", b"open", 3), lost=True)
    with pytest.raises(Broken, match=r"2 chunks of .* are done, 3 were"):
        views.see(META, View(b"1", b"open", 2), lost=False)
    views.see(META, View(b"1", b"finished", 5), lost=False)
    with pytest.raises(Broken, match="is open, was finished"):
        views.see(META, View(b"1", b"open", 5), lost=False)
    views.see(META, View(b"2", b"open", 0), lost=False)
    assert views.lives[META] == 2


def test_what_a_crash_takes_back_is_no_new_life() -> None:
    """An earlier life that shows again after a crash is not counted as a new one."""
    views = Views()
    views.see(META, View(b"1", b"finished", 5), lost=False)
    views.see(META, View(b"2", b"open", 0), lost=False)
    views.forget()
    views.see(META, View(b"1", b"open", 2), lost=False)
    views.see(META, GONE, lost=False)
    assert views.lives[META] == 2


@pytest.mark.parametrize(("state", "life"), [(b"closed", b"1"), (b"failed", b"2")])
def test_a_command_may_finish_what_a_crash_put_back(state: bytes, life: bytes) -> None:
    """A job in an earlier generation, with more chunks, becomes what its command has on disk."""
    views = Views()
    earlier = View(b"1", state, 16, b"1")
    views.see(META, earlier, lost=False)
    views.see(META, View(life, b"closed", 1, b"2"), lost=True)
    for _ in range(2):
        views.forget()
        views.see(META, earlier, lost=False)
        with pytest.raises(Broken, match=r"1 chunks of .* are done, 16 were"):
            views.see(META, earlier._replace(done=1), lost=False)
    views.forget()
    views.see(META, earlier, lost=False)
    views.see(META, View(b"1", b"finished", 1, b"1"), lost=False)
    with pytest.raises(Broken, match="is open, was finished"):
        views.see(META, earlier._replace(state=b"open"), lost=False)
