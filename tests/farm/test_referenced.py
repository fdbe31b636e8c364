"""Tests of jobs whose texts workers read where they lie, with real processes and kills."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from embedfarm.contract.encoding import decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.records import Block
from tests.farm.harness import (
    Embedding,
    check_output,
    manifest,
    role,
    run,
    texts_of,
    write_corpus,
)
from tests.support import LiveServer, wait_until

MODEL = ("--model", "null:16")
PRIVATE = ("--devices", "cpu", "--workers", "2")
REFERENCED = ("--texts-from", "source")
ROWS = 1_500  # as many as are sent while no worker is there
SMALL = {"EMBEDFARM_PART_BYTES_MAX": "65536"}


def write_parquet(path: Path, texts: Sequence[str]) -> Path:
    """Write a corpus of Parquet with ids, in row groups of which each has several blocks."""
    ids = [str(number) for number in range(len(texts))]
    pq.write_table(pa.table({"id": ids, "text": texts}), path, row_group_size=3_000)
    return path


@pytest.mark.parametrize("name", ["c.jsonl", "c.parquet"])
def test_a_private_farm_reads_where_texts_lie(tmp_path: Path, name: str) -> None:
    """Vectors, ids and checksums are those of a job whose blocks have texts; so is a reuse."""
    texts = list(texts_of(8_000))
    ids = [str(each) for each in range(len(texts))]

    def write(texts: Sequence[str]) -> Path:
        if name == "c.parquet":
            return write_parquet(tmp_path / name, texts)
        return write_corpus(tmp_path / name, texts, ids)

    corpus = write(texts)
    stored = tmp_path / "stored"
    stored.mkdir()
    ways = ((), REFERENCED, (*REFERENCED, "--stored", stored))
    for number, words in enumerate(ways):
        out = tmp_path / f"out-{number}"
        done = run("embed", corpus, "--id-field", "id", "--out", out, *MODEL, *PRIVATE, *words)
        assert done.returncode == 0, done.stderr
        check_output(out, texts, 16)
    facts = [manifest(tmp_path / f"out-{number}") for number in range(len(ways))]
    for each in facts[1:]:
        assert each["settings"] == facts[0]["settings"]
        sums = [[part["texts_sha256"] for part in one["parts"]] for one in (each, facts[0])]
        assert sums[0] == sums[1]
    changed = list(texts)
    changed[100:110] = [f"new {number}" for number in range(10)]
    write(changed)
    out = tmp_path / "reused"
    done = run(
        "embed", corpus, "--id-field", "id", "--out", out, *MODEL, *PRIVATE, *REFERENCED,
        "--reuse", tmp_path / "out-0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_output(out, changed, 16)
    assert sum(manifest(out)["reused"].values()) == len(texts) - 10


def test_bad_rows_between(tmp_path: Path) -> None:
    """Bad rows are listed and left out, and the rows on both sides have their vectors."""
    texts = list(texts_of(2_000))
    corpus = write_corpus(tmp_path / "c.jsonl", texts)
    lines = corpus.read_text().splitlines(keepends=True)
    for place in (1_500, 700, 699, 0):
        lines.insert(place, '{"title": "no text"}\n')
    corpus.write_text("".join(lines))
    out = tmp_path / "out"
    done = run("embed", corpus, "--out", out, *MODEL, *PRIVATE, *REFERENCED, "--on-bad-row", "skip")
    assert done.returncode == 0, done.stderr
    check_output(out, texts, 16)


WORK = ("work", "--devices", "cpu", "--workers", "1")


def begin(farm: FarmClient, server: LiveServer, corpus: Path, out: Path) -> Embedding:
    """Start a job whose blocks refer to a corpus, and wait until all of them are on the server."""
    words = [corpus, *MODEL, *REFERENCED, "--redis", server.url, "--job-id", "j"]
    embedding = Embedding(words, out, SMALL)
    wait_until(lambda: (found := farm.statuses().get("j")) and found.chunk_count == ROWS)
    return embedding


def test_the_server_gets_no_text(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """Blocks on the server are references; who may not read them says so, and who may does all."""
    texts = list(texts_of(ROWS))
    corpus, out = write_corpus(tmp_path / "c.jsonl", texts), tmp_path / "out"
    embedding = begin(FarmClient(client), server, corpus, out)
    entries = cast("list[Any]", client.xrange(FarmClient(client).job("j").keys.blocks))
    blocks = [decode(Block, fields[b"block"]) for _, fields in entries]
    assert sum(block.count for block in blocks) == len(texts)
    assert all(block.reference is not None and not block.texts for block in blocks)
    assert max(len(fields[b"block"]) for _, fields in entries) < 300
    with role(server, tmp_path, *WORK):
        assert embedding.wait() == 2
    assert "is not below one of source_roots (empty)" in embedding.log()
    with role(server, tmp_path, *WORK, source_roots=f'["{tmp_path}"]'):
        assert begin(FarmClient(client), server, corpus, out).wait() == 0
    check_output(out, texts, 16)


def test_rows_that_were_changed_are_not_embedded(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A row that was changed after it was sent ends the run, which goes on when it is restored."""
    texts = list(texts_of(ROWS))
    corpus, out = write_corpus(tmp_path / "c.jsonl", texts), tmp_path / "out"
    # A command that goes on may have looked at its corpus for the last time, or not.
    begin(FarmClient(client), server, corpus, out).kill()
    kept = corpus.read_bytes()
    other = write_corpus(tmp_path / "other.jsonl", [*texts[:900], texts[901], *texts[901:]])
    other.replace(corpus)
    embedding = begin(FarmClient(client), server, corpus, out)
    with role(server, tmp_path, *WORK, source_roots=f'["{tmp_path}"]'):
        assert embedding.wait() == 2
        assert "than when they were sent" in embedding.log()
        corpus.write_bytes(kept)
        assert begin(FarmClient(client), server, corpus, out).wait() == 0
    check_output(out, texts, 16)


def test_kills_lose_nothing(tmp_path: Path) -> None:
    """Command, workers and server are killed, and every vector is that of its text."""
    texts = list(texts_of(60_000))
    corpus, out = write_parquet(tmp_path / "c.parquet", texts), tmp_path / "out"
    words = [corpus, "--id-field", "id", *MODEL, *PRIVATE, *REFERENCED]
    for victim in ("worker", "server", "command"):
        embedding = Embedding(words, out, SMALL)
        parts = embedding.parts()
        embedding.wait_for_parts(parts + 2)
        if victim != "command":
            embedding.kill_one(victim)
            embedding.wait_for_parts(embedding.parts() + 2)
        embedding.kill()
    assert run("embed", *words, "--out", out, environment=SMALL).returncode == 0
    check_output(out, texts, 16)
