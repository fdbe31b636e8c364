"""Tests of `embedfarm embed --retry-failed`: failed chunks get their vectors."""

import json
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from tests.farm.failed_chunks import fail_chunks
from tests.farm.harness import (
    Embedding,
    check_output,
    manifest,
    null_vectors,
    run,
    texts_of,
    write_corpus,
)
from tests.support import wait_until
from tests.workers.tiny_models import DIMENSIONS, bert

MODEL = ("--model", "null:16", "--devices", "cpu", "--workers", "1")


@pytest.mark.parametrize("sink", ["parquet", "npy"])
def test_what_failed_is_tried_again(
    tmp_path: Path, sink: str, shared_farm: tuple[str, ...]
) -> None:
    """--retry-failed embeds just the chunks that failed, and the output is as if none had."""
    texts = list(texts_of(400))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    out = tmp_path / "out"
    words = ("embed", corpus, "--out", out, "--format", sink, *shared_farm)
    assert run(*words).returncode == 0
    fail_chunks(out, texts, {0, 120, 121, 399})
    assert run(*words).returncode == 3
    done = run(*words, "--retry-failed", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["failed"], facts["repaired"]) == (0, 4)
    if sink == "parquet":
        check_output(out, texts, 16)
    else:
        vectors = np.load(out / "embeddings.npy", mmap_mode="r")
        np.testing.assert_array_equal(vectors, null_vectors(texts, 16))
    assert run("verify", out, "--against", corpus).returncode == 0
    assert not list(out.glob("_errors.jsonl")) + list(out.glob(".embedfarm"))
    again = run(*words, "--retry-failed")
    assert (again.returncode, "finished already" in again.stdout) == (0, True)


def test_a_retry_that_goes_on_after_a_crash(tmp_path: Path) -> None:
    """A retry that is killed leaves the output as it was, and the same command does the rest."""
    texts = list(texts_of(8_000))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    out = tmp_path / "out"
    words = (corpus, "--model", "null:16:10000", "--devices", "cpu")
    assert run("embed", *words, "--out", out).returncode == 0
    fail_chunks(out, texts, set(range(1, 8_000, 2)))
    retrying = Embedding([*words, "--retry-failed"], out, {})
    wait_until(lambda: list(out.glob(".embedfarm/retry-*/.embedfarm/server/socket")), 60)
    [retrying.out] = out.glob(".embedfarm/retry-*/")
    wait_until(lambda: retrying.chunks_done() > 0, 60)
    retrying.kill()
    assert run("verify", out, "--against", corpus).returncode == 0
    assert manifest(out)["failed"] == 4_000
    done = run("embed", *words, "--out", out, "--retry-failed")
    assert done.returncode == 0, done.stderr
    check_output(out, texts, 16)
    assert run("verify", out, "--against", corpus).returncode == 0


def test_what_fails_again_stays_listed(tmp_path: Path) -> None:
    """A chunk that fails again stays listed with one more attempt; a changed source is refused."""
    texts = ["a river", "the river bank " * 1_000, "a bank"]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    model, out = tmp_path / "model", tmp_path / "out"
    modules = [bert(tmp_path / "transformer"), Pooling(DIMENSIONS, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(model))
    words = (
        "embed", corpus, "--out", out, "--model", model, "--engine", "torch", "--dtype", "float32",
        "--long", "error", "--devices", "cpu", "--workers", 1,
    )  # fmt: skip
    assert run(*words).returncode == 3
    before = manifest(out)["parts"]
    done = run(*words, "--retry-failed")
    assert done.returncode == 3, done.stderr
    [line] = [json.loads(line) for line in (out / "_errors.jsonl").read_text().splitlines()]
    assert (line["index"], line["attempts"]) == (1, 2)
    assert manifest(out)["parts"] == before
    assert run("verify", out, "--against", corpus).returncode == 0
    write_corpus(corpus, [*texts[:2], "c"])
    changed = run(*words, "--retry-failed")
    assert (changed.returncode, "other texts" in changed.stderr) == (2, True)
