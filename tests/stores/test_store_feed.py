"""Tests of `embed --to` and `export --to`, as commands, and against servers that go away."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from embedfarm.collector.manifest import read_manifest
from embedfarm.collector.store_journal import StoreJournal
from embedfarm.collector.stores.address import parse_address
from embedfarm.collector.stores.patience import ExportStopped, StoreUnavailable
from embedfarm.contract.settings import Settings
from embedfarm.runs.store_feed import Destination, exporting
from tests.farm.harness import Embedding, null_vectors, run, texts_of, write_corpus
from tests.stores.contents import Contents, assert_contents, vectors_of, write_output
from tests.stores.servers import MilvusServer, PostgresServer
from tests.support import free_port, wait_until

DIMENSIONS = 16
MODEL = ("--model", f"null:{DIMENSIONS}", "--devices", "cpu", "--workers", "1")
SMALL_PARTS = {
    "EMBEDFARM_PART_BYTES_MAX": str(100 * 4 * DIMENSIONS),
    "EMBEDFARM_BLOCK_CHUNKS_MAX": "100",
}
TEXTS = list(texts_of(1000))
IDS = [f"id {n}" for n in range(len(TEXTS))]


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A PostgreSQL server for the tests of this file."""
    with PostgresServer(tmp_path_factory.mktemp("store")) as server:
        yield server


def rows(texts: list[str], ids: list[str]) -> Contents:
    """Return what a store has of a corpus."""
    return dict(zip(ids, null_vectors(texts, DIMENSIONS), strict=True))


def test_embed_fills_a_store(postgresql: PostgresServer, tmp_path: Path) -> None:
    """A job's vectors are in the store when it ends, and those of a new version of its corpus.

    Nobody who reads the output, or the command's words, sees the password.
    """
    url = f"{postgresql.url}#filled"
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS, IDS)
    words = ("embed", corpus, "--id-field", "id", "--out", tmp_path / "old", *MODEL, "--to", url)
    done = run(*words, environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    assert "1,000 rows written; 1,000 rows in postgresql://***@127.0.0.1" in done.stdout
    assert_contents(url, rows(TEXTS, IDS))
    again = run(*words, environment=SMALL_PARTS)
    assert "nothing to write; 1,000 rows in" in again.stdout

    texts, ids = ["new", *TEXTS[:500], "other", *TEXTS[502:]], ["new", *IDS[:501], *IDS[502:]]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts, ids)
    reuse = ("--reuse", tmp_path / "old", "--others", "delete", "--json")
    words = ("embed", corpus, "--id-field", "id", "--out", tmp_path / "new", *MODEL, "--to", url)
    done = run(*words, *reuse, environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    exported = json.loads(done.stdout)["exported"]
    assert exported == {"sent": 2, "deleted": 1, "rows": 1000, "exact": True}
    assert_contents(url, rows(texts, ids))
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("secret" in text for text in [*written, done.stdout, done.stderr])


def test_a_store_holds_a_job_back(postgresql: PostgresServer, tmp_path: Path) -> None:
    """A store that cannot be written holds the job back, which says so, and goes on with it.

    The table is the user's own, with a column more.
    """
    url = f"{postgresql.url}#held"
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS, IDS)
    words = (corpus, "--id-field", "id", *MODEL, "--to", url)
    environment = SMALL_PARTS | {"EMBEDFARM_STORE_PARTS_BEHIND_MAX": "2"}
    with psycopg.connect(postgresql.url) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        connection.execute(
            "CREATE TABLE held (id text PRIMARY KEY, embedding vector(16), note text)"
        )
        connection.commit()
        connection.execute("LOCK TABLE held IN SHARE MODE")
        embedding = Embedding(words, tmp_path / "out", environment)
        try:
            wait_until(lambda: "which has to catch up" in embedding.log(), 60)
            assert len(list((tmp_path / "out").glob("part-*"))) == 3
        except BaseException:
            embedding.kill()
            raise
    assert embedding.wait() == 0
    assert_contents(url, rows(TEXTS, IDS))


def test_a_killed_job_goes_on_in_its_store(postgresql: PostgresServer, tmp_path: Path) -> None:
    """A job that is killed while it fills a store goes on when it is run again, each row once."""
    url = f"{postgresql.url}#killed"
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS)
    words = (corpus, *MODEL[2:], "--model", f"null:{DIMENSIONS}:4000", "--to", url)
    out = tmp_path / "out"
    for parts in (1, 4):
        embedding = Embedding(words, out, SMALL_PARTS)
        wait_until(lambda: len(StoreJournal.of(out, parse_address(url)).parts) >= parts, 60)  # noqa: B023
        embedding.kill()
    embedding = Embedding(words, out, SMALL_PARTS)
    assert embedding.wait() == 0, embedding.log()
    job = read_manifest(out).job
    assert_contents(url, rows(TEXTS, [f"{job}:{n}" for n in range(len(TEXTS))]))


def test_a_job_goes_on_without_its_store(postgresql: PostgresServer, tmp_path: Path) -> None:
    """Where the store refuses, the vectors are on the disk, and a later export has them all."""
    url = f"{postgresql.url}#odd"
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS, IDS)
    words = ("embed", corpus, "--id-field", "id", "--out", tmp_path / "out", *MODEL, "--to", url)
    with psycopg.connect(postgresql.url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        connection.execute(
            "CREATE TABLE odd (id text PRIMARY KEY, embedding vector(16), note text NOT NULL)"
        )
        done = run(*words, environment=SMALL_PARTS)
        assert done.returncode == 2
        assert "the job goes on without the store" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("embedfarm: postgresql://***@127.0.0.1")
        assert read_manifest(tmp_path / "out").count == len(TEXTS)
        connection.execute("ALTER TABLE odd ALTER note DROP NOT NULL")
    done = run("export", tmp_path / "out", "--to", url, "--json")
    assert json.loads(done.stdout)["sent"] == len(TEXTS)
    assert_contents(url, rows(TEXTS, IDS))


@pytest.fixture
def frozen(postgresql: PostgresServer, tmp_path: Path) -> Iterator[str]:
    """URL of an empty table that somebody keeps from being written."""
    with psycopg.connect(postgresql.url) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        table = sql.Identifier(tmp_path.name)
        connection.execute(
            sql.SQL("CREATE TABLE {} (id text PRIMARY KEY, embedding vector(16))").format(table)
        )
        connection.commit()
        connection.execute(sql.SQL("LOCK TABLE {} IN EXCLUSIVE MODE").format(table))
        yield f"{postgresql.url}#{tmp_path.name}"


def test_a_store_that_hangs_in_a_call(frozen: str, tmp_path: Path) -> None:
    """An export gives up a store whose answer never comes, and ends at once when it is stopped."""
    out = write_output(tmp_path / "out", {"a": "one"}, matrix=vectors_of(["one"], 16))
    settings, stop = Settings(store_seconds_max=1), threading.Event()
    with (
        pytest.raises(StoreUnavailable, match="has not answered for 1 s"),
        exporting(out, Destination(frozen), settings, stop) as export,
    ):
        export.finish(read_manifest(out))
    threading.Timer(1.0, stop.set).start()
    with (
        pytest.raises(ExportStopped),
        exporting(out, Destination(frozen), Settings(), stop) as export,
    ):
        export.finish(read_manifest(out))


def test_a_job_goes_on_without_a_store_that_hangs(frozen: str, tmp_path: Path) -> None:
    """A job does not wait for a store whose answer never comes, nor does its command."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS, IDS)
    words = ("embed", corpus, "--id-field", "id", "--out", tmp_path / "out", *MODEL, "--to", frozen)
    done = run(*words, environment=SMALL_PARTS | {"EMBEDFARM_STORE_SECONDS_MAX": "1"})
    assert (done.returncode, "has not answered for 1 s" in done.stderr) == (1, True)
    assert read_manifest(tmp_path / "out").count == len(TEXTS)


def test_what_is_no_store(tmp_path: Path) -> None:
    """A store that is away, unknown, or named in part is refused before anything is embedded."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS[:10])
    words = ("embed", corpus, "--out", tmp_path / "out", *MODEL, "--to")
    away = f"postgresql://farm:secret@127.0.0.1:{free_port()}/postgres#documents"
    done = run(*words, away, environment={"EMBEDFARM_STORE_SECONDS_MAX": "1"})
    assert (done.returncode, "has not answered for 1 s" in done.stderr) == (1, True)
    assert "secret" not in done.stderr
    for url, said in (
        ("nostore://host#documents", "no store 'nostore'"),
        ("qdrant://host", "names no collection"),
        ("lancedb://bucket/db#documents", "three slashes"),
    ):
        done = run(*words, url)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert run("export", tmp_path / "out").returncode == 2
    assert not list((tmp_path / "out").glob("part-*"))


@pytest.mark.parametrize("kind", [PostgresServer, MilvusServer])
def test_a_server_that_is_killed(
    tmp_path: Path, kind: type[PostgresServer | MilvusServer], caplog: pytest.LogCaptureFixture
) -> None:
    """An export waits for a server that was killed, says so, and goes on when it is back."""
    texts = {f"id {n}": f"text {n}" for n in range(200)}
    out = write_output(tmp_path / "out", texts)
    with kind(tmp_path) as server:
        url = f"{server.url}#documents"
        killed = threading.Event()

        def show(chunks: int) -> None:
            if chunks >= 100 and not killed.is_set():
                killed.set()
                server.kill()
                threading.Timer(1.0, server.start).start()

        with exporting(out, Destination(url), Settings(), threading.Event(), show) as export:
            assert export.finish(read_manifest(out)).rows == 200
        assert killed.is_set()
        assert "waits for" in caplog.text
        assert "answers again" in caplog.text
        assert_contents(url, dict(zip(texts, vectors_of(list(texts.values())), strict=True)))


def test_a_server_that_stays_away(tmp_path: Path) -> None:
    """An export gives a server up after the time that is set for it."""
    out = write_output(tmp_path / "out", ["a"])
    to = Destination(f"milvus://127.0.0.1:{free_port()}#documents")
    settings = Settings(store_seconds_max=1)
    with (
        pytest.raises(StoreUnavailable, match="has not answered for 1 s"),
        exporting(out, to, settings, threading.Event()) as export,
    ):
        export.finish(read_manifest(out))
