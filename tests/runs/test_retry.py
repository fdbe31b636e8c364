"""Tests of `embedfarm embed --retry-failed`: failed chunks get their vectors."""

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from embedfarm.collector.column_spool import ColumnSpool
from embedfarm.collector.manifest import About, read_manifest
from embedfarm.collector.output import Output
from embedfarm.contract.records import ChunkError, Result, text_checksums
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


def fail_chunks(
    out: Path, texts: list[str], failed: set[int], table: pa.Table | None = None
) -> None:
    """Replace an output by one in which these chunks failed, as by a faulty device.

    It has the columns of `table` beside the vectors.
    """
    about = {
        name: getattr(read_manifest(out), name)
        for name in (field.name for field in msgspec.structs.fields(About))
    }
    about["sample"] = None
    settings = about["settings"]
    shutil.rmtree(out)
    spool = None
    if table is not None:
        spool = ColumnSpool(out / ".embedfarm" / "columns", table.schema)
        spool.begin(0, 0)
        for batch in table.to_batches():
            spool.put(batch)
    with Output(
        out, settings, sink=settings["format"], part_bytes_max=16 * 4 * 100, columns=spool
    ) as output:
        for start in range(0, len(texts), 50):
            chunks = texts[start : start + 50]
            ends = range(start, start + len(chunks))
            errors = [ChunkError(index=i, reason="odd") for i in ends if i in failed]
            output.add(
                Result(
                    start=start,
                    count=len(chunks),
                    dimensions=16,
                    dtype="<f4",
                    vectors=null_vectors(chunks, 16).tobytes(),
                    checksums=text_checksums(chunks),
                    errors=errors,
                )
            )
        output.finish(len(texts), About(**about))
    shutil.rmtree(out / ".embedfarm")


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
