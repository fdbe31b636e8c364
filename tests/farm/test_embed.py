"""Tests of `embedfarm embed` on corpora of all kinds, with a private farm and the null engine."""

import gzip
import json
import re
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from sentence_transformers.util import quantize_embeddings

from embedfarm.collector.search import iter_vectors, search
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.hyperplanes import hash_vectors
from tests.farm.harness import (
    check_output,
    manifest,
    null_vectors,
    read_parquet,
    run,
    texts_of,
    write_corpus,
)
from tests.support import LiveServer
from tests.workers.running import worker_on, working

MODEL = ("--model", "null:16", "--devices", "cpu", "--workers", "1")


def test_a_corpus_becomes_vectors_in_order(tmp_path: Path) -> None:
    """20,000 chunks of mixed length are there once, in order, with their own vectors and ids."""
    texts = list(texts_of(20_000))
    ids = [f"id-{index}" for index in range(len(texts))]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts, ids)
    words = ("--id-field", "id", "--out", tmp_path / "out", "--json", *MODEL, "--workers", "2")
    done = run("embed", corpus, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["count"] == len(texts)
    check_output(tmp_path / "out", texts, 16)
    assert read_parquet(tmp_path / "out")[2] == ids
    facts = manifest(tmp_path / "out")
    assert facts["count"] == sum(figures["chunks"] for figures in facts["workers"].values())
    assert facts["embed_seconds"] > 0
    assert not (tmp_path / "out" / ".embedfarm").exists()
    assert run("verify", tmp_path / "out", "--against", corpus).returncode == 0


def test_a_finished_output_is_left_alone(tmp_path: Path) -> None:
    """A repeated command says that all is done; another model or corpus is refused."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["one", "two"])
    words = ("embed", corpus, "--out", tmp_path / "out")
    assert run(*words, *MODEL).returncode == 0
    before = (tmp_path / "out" / "_manifest.json").read_bytes()
    again = run(*words, *MODEL)
    assert again.returncode == 0
    assert "finished already" in again.stdout
    other = run(*words, "--model", "null:8")
    assert other.returncode == 2
    assert "model" in other.stderr
    write_corpus(tmp_path / "corpus.jsonl", ["one", "three"])
    changed = run(*words, *MODEL)
    assert changed.returncode == 2
    assert "other texts or ids in rows 0 to 1 now: embed it into another" in changed.stderr
    assert "--embed-changed" not in changed.stderr  # which goes on with an unfinished output
    write_corpus(tmp_path / "corpus.jsonl", ["one", "two", "three"])
    assert "has more rows than 2 now" in run(*words, *MODEL).stderr
    assert (tmp_path / "out" / "_manifest.json").read_bytes() == before
    write_corpus(tmp_path / "corpus.jsonl", ["one", "two"])
    (part,) = (tmp_path / "out").glob("part-*")
    part.unlink()
    gone = run(*words, *MODEL)
    assert (gone.returncode, f"{part.name} is gone" in gone.stderr) == (2, True), gone.stderr


def test_an_output_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that somebody meant for object storage is refused, and makes no directory here."""
    monkeypatch.chdir(tmp_path)
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["one"])
    done = run("embed", corpus, "--out", "s3://bucket/out", *MODEL)
    assert (done.returncode, "not on s3" in done.stderr) == (2, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.mark.parametrize("sink", ["npy", "jsonl"])
def test_other_formats_hold_the_same_vectors(
    tmp_path: Path, sink: str, shared_farm: tuple[str, ...]
) -> None:
    """Outputs as npy and jsonl verify, and hold what parquet would."""
    texts = list(texts_of(50))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    out = tmp_path / "out"
    assert run("embed", corpus, "--out", out, "--format", sink, *shared_farm).returncode == 0
    if sink == "npy":
        vectors = np.load(out / "embeddings.npy", mmap_mode="r")
    else:
        lines = (out / "part-000000000000.jsonl").read_text().splitlines()
        vectors = np.array([json.loads(line)["embedding"] for line in lines], np.float32)
    np.testing.assert_array_equal(vectors, null_vectors(texts, 16))
    assert run("verify", out).returncode == 0


@pytest.mark.parametrize(
    ("sink", "kind"),
    [
        ("parquet", "int8"),
        ("npy", "ubinary"),
        pytest.param("jsonl", "int8", marks=pytest.mark.slow),
    ],
)
def test_quantised_vectors(
    tmp_path: Path, sink: str, kind: Literal["int8", "ubinary"], shared_farm: tuple[str, ...]
) -> None:
    """Quantised vectors are those of the floats, by the ranges of an output of floats."""
    texts = list(texts_of(300))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    words = ["--vector-dtype", kind, "--format", sink]
    if kind == "int8":
        assert run("embed", corpus, "--out", tmp_path / "floats", *shared_farm).returncode == 0
        words += ["--ranges", str(tmp_path / "floats")]
    out = tmp_path / "out"
    done = run("embed", corpus, "--out", out, *words, *shared_farm)
    assert done.returncode == 0, done.stderr
    stored = np.concatenate([vectors.matrix for vectors in iter_vectors(out)])
    floats = null_vectors(texts, 16)
    ranges = np.stack([floats.min(axis=0), floats.max(axis=0)])
    np.testing.assert_array_equal(stored, quantize_embeddings(floats, kind, ranges=ranges))
    hits = search(out, floats[7], 1)
    assert texts[hits[0].index] == texts[7]
    assert run("verify", out, "--against", corpus).returncode == 0


def test_bits_of_hyperplanes(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """Stored bits are those of the float vectors, and a search estimates the cosine from them."""
    texts = list(texts_of(300))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    out = tmp_path / "out"
    words = ("--vector-dtype", "lsh", "--lsh-bits", "1024")
    assert run("embed", corpus, "--out", out, *words, *shared_farm).returncode == 0
    stored = np.concatenate([vectors.matrix for vectors in iter_vectors(out)])
    floats = null_vectors(texts, 16)
    np.testing.assert_array_equal(stored, hash_vectors(floats, 1024))
    hits = search(out, floats[7], 300)
    assert (hits[0].index, hits[0].score) == (7, 1.0)
    exact = floats @ floats[7]
    assert max(abs(hit.score - exact[hit.index]) for hit in hits) < 0.3
    assert run("verify", out, "--against", corpus).returncode == 0
    assert run("embed", corpus, "--out", tmp_path / "no", "--lsh-bits", "100").returncode == 2


def test_two_prompts_are_refused(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """A prompt and the name of one are too much: a sentence, and no traceback."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["one"])
    prompts = ("--prompt", "about: ", "--prompt-name", "query")
    done = run("embed", corpus, "--out", tmp_path / "out", *prompts, *shared_farm)
    assert done.returncode == 2
    assert done.stderr.startswith("embedfarm: prompt and prompt_name are two ways")


def test_int8_needs_ranges_of_its_model(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """Ranges that are missing, superfluous or of another model end the run, before any vector."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["one", "two"])
    np.save(tmp_path / "ranges.npy", np.zeros((2, 15)))
    ranges = ("--ranges", tmp_path / "ranges.npy")
    for words in (("--vector-dtype", "int8"), ranges, ("--vector-dtype", "int8", *ranges)):
        done = run("embed", corpus, "--out", tmp_path / "out", *words, *shared_farm)
        assert done.returncode == 2
        assert "ranges" in done.stderr


def test_strange_texts_become_vectors(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """Unicode, empty, huge, NUL and duplicate texts are all embedded, and shift no row."""
    texts = [
        "",
        "\0",
        "a\0b",
        "é",
        "é",
        "😀 emoji 👩‍👩‍👧",
        "x" * 100_000,
        "twice",
        "twice",
        " ",
        "\u202e",
    ]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    done = run("embed", corpus, "--out", tmp_path / "out", *shared_farm)
    assert done.returncode == 0, done.stderr
    assert "2 chunks without a text" in done.stdout
    check_output(tmp_path / "out", texts, 16)


def test_csv_with_quoted_newlines(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """A quoted newline is part of its text and shifts nothing."""
    corpus = tmp_path / "corpus.csv"
    corpus.write_text('name,body\na,"one\ntwo"\nb,"say ""hi"""\n', encoding="utf-8")
    words = ("--text-field", "body", "--id-field", "name")
    assert run("embed", corpus, "--out", tmp_path / "out", *words, *shared_farm).returncode == 0
    check_output(tmp_path / "out", ["one\ntwo", 'say "hi"'], 16)


def test_standard_input(tmp_path: Path) -> None:
    """`embed -` reads JSON Lines from a pipe."""
    done = run(
        "embed", "-", "--out", tmp_path / "out", *MODEL, stdin=b'{"text": "a"}\n{"text": "b"}\n'
    )
    assert done.returncode == 0, done.stderr
    check_output(tmp_path / "out", ["a", "b"], 16)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("", "the corpus is empty"), ("no json\n{}\n", "2 were left out")],
)
def test_nothing_to_embed_is_no_success(
    tmp_path: Path, content: str, sentence: str, shared_farm: tuple[str, ...]
) -> None:
    """A corpus without a row that can be embedded is refused; once it has one, it is embedded."""
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    corpus.write_text(content)
    words = ("embed", corpus, "--out", out, "--on-bad-row", "skip", *shared_farm)
    done = run(*words)
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    assert not (out / "_manifest.json").exists()
    corpus.write_text(content + '{"text": "a"}\n')
    assert run(*words).returncode == 0
    check_output(out, ["a"], 16)


def damaged(folder: Path, kind: str) -> tuple[Path, str]:
    """Write a corpus that cannot be read; return it, and what the error must name."""
    path = folder / f"corpus.{kind}"
    if kind == "jsonl.gz":
        whole = gzip.compress(b'{"text": "a"}\n' * 1000)
        path.write_bytes(whole[: len(whole) // 2])
        return path, r"corpus\.jsonl\.gz"
    if kind == "parquet":
        pq.write_table(pa.table({"body": ["a"]}), path)
        return path, r"corpus\.parquet.*text.*body"
    if kind == "jsonl":
        path.write_text('{"text": "a"}\n{"txet": "b"}\n', encoding="utf-8")
        return path, r"corpus\.jsonl line 2, field 'text'"
    if kind == "csv":
        path.write_text("a,b\n1,2\n", encoding="utf-8")
        return path, r"corpus\.csv.*text"
    path = folder / "absent.jsonl"
    return path, r"absent\.jsonl"


def test_a_corrected_command_is_not_refused(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """A mistake that ends a command before any vector leaves nothing that a corrected one meets."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["a"])
    out = tmp_path / "out"
    assert run("embed", tmp_path / "corpus.jsnl", "--out", out, *shared_farm).returncode == 2
    done = run("embed", corpus, "--out", out, *shared_farm)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "jsonl", "csv", "absent"])
def test_a_bad_corpus_is_named(tmp_path: Path, kind: str, shared_farm: tuple[str, ...]) -> None:
    """A corpus that cannot be read ends the command with status 2, and is named with the field."""
    corpus, expected = damaged(tmp_path, kind)
    done = run("embed", corpus, "--out", tmp_path / "out", *shared_farm)
    assert done.returncode == 2, done.stderr
    assert re.search(expected, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_bad_rows_can_be_skipped(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """Bad rows are left out, counted, and listed with their line, if `--on-bad-row skip` is set."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "a"}\nnot json\n{"text": 7}\n{"text": "b"}\n', encoding="utf-8")
    out = tmp_path / "out"
    words = ("--redis", server.url, "--job-id", "j", "--model", "null:16")
    with working(worker_on(server)):
        done = run("embed", corpus, "--out", out, "--on-bad-row", "skip", *words)
    assert done.returncode == 0, done.stderr
    check_output(out, ["a", "b"], 16)
    lines = (out / "_skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in lines] == [2, 3]
    assert manifest(out)["skipped"] == FarmClient(client).job("j").status().rows_skipped == 2


def test_ids_that_come_again_are_told(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """Ids that occur more than once are told with their places, and counted."""
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    rows = [f'{{"id": "{name}", "text": "{index}"}}' for index, name in enumerate("abcadefbgaxyz")]
    corpus.write_text("\n".join(rows), encoding="utf-8")
    words = ("--redis", server.url, "--job-id", "j", "--model", "null:16", "--id-field", "id")
    with working(worker_on(server)):
        done = run("embed", corpus, "--out", out, *words)
    assert done.returncode == 0, done.stderr
    assert "3 chunks with the id of an earlier one" in done.stdout
    assert "the first is chunk 3, with the id of chunk 0" in done.stdout
    assert manifest(out)["repeated_ids"] == {"count": 3, "first": 3, "earlier": 0}
    assert FarmClient(client).job("j").status().ids_repeated == 3
    assert not (out / ".embedfarm").exists()


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A model that no worker can load ends the command with status 2 and a sentence."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["a"])
    done = run(
        "embed", corpus, "--out", tmp_path / "out", "--model", "nobody/nothing", "--workers", "1",
        environment={"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "nobody/nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_takes_too_much_memory_is_refused(tmp_path: Path) -> None:
    """A job whose model takes more memory than a worker's models may ends soon and says so."""
    corpus, began = write_corpus(tmp_path / "corpus.jsonl", ["a"]), time.monotonic()
    done = run(
        "embed", corpus, "--out", tmp_path / "out", "--workers", "1", "--dtype", "float32",
        environment={"HF_HUB_OFFLINE": "1", "EMBEDFARM_MODELS_BYTES_MAX": str(64 << 20)},
    )  # fmt: skip
    assert done.returncode != 0
    assert re.search(r"MiniLM-L6-v2 takes 8\d MiB, and `models_bytes_max` is 64 MiB", done.stderr)
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 60


def test_a_corpus_of_another_encoding(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """--encoding is a part of the request: the same command goes on, and UTF-8 is another one."""
    texts = ["café", "naïve", "10 €"]
    corpus, out = tmp_path / "corpus.csv", tmp_path / "out"
    corpus.write_text("".join(f"{text}\n" for text in ["text", *texts]), encoding="cp1252")
    words = ("embed", corpus, "--out", out, *shared_farm)
    refused = run(*words)
    assert (refused.returncode, "--encoding cp1252" in refused.stderr) == (2, True)
    assert run(*words, "--encoding", "cp1252").returncode == 0
    check_output(out, texts, 16)
    again = run(*words, "--encoding", "windows-1252")  # another name of the same
    assert (again.returncode, "finished already" in again.stdout) == (0, True)
    assert run("verify", out, "--against", corpus).returncode == 0
    other = run(*words)
    assert (other.returncode, "encoding" in other.stderr) == (2, True)
    unknown = run(*words, "--encoding", "nonsense")
    assert (unknown.returncode, "unknown encoding" in unknown.stderr) == (2, True)


def test_half_precision_vectors(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """--vector-dtype float16 stores the same vectors in half the space."""
    texts = list(texts_of(30))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    out = tmp_path / "out"
    assert (
        run("embed", corpus, "--out", out, "--vector-dtype", "float16", *shared_farm).returncode
        == 0
    )
    _, vectors, _ = read_parquet(out)
    assert vectors.dtype == np.float16
    np.testing.assert_array_equal(vectors, null_vectors(texts, 16).astype(np.float16))
