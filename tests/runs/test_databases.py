"""Tests of corpora in a database: a real SQLite, and a real PostgreSQL."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adbc_driver_postgresql.dbapi
import psycopg
import pytest

import embedfarm
from embedfarm.collector.column_rows import same_rows
from embedfarm.readers import CorpusError, CorpusOptions, fail_on_bad_row, read_corpus
from embedfarm.readers.kept_columns import find_columns
from tests.farm.harness import Embedding, null_vectors, run
from tests.runs.test_columns import DIMENSIONS, MODEL, SMALL_PARTS, kept
from tests.stores.servers import PostgresServer

COUNT = 1500
QUERY = "SELECT id, body, title, price FROM docs"


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Return the URL of a SQLite database, whose rows lie there in no order."""
    path = tmp_path / "corpus.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE docs (id INTEGER, body TEXT, title TEXT, price REAL)")
        rows = ((n * 7 % COUNT, f"body {n}", f"title {n}", n / 3) for n in range(COUNT))
        connection.executemany("INSERT INTO docs VALUES (?, ?, ?, ?)", rows)
    connection.close()
    return f"sqlite:///{path}"


def change(database: str, *statements: str) -> None:
    """Change a SQLite database."""
    with sqlite3.connect(database.removeprefix("sqlite:///")) as connection:
        for each in statements:
            connection.execute(each)
    connection.close()


def texts_by_id() -> list[str]:
    """Return the texts of the corpus in the order of their ids."""
    texts = [""] * COUNT
    for n in range(COUNT):
        texts[n * 7 % COUNT] = f"body {n}"
    return texts


def read(url: str, query: str | None, **options: Any) -> list[str]:  # noqa: ANN401 # as they are
    """Return the texts of a query's rows."""
    chosen = CorpusOptions(query=query, **{"text_field": "body", "id_field": "id"} | options)
    batches = list(read_corpus([url], chosen, fail_on_bad_row))
    return [text for rows in batches for text in rows.texts]


def test_rows_come_in_the_order_of_their_ids(database: str) -> None:
    """The rows of a query come by id, however they lie in the database."""
    assert read(database, QUERY) == texts_by_id()
    some = "SELECT * FROM docs WHERE id < 3"
    for query in (some + ";  ", some + " -- the first"):
        assert read(database, query) == texts_by_id()[:3]
    template = read(database, QUERY, template="{id}: {title}")
    assert template[1].startswith("1: title ")


def test_a_killed_command_goes_on(tmp_path: Path, database: str) -> None:
    """A run that goes on has all rows once; rows that were changed meanwhile are told of."""
    out = tmp_path / "out"
    reading = (
        "--query",
        QUERY,
        "--text-field",
        "body",
        "--id-field",
        "id",
        "--keep",
        "price,title",
    )
    slow = ("--model", f"null:{DIMENSIONS}:20000", *MODEL[2:])
    embedding = Embedding((database, *reading, *slow), out, SMALL_PARTS)
    embedding.wait_for_parts(2)
    embedding.kill()
    words = ("embed", database, *reading, *slow, "--out", out)
    change(database, "UPDATE docs SET price = -1 WHERE id = 3")
    changed = run(*words, environment=SMALL_PARTS)
    assert (changed.returncode, "has other columns now" in changed.stderr) == (2, True)
    change(database, "UPDATE docs SET price = (rowid - 1) / 3.0 WHERE id = 3")
    assert run(*words, environment=SMALL_PARTS).returncode == 0
    made = embedfarm.open(out)
    assert made.ids == [str(n) for n in range(COUNT)]
    assert (made.matrix == null_vectors(texts_by_id(), DIMENSIONS)).all()
    titles = [text.replace("body", "title") for text in texts_by_id()]
    assert kept(out).column("title").to_pylist() == titles
    assert run("verify", out, "--against", database).returncode == 0
    assert "finished already" in run(*words).stdout


def test_ids_that_a_collation_takes_for_one(tmp_path: Path) -> None:
    """Ids that differ by their case have one order; one that comes twice is found all the same."""
    url = f"sqlite:///{tmp_path}/corpus.db"
    change(url, "CREATE TABLE docs (id TEXT COLLATE NOCASE, body TEXT)")
    change(url, "INSERT INTO docs VALUES ('b', 'b'), ('a', 'a'), ('A', 'A'), ('C', 'C')")
    assert read(url, "SELECT * FROM docs") == ["A", "a", "b", "C"]
    change(url, "INSERT INTO docs VALUES ('a', 'other')")
    with pytest.raises(CorpusError, match="'id' is 'a' in two rows"):
        read(url, "SELECT * FROM docs")


@pytest.mark.parametrize(
    ("query", "options", "problem"),
    [
        (None, {}, r"those of a query \(--query\)"),
        (QUERY, {"id_field": None}, r"in the order of their id \(--id-field\)"),
        (QUERY, {"text_field": "colour"}, "no single column 'colour'; it has id, body"),
        (QUERY, {"id_field": "colour"}, "the query has no column 'colour'; it has id, body"),
        (QUERY, {"id_field": "price"}, "column 'price' is of type double, which holds no text"),
        ("SELECT 1 AS id, body FROM docs", {}, "'id' is 1 in two rows"),
        ("DELETE FROM docs", {}, "syntax error"),
        ("SELECT * FROM nowhere", {}, "no such table: nowhere"),
    ],
)
def test_what_cannot_be_read(
    database: str, query: str | None, options: dict[str, Any], problem: str
) -> None:
    """What is no corpus is refused with a sentence, and nothing is changed by a query."""
    with pytest.raises(CorpusError, match=problem):
        read(database, query, **options)
    assert len(read(database, QUERY)) == COUNT


def test_what_is_no_database(tmp_path: Path) -> None:
    """A database that is not there is not made; a query of a file is refused."""
    with pytest.raises(CorpusError, match="no such file; a path stands behind sqlite:///"):
        read(f"sqlite:///{tmp_path}/none.db", QUERY)
    with pytest.raises(CorpusError, match="a path stands behind sqlite:///"):
        read("sqlite://none.db", QUERY)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "corpus.jsonl").write_text("{}")
    with pytest.raises(CorpusError, match="a query is for a database"):
        read(str(tmp_path / "corpus.jsonl"), QUERY)


TABLE = """
CREATE SEQUENCE numbers;
CREATE TABLE docs (
    id uuid DEFAULT gen_random_uuid(), name text, body text, price numeric, tags text[],
    made timestamptz, facts jsonb, big bigint
);
INSERT INTO docs (name, body, price, tags, made, facts, big)
    SELECT 'n' || i, 'body ' || i, i / 100.0, ARRAY['a', NULL], now(), '{"a": 1}', i
    FROM generate_series(1, 1500) i;
INSERT INTO docs (name) VALUES ('n0');
"""


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a PostgreSQL with a corpus in it, and give its URL."""
    with PostgresServer(tmp_path_factory.mktemp("postgresql")) as server:
        with psycopg.connect(server.url) as connection:
            connection.execute(TABLE)
        yield server.url


def test_postgresql(tmp_path: Path, postgresql: str) -> None:
    """Rows of PostgreSQL are embedded, with columns in the types that its driver gives them."""
    out = tmp_path / "out"
    reading = ("--query", "SELECT * FROM docs", "--text-field", "body", "--id-field", "name")
    refused = run("embed", postgresql, *reading, "--keep", "id", *MODEL, "--out", out)
    assert (refused.returncode, "column 'id' cannot be kept" in refused.stderr) == (2, True)
    words = ("--keep", "price,tags,made,facts,big", "--on-bad-row", "skip", *MODEL)
    done = run("embed", postgresql, *reading, *words, "--out", out, environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    with (
        adbc_driver_postgresql.dbapi.connect(postgresql) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("SELECT * FROM docs WHERE body IS NOT NULL ORDER BY name")
        table = cursor.fetch_arrow_table()
    columns = ["price", "tags", "made", "facts", "big"]
    assert same_rows(kept(out).select(columns), table.select(columns))
    texts = table.column("body").to_pylist()
    assert (embedfarm.open(out).matrix == null_vectors(texts, DIMENSIONS)).all()
    made = embedfarm.open(out).manifest
    assert made.skipped == 1
    assert made.settings["sources"][0].startswith("postgresql://***@127.0.0.1:")
    assert run("verify", out, "--against", postgresql).returncode == 0
    assert "finished already" in run("embed", postgresql, *reading, *words, "--out", out).stdout


def test_postgresql_is_only_read(postgresql: str) -> None:
    """A query that would change something is refused by the server, and a secret is not shown."""
    with pytest.raises(CorpusError, match="read-only transaction"):
        read(postgresql, "SELECT nextval('numbers') AS id, 'a' AS body")
    with pytest.raises(CorpusError, match="no single column 'big' to keep; it has id"):
        find_columns(
            [postgresql], CorpusOptions(query="SELECT 1 AS id", id_field="id", keep=("big",))
        )
    with pytest.raises(CorpusError) as raised:
        read("postgresql://me:secret@127.0.0.1:1/none", QUERY)
    assert "secret" not in str(raised.value)
