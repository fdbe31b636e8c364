"""Tests of `embedfarm.embed` and `embedfarm.open`: the command line's own run, from Python."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from datasets import Dataset
from numpy.typing import NDArray

import embedfarm
from embedfarm.collector.source_check import SourceChanged
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.processes import Child
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.status import JobStatus
from embedfarm.corpora import ROWS_AT_A_TIME
from embedfarm.readers import CorpusError
from embedfarm.runs import private_farm
from embedfarm.workers.engines.null import NullEngine

COUNT: Final = 500
MODEL: Final = "null:8"
SLOW: Final = "null:8:2000"
TEXTS: Final = [f"chunk number {index}" for index in range(COUNT)]
IDS: Final = [str(index) for index in range(COUNT)]
COLUMNS: Final = {"id": IDS, "text": TEXTS}


def rows() -> Iterator[Mapping[str, Any]]:
    """Yield the corpus as rows."""
    for name, text in zip(IDS, TEXTS, strict=True):
        yield {"text": text, "id": name}


def lines(directory: Path) -> Path:
    """Write the corpus into a file."""
    path = directory / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


CORPORA: Final[dict[str, Callable[[Path], Any]]] = {
    "a path as text": lambda directory: str(lines(directory)),
    "a path": lines,
    "several paths": lambda directory: [lines(directory)],
    "a list of texts": lambda _: TEXTS,
    "a generator of texts": lambda _: iter(TEXTS),
    "rows": lambda _: rows(),
    "pandas": lambda _: pd.DataFrame(COLUMNS),
    "polars": lambda _: pl.DataFrame(COLUMNS),
    "Arrow": lambda _: pa.table(COLUMNS),
    "Hugging Face": lambda _: Dataset.from_dict(COLUMNS),
    "Hugging Face, streamed": lambda _: Dataset.from_dict(COLUMNS).to_iterable_dataset(),
}


def vectors_of(texts: Sequence[str]) -> NDArray[np.float32]:
    """Return the vectors that the null engine makes of texts."""
    engine = NullEngine.open(JobSpec(model=MODEL))
    return engine.forward(engine.tokenise(texts), np.arange(len(texts)))


@pytest.fixture(scope="module")
def farm() -> Iterator[embedfarm.Farm]:
    """Keep a private farm of one worker warm."""
    with embedfarm.Farm(model=MODEL, devices="cpu", workers=1) as farm:
        yield farm


@pytest.mark.parametrize("corpus", CORPORA)
def test_corpora(farm: embedfarm.Farm, tmp_path: Path, corpus: str) -> None:
    """A corpus of whatever kind comes out in its order, and is finished for the same call again."""
    with_ids = "texts" not in corpus
    reading = embedfarm.Reading(id_field="id" if with_ids else None)

    def embed() -> embedfarm.Embeddings:
        made = CORPORA[corpus](tmp_path)
        return farm.embed(made, out=tmp_path / "out", reading=reading, progress=False)

    embeddings = embed()
    assert len(embeddings) == COUNT
    assert not embeddings.failures
    assert embeddings.ids == (IDS if with_ids else None)
    np.testing.assert_array_equal(embeddings.matrix, vectors_of(TEXTS))
    seconds = embeddings.manifest.embedded
    assert embed().manifest.embedded == seconds
    assert not (tmp_path / "out" / ".embedfarm").exists()


TABLE: Final = pa.table(
    COLUMNS | {"size": pa.array(range(COUNT), pa.int16()), "tags": [[str(n)] for n in range(COUNT)]}
)
TABLES: Final[dict[str, Callable[[], Any]]] = {
    "Arrow": lambda: TABLE,
    "polars": lambda: pl.from_arrow(TABLE),
    "pandas": TABLE.to_pandas,
    "Hugging Face": lambda: Dataset(TABLE),
    "Hugging Face, streamed": lambda: Dataset(TABLE).to_iterable_dataset(),
    "rows": lambda: iter(TABLE.to_pylist()),
}


@pytest.mark.parametrize("corpus", TABLES)
def test_columns_stay_beside_the_vectors(farm: embedfarm.Farm, tmp_path: Path, corpus: str) -> None:
    """Columns of tables, data sets and rows are kept, and several make the text."""
    reading = embedfarm.Reading(text="{id}: {text}", keep="all")
    out = farm.embed(TABLES[corpus](), out=tmp_path / "out", reading=reading, progress=False)
    made = pa.Table.from_batches(out.batches())
    assert made.select(TABLE.column_names).to_pylist() == TABLE.to_pylist()
    if corpus != "rows":  # of which nobody says the types
        assert made.schema.field("size").type == pa.int16()
    texts = [f"{name}: {text}" for name, text in zip(IDS, TEXTS, strict=True)]
    np.testing.assert_array_equal(out.matrix, vectors_of(texts))


def test_rows_of_two_kinds(farm: embedfarm.Farm, tmp_path: Path) -> None:
    """A column of rows in Python has one type, and a value of another one is refused."""
    rows = [{"text": "a", "size": 1}] * ROWS_AT_A_TIME + [{"text": "b", "size": "large"}]
    reading = embedfarm.Reading(keep=["size"])
    with pytest.raises(CorpusError, match="of another type than in the rows before"):
        farm.embed(rows, out=tmp_path / "out", reading=reading, progress=False)


BAD: Final[dict[str, tuple[Any, str]]] = {
    "no column": (pa.table({"body": ["a"]}), "no column 'text': it has body"),
    "no field": ([{"body": "a"}], "no field 'text': it has body"),
    "a number": ([1, 2], "no string"),
    "nothing of the kind": (object(), "object is no corpus"),
    "no file": ("/nowhere/corpus.jsonl", "no such file"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_corpus(farm: embedfarm.Farm, tmp_path: Path, what: str) -> None:
    """A corpus that cannot be read raises an error that says why, with the exit status 2."""
    corpus, reason = BAD[what]
    with pytest.raises(EmbedfarmError, match=reason) as raised:
        farm.embed(corpus, out=tmp_path / "out", progress=False)
    assert raised.value.exit_status == 2
    # A corrected call is not taken for another request.
    assert len(farm.embed(TEXTS, out=tmp_path / "out", progress=False)) == COUNT


def test_a_temporary_output(farm: embedfarm.Farm) -> None:
    """Vectors without an output directory are there until they are closed."""
    with farm.embed(TEXTS, progress=False) as embeddings:
        path = embeddings.path
        np.testing.assert_array_equal(np.asarray(embeddings), vectors_of(TEXTS))
    assert not path.exists()


def test_nothing(farm: embedfarm.Farm, tmp_path: Path) -> None:
    """A corpus of no texts is refused."""
    with pytest.raises(embedfarm.EmbedfarmError, match="the corpus is empty"):
        farm.embed([], out=tmp_path / "out", progress=False)


def test_fields_of_the_job(farm: embedfarm.Farm, tmp_path: Path) -> None:
    """Fields of the job are those of the command line; an unknown one is no field."""
    embeddings = farm.embed(
        TEXTS, out=tmp_path / "out", dimensions=4, output_format="npy", progress=False
    )
    assert embeddings.dimensions == 4
    assert isinstance(embeddings.matrix, np.memmap)
    with pytest.raises(TypeError, match="colour"):
        farm.embed(TEXTS, out=tmp_path / "other", colour="red", progress=False)


def test_another_corpus_is_refused(farm: embedfarm.Farm, tmp_path: Path) -> None:
    """A finished output of other rows is not taken for that of this corpus."""
    farm.embed(TEXTS, out=tmp_path / "out", progress=False)
    with pytest.raises(SourceChanged):
        farm.embed(TEXTS[::-1], out=tmp_path / "out", progress=False)


def test_progress(farm: embedfarm.Farm, capsys: pytest.CaptureFixture[str]) -> None:
    """A function is told how it goes; a bar is drawn where one is asked for."""
    told: list[JobStatus] = []

    def show(status: JobStatus, _workers: Sequence[Heartbeat]) -> None:
        told.append(status)

    farm.embed(TEXTS, model=SLOW, progress=show).close()
    assert told
    farm.embed(TEXTS, model=SLOW).close()
    assert "chunks" in capsys.readouterr().err


def test_reading_what_was_made(farm: embedfarm.Farm, tmp_path: Path) -> None:
    """A finished output is opened, read in batches, searched and verified."""
    out = tmp_path / "out"
    reading = embedfarm.Reading(id_field="id")
    farm.embed(lines(tmp_path), out=out, reading=reading, progress=False)
    embeddings = embedfarm.open(out)
    table = pa.Table.from_batches(embeddings.batches())
    assert table["id"].to_pylist() == IDS
    assert table["index"].to_pylist() == list(range(COUNT))
    (hit, *_) = embeddings.search(vectors_of([TEXTS[7]])[0], 3)
    assert (hit.index, hit.id) == (7, "7")
    assert embeddings.search(TEXTS[9])[0].index == 9
    assert not embeddings.verify()
    assert not embeddings.verify([tmp_path / "corpus.jsonl"])
    (out / "part-000000000000.parquet").write_bytes(b"")
    assert embeddings.verify()


def test_no_output(tmp_path: Path) -> None:
    """A directory without a finished output cannot be opened."""
    with pytest.raises(EmbedfarmError, match=r"manifest\.json"):
        embedfarm.open(tmp_path)


INTERRUPTED: Final = """
import sys, embedfarm
texts = [f"chunk number {index}" for index in range(20000)]
def show(status, workers):
    if status.drained_upto > 1000:
        print("some", flush=True)
try:
    embedfarm.embed(iter(texts), out=sys.argv[1], model="null:8:20000", progress=show)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    embeddings = embedfarm.embed(iter(texts), out=sys.argv[1], model="null:8:20000", progress=False)
    print(len(embeddings), flush=True)
"""


def test_an_interrupt_can_be_resumed(tmp_path: Path) -> None:
    """Ctrl-C stops a call cleanly, and the same call goes on; a private farm leaves nothing."""
    environment = {**os.environ, "EMBEDFARM_PART_BYTES_MAX": "4096"}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "out")],
        stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    with process, process.stdout or open(os.devnull) as said:  # noqa: PTH123 # never
        assert said.readline() == "some\n"
        process.send_signal(signal.SIGINT)
        words = said.read().split()
    assert process.returncode == 0
    assert [word for word in words if word != "some"] == ["interrupted", "20000"]
    texts = [f"chunk number {index}" for index in range(20000)]
    np.testing.assert_array_equal(embedfarm.open(tmp_path / "out").matrix, vectors_of(texts))
    assert not (tmp_path / "out" / ".embedfarm").exists()


def test_names() -> None:
    """The package lists what it offers, and imports it when it is used."""
    assert set(dir(embedfarm)) == set(embedfarm.__all__)
    for name in embedfarm.__all__:
        assert getattr(embedfarm, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        embedfarm.nothing  # noqa: B018
    with pytest.raises(CorpusError):
        embedfarm.embed("/nowhere.jsonl")


def test_workers_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no worker gets beyond its start, the call ends with the end of a worker's log."""
    command = [sys.executable, "-c", "raise SystemExit('openvino is not to be had')"]
    broken = [Child(f"worker-{device}", command, {}) for device in ("cpu-0", "cpu-1")]
    monkeypatch.setattr(private_farm, "children", lambda *_: broken)
    with pytest.raises(embedfarm.EmbedfarmError, match="openvino is not to be had"):
        embedfarm.embed(["a"], out=tmp_path / "out", model="null:8")


def test_files_beside_the_user_are_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python files in the working directory are not taken for Python's own or for ours."""
    monkeypatch.chdir(tmp_path)
    for name in ("queue.py", "email.py", "workers.py"):
        (tmp_path / name).write_text("raise RuntimeError('this is the user\\'s own')")
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").touch()
    assert len(embedfarm.embed(["a"], out=tmp_path / "out", model="null:8")) == 1
