"""Tests of outputs that would lie in their own corpus, and be read with it when a run goes on."""

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from embedfarm.collector.corpus_neighbours import check_apart, names_of_output
from embedfarm.collector.manifest import OutputError
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.readers import CorpusError, CorpusOptions
from embedfarm.runs.completion import complete
from embedfarm.runs.place import Place
from embedfarm.runs.request import Request
from tests.farm.harness import write_corpus


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a corpus, which is the working directory."""
    (tmp_path / "rows" / "deep").mkdir(parents=True)
    (tmp_path / "rows" / ".cache").mkdir()
    (tmp_path / "link").symlink_to("rows")
    write_corpus(tmp_path / "rows" / "a.jsonl", ["a"])
    write_corpus(tmp_path / "rows" / "deep" / "b.jsonl", ["b"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def request(*sources: str, glob: str = "**/*", sink: str = "parquet") -> Request:
    """Return a request to embed these sources."""
    spec, options = JobSpec(model="null:8"), CorpusOptions(glob=glob)
    return Request(sources, options, skip_bad_rows=False, spec=spec, sink=sink)


@pytest.mark.parametrize(
    ("source", "glob", "out"),
    [
        ("rows", "**/*", "rows/vectors"),
        ("rows", "**/*", "rows/deep/vectors"),
        ("rows", "**/*", "rows"),
        ("rows", "**/.*/*", "rows/.cache"),
        ("rows", "**/*.jsonl", "rows/vectors"),
        ("rows", "**/ids.*", "link/vectors"),
        ("rows", "**/_*", "rows/vectors"),
        ("link", "**/*", "rows/vectors"),
        ("file://{home}/rows", "**/*", "rows/vectors"),
        ("rows/**", "**/*", "rows/vectors"),
        ("rows/*", "**/*", "rows/vectors"),
        ("link/**/part-*", "**/*", "rows/vectors"),
        ("rows/vectors/*.npy", "**/*", "rows/vectors"),
    ],
)
def test_an_output_in_its_corpus(home: Path, source: str, glob: str, out: str) -> None:
    """An output is refused, before it is begun, where its files would be read as its corpus."""
    sink = "jsonl" if glob.endswith("jsonl") else "npy"
    corpus = source.format(home=home)
    asked = request("rows/a.jsonl", corpus, glob=glob, sink=sink)
    place = Place(out=Path(out), settings=Settings(), devices="cpu", workers=1)
    before = sorted(home.rglob("*"))
    with pytest.raises(OutputError, match=rf"^{out} would be .* {corpus.replace('*', '.')}, "):
        complete(asked, place, threading.Event(), nullcontext(lambda *_: None))
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize("names", [("rows/\udce9.jsonl", "out"), ("rows/a.jsonl", "\udce9")])
def test_names_that_are_not_utf_8(home: Path, names: tuple[str, str]) -> None:
    """A source or an output whose name no record could hold is refused, before it is begun."""
    source, out = names
    place = Place(out=home / out, settings=Settings(), devices="cpu", workers=1)
    with pytest.raises(CorpusError, match=r"\\udce9.* is not UTF-8: rename it"):
        complete(request(source), place, threading.Event(), nullcontext(lambda *_: None))
    assert not place.out.exists()


@pytest.mark.parametrize(
    ("source", "glob", "out"),
    [
        ("rows", "**/*", "vectors"),
        ("rows", "**/*", "rows-vectors"),
        ("rows", "**/*", "rows/.vectors"),
        ("rows", "*.jsonl", "rows/vectors"),
        ("rows", "**/*.md", "rows/vectors"),
        ("rows", "**/*.jsonl", "rows/vectors"),
        ("rows/*.jsonl", "**/*", "rows/vectors"),
        ("rows/deep", "**/*", "rows/vectors"),
        ("rows/a.jsonl", "**/*", "rows"),
        ("-", "**/*", "."),
        ("memory://rows", "**/*", "rows/vectors"),
        ("sqlite:///rows/a.db", "**/*", "rows"),
    ],
)
def test_an_output_beside_its_corpus(home: Path, source: str, glob: str, out: str) -> None:
    """An output may lie beside a corpus, and below one that leaves out its files."""
    check_apart(home / out, names_of_output("parquet"), [source], glob)
