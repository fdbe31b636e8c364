"""Rows of a database, PostgreSQL or SQLite, by a query: in batches of Arrow's, through ADBC.

They come in the order of their ids, each of which is there once, so that they come in the same
order the next time. Ids that a collation of SQLite takes for equal come in that of their bytes.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa

from embedfarm.readers.fields import Fields
from embedfarm.readers.items import CorpusError, Item
from embedfarm.readers.record_batches import RowReader
from embedfarm.readers.source import Cursor

SQLITE: Final = "sqlite:///"
_BATCH_ROWS: Final = 512
_BATCH_BYTES: Final = 1 << 20


def read(url: str, name: str, fields: Fields, query: str | None, cursor: Cursor) -> Iterator[Item]:
    """Yield an item per row of the query, in the order of the id.

    Raises:
        CorpusError: There is no query or id, the drivers are not installed, the database or a
            column is not there, a column holds no text, or two rows have one id.
    """
    with _reading(url, name, query, fields.id) as batches:
        rows = RowReader(batches.schema, name, fields)
        yield from rows.items(_once(batches, name, fields.id or ""), cursor.offset, cursor)


def schema(url: str, name: str, query: str | None, id_field: str | None) -> pa.Schema:
    """Return the schema of the rows of a query.

    Raises:
        CorpusError: What `read` says of a query that cannot be read.
    """
    with _reading(url, name, query, id_field) as batches:
        return batches.schema


@contextmanager
def _reading(
    url: str, name: str, query: str | None, id_field: str | None
) -> Iterator[pa.RecordBatchReader]:
    """Give the rows of a query, and end the connection behind it."""
    if query is None or id_field is None:
        raise CorpusError(
            f"{name}: the rows of a database are those of a query (--query), in the order of their "
            "id (--id-field)"
        )
    column = '"' + id_field.replace('"', '""') + '"'
    order = f"{column}, {column} COLLATE BINARY" if url.startswith(SQLITE) else column
    statement = f"SELECT * FROM ({query.rstrip().rstrip(';')}\n) AS corpus ORDER BY {order}"  # noqa: S608 -- the query is the user's own
    try:
        connection, options = _connect(url, name)
    except ImportError as error:
        raise CorpusError(f"{name}: databases need embedfarm[sql]: {error}") from error
    with closing(connection), closing(connection.cursor(adbc_stmt_kwargs=options)) as cursor:
        if not url.startswith(SQLITE):
            cursor.execute("SET TRANSACTION READ ONLY")
        cursor.execute(statement)
        batches = cursor.fetch_record_batch()
        if id_field not in batches.schema.names:  # which SQLite takes for a text
            there = ", ".join(batches.schema.names)
            raise CorpusError(f"{name}: the query has no column {id_field!r}; it has {there}")
        yield batches


def _connect(url: str, name: str) -> tuple[Any, dict[str, Any]]:
    """Return a connection that can only read, and options for statements with small batches."""
    if not url.startswith("sqlite:"):
        from adbc_driver_postgresql import dbapi as postgresql  # noqa: PLC0415 -- an extra

        return postgresql.connect(url), {"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)}
    from adbc_driver_sqlite import dbapi as sqlite  # noqa: PLC0415 -- an extra

    path = Path(url.removeprefix(SQLITE))
    if not url.startswith(SQLITE) or not path.is_file():
        raise CorpusError(f"{name}: no such file; a path stands behind {SQLITE}")
    return sqlite.connect(f"file:{quote(str(path))}?mode=ro"), {
        "adbc.sqlite.query.batch_rows": _BATCH_ROWS
    }


def _once(batches: Iterable[pa.RecordBatch], name: str, id_field: str) -> Iterator[pa.RecordBatch]:
    """Yield batches, in none of which an id comes a second time.

    Raises:
        CorpusError: Two rows have one id, so that nobody knows their order.
    """
    before: list[Any] = []
    for batch in batches:
        ids = batch.column(batch.schema.get_field_index(id_field)).to_pylist()
        for last, each in zip([*before, *ids], [*before, *ids][1:], strict=False):
            if last == each:
                raise CorpusError(
                    f"{name}: {id_field!r} is {each!r} in two rows, whose order may be another one "
                    "the next time: the id has to be another one in each row"
                )
        before = ids[-1:]
        yield batch
