"""Tests of `embedfarm.embed(…, to=…)`: a vector store is filled beside the files."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pytest

import embedfarm
from embedfarm.collector.store_export import ExportReport
from embedfarm.collector.store_journal import StoreJournal
from embedfarm.collector.stores.address import parse_address
from embedfarm.collector.stores.store import StoreError
from tests.farm.harness import null_vectors, texts_of
from tests.stores.contents import Contents, assert_contents, scale

DIMENSIONS: Final = 16
TEXTS: Final = list(texts_of(300))
IDS: Final = [f"id {n}" for n in range(300)]
READING: Final = embedfarm.Reading(id_field="id")


@pytest.fixture(scope="module")
def farm() -> Iterator[embedfarm.Farm]:
    """Keep a private farm of one worker warm."""
    with embedfarm.Farm(model=f"null:{DIMENSIONS}", devices="cpu", workers=1) as farm:
        yield farm


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a collection that is not there yet."""
    return f"lancedb://{tmp_path}/store#documents"


def rows(texts: Sequence[str], ids: Sequence[str]) -> Contents:
    """Return what a store has of a corpus."""
    return dict(zip(ids, null_vectors(list(texts), DIMENSIONS), strict=True))


CORPORA: Final[dict[str, Callable[[list[str], list[str]], Any]]] = {
    "pandas": lambda texts, ids: pd.DataFrame({"text": texts, "id": ids}),
    "Arrow": lambda texts, ids: pa.table({"text": texts, "id": ids}),
    "rows": lambda texts, ids: ({"text": t, "id": i} for t, i in zip(texts, ids, strict=True)),
}


@pytest.mark.parametrize("kind", CORPORA)
def test_a_corpus_in_memory_fills_a_store(
    farm: embedfarm.Farm, tmp_path: Path, url: str, kind: str
) -> None:
    """The store has the vectors when the call ends; a newer corpus changes what has changed."""
    made = CORPORA[kind]

    def embed() -> embedfarm.Embeddings:
        corpus = made(TEXTS, IDS)
        return farm.embed(corpus, out=tmp_path / "old", reading=READING, progress=False, to=url)

    assert embed().exported == ExportReport(sent=300, rows=300, exact=True)
    assert_contents(url, rows(TEXTS, IDS))
    assert embed().exported == ExportReport(rows=300, exact=True)
    assert not (tmp_path / "old" / ".embedfarm").exists()
    texts, ids = ["new", *TEXTS[:100], "other", *TEXTS[102:]], ["new", *IDS[:101], *IDS[102:]]
    newer = farm.embed(
        made(texts, ids), out=tmp_path / "new", reading=READING, progress=False, to=url,
        reuse=[tmp_path / "old"], others="delete",
    )  # fmt: skip
    assert newer.exported == ExportReport(sent=2, deleted=1, rows=300, exact=True)
    assert_contents(url, rows(texts, ids))


def test_a_submission_fills_a_store_by_its_name(
    farm: embedfarm.Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A farm's submission goes to a store that the settings name; texts have their job's id."""
    url = f"qdrant://{tmp_path}/store#documents"
    monkeypatch.setenv("EMBEDFARM_STORES", json.dumps({"search": {"url": url}}))
    out = tmp_path / "out"
    made = farm.submit(TEXTS, out=out, job_id="nightly", to="search").wait()
    assert made.exported == ExportReport(sent=300, rows=300, exact=True)
    vectors = scale(null_vectors(TEXTS, DIMENSIONS))
    wanted = {f"nightly:{n}": vector for n, vector in enumerate(vectors)}
    assert_contents(url, wanted, 1e-6)
    assert made.manifest.job == "nightly"


INTERRUPTED: Final = """
import sys, embedfarm
from pathlib import Path
out, url, texts = sys.argv[1], sys.argv[2], [f"chunk number {n}" for n in range(3000)]
def show(status, workers):
    journals = Path(out).glob("_stores/*/confirmed.jsonl")
    if any('"part"' in journal.read_text() for journal in journals):
        print("some", flush=True)
options = dict(out=out, model="null:16:1000", job_id="texts", to=url)
try:
    embedfarm.embed(iter(texts), progress=show, **options)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    vectors = embedfarm.embed(iter(texts), progress=False, **options)
    print(vectors.exported.rows, vectors.exported.sent < 3000, flush=True)
"""


def test_an_interrupt_can_be_resumed(tmp_path: Path, url: str) -> None:
    """Ctrl-C stops the call and the export; the same call goes on with both, each row once."""
    environment = {**os.environ, "EMBEDFARM_PART_BYTES_MAX": "6400"}
    words = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "out"), url]
    with subprocess.Popen(words, stdout=-1, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "some\n"
        process.send_signal(signal.SIGINT)
        said = [line for line in process.stdout.read().splitlines() if line != "some"]
    assert (process.returncode, said) == (0, ["interrupted", "3000 True"])
    texts = [f"chunk number {n}" for n in range(3000)]
    assert_contents(url, rows(texts, [f"texts:{n}" for n in range(3000)]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "nowhere"}, "no name in the setting stores"),
        ({"to": "nostore://host#a"}, "no store 'nostore'"),
        ({"to": "lancedb:///tmp/x#a", "others": "drop"}, "others cannot be 'drop'"),
        ({"to": "lancedb:///tmp/x#a", "out": None}, "give out, too"),
    ],
)
def test_what_is_refused(
    farm: embedfarm.Farm, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    """A store that is none, or an output that goes with the answer, ends the call before a job."""
    before = len(farm.jobs())
    with pytest.raises(StoreError, match=said):
        farm.embed(["a"], **{"out": tmp_path / "out", "progress": False} | options)
    assert len(farm.jobs()) == before


def test_a_store_that_fails_at_the_end(farm: embedfarm.Farm, tmp_path: Path, url: str) -> None:
    """The output stays, with nothing of the corpus in memory beside it; the same call goes on."""
    (tmp_path / "store").write_text("no directory")
    out = tmp_path / "out"
    farm.embed(TEXTS, out=out, job_id="late", progress=False)

    def embed() -> embedfarm.Embeddings:
        return farm.embed(TEXTS, out=out, job_id="late", progress=False, to=url)

    with pytest.raises((StoreError, OSError)):
        embed()
    assert not (out / ".embedfarm").exists()
    assert not StoreJournal.of(out, parse_address(url)).parts
    (tmp_path / "store").unlink()
    assert embed().exported == ExportReport(sent=300, rows=300, exact=True)
    assert_contents(url, rows(TEXTS, [f"late:{n}" for n in range(300)]))
