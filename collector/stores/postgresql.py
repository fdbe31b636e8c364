"""PostgreSQL with pgvector: a table of ids and vectors, whose comment is its mark."""

import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlencode, urlsplit, urlunsplit

import numpy as np
import psycopg
from psycopg import errors, sql

from embedfarm.collector.sinks.part_rows import Matrix
from embedfarm.collector.stores.address import StoreAddress
from embedfarm.collector.stores.store import Element, Found, RowShape, StoreError, StoreRows

TYPES: Final[dict[Element, str]] = {"float32": "vector", "float16": "halfvec", "bit": "bit"}
ELEMENTS: Final = {name: element for element, name in TYPES.items()}
CONNECT_SECONDS: Final = 10
# What a server says to a connection that it will refuse again.
REFUSED: Final = re.compile(r"authentication failed|does not exist|no pg_hba|not permitted")


class PostgreSql:
    """A table of a database; each call is a transaction."""

    elements: Sequence[Element] = tuple(TYPES)
    rows_max = 4096
    bytes_max = 4 << 20

    def __init__(self, address: StoreAddress) -> None:
        self._url = _connection_url(address)
        self._name = address.collection
        self._table = sql.Identifier(*address.collection.split("."))
        self._open: psycopg.Connection[Any] | None = None

    @property
    def _connection(self) -> psycopg.Connection[Any]:
        """The connection, made anew where the last one broke."""
        if self._open is None or self._open.closed:
            self._open = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_SECONDS,
                prepare_threshold=None,  # poolers may give each transaction another server process
            )
        return self._open

    def find(self) -> Found | None:
        """Return the table's vectors and comment."""
        name = self._table.as_string()
        rows = self._connection.execute(
            "SELECT attname, format_type(atttypid, atttypmod),"
            " obj_description(attrelid, 'pg_class') FROM pg_attribute"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
            (name,),
        ).fetchall()
        if not rows:
            return None
        types, mark = {column: kind for column, kind, _ in rows}, rows[0][2] or ""
        if types.get("id") != "text" or "embedding" not in types:
            raise StoreError(f"table {self._name} has no columns id (text) and embedding")
        kind = re.fullmatch(r"(.+?)(?:\((\d+)\))?", types["embedding"])
        kind_name, size = kind.groups() if kind else ("", None)
        return Found(int(size or 0), ELEMENTS.get(kind_name, kind_name), mark, "index" not in types)

    def create(self, shape: RowShape, mark: str) -> None:
        """Make the table, and the extension where the user may do so."""
        kind = sql.SQL(f"{TYPES[shape.element]}({shape.dimensions})")
        index = sql.SQL("" if shape.ids else '"index" bigint NOT NULL,')
        with self._connection.transaction():
            with suppress(errors.InsufficientPrivilege), self._connection.transaction():
                self._connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            self._connection.execute(
                sql.SQL(
                    "CREATE TABLE IF NOT EXISTS {} (id text PRIMARY KEY, {} embedding {} NOT NULL)"
                ).format(self._table, index, kind)
            )
            self.write_mark(mark)

    def write_mark(self, mark: str) -> None:
        """Comment on the table."""
        self._connection.execute(
            sql.SQL("COMMENT ON TABLE {} IS {}").format(self._table, sql.Literal(mark))
        )

    def upsert(self, rows: StoreRows, shape: RowShape) -> None:
        """Copy rows into a temporary table, and from there into the table."""
        names = ["id", "embedding"] if shape.ids else ["id", "index", "embedding"]
        columns = sql.SQL(", ").join(map(sql.Identifier, names))
        changed = sql.SQL(", ").join(
            sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in names[1:]
        )
        vectors = _binary(rows.matrix, shape)
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.execute(
                sql.SQL(
                    "CREATE TEMPORARY TABLE embedfarm_incoming ON COMMIT DROP"
                    " AS SELECT {} FROM {} WITH NO DATA"
                ).format(columns, self._table)
            )
            with cursor.copy(
                sql.SQL("COPY embedfarm_incoming ({}) FROM STDIN (FORMAT BINARY)").format(columns)
            ) as copy:
                copy.set_types([*(["text"] if shape.ids else ["text", "int8"]), "bytea"])
                places = [()] * len(rows.names) if shape.ids else zip(rows.indices.tolist())
                for name, place, vector in zip(rows.names, places, vectors, strict=True):
                    copy.write_row((name, *place, vector))
            cursor.execute(
                sql.SQL(
                    "INSERT INTO {0} ({1}) SELECT {1} FROM embedfarm_incoming"
                    " ON CONFLICT (id) DO UPDATE SET {2}"
                ).format(self._table, columns, changed)
            )

    def delete(self, names: Sequence[str]) -> None:
        """Delete rows by their ids."""
        self._connection.execute(
            sql.SQL("DELETE FROM {} WHERE id = ANY(%s)").format(self._table), (list(names),)
        )

    def count(self) -> int:
        """Count the rows."""
        query = sql.SQL("SELECT count(*) FROM {}").format(self._table)
        row = self._connection.execute(query).fetchone()
        return int(row[0]) if row else 0

    def pages(self) -> Iterator[Sequence[str]]:
        """Yield all ids, a batch at a time, from a connection of its own."""
        with psycopg.connect(self._url) as connection, connection.cursor("embedfarm") as cursor:
            cursor.execute(sql.SQL("SELECT id FROM {}").format(self._table))
            while rows := cursor.fetchmany(self.rows_max):
                yield [row[0] for row in rows]

    def key(self, name: str) -> str:
        """Return the name itself."""
        return name

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete rows by their ids."""
        self.delete(keys)

    def finish(self) -> None:
        """Let the planner know how many rows there are."""
        self._connection.execute(sql.SQL("ANALYZE {}").format(self._table))

    def may_pass(self, error: Exception) -> bool:
        """Tell whether an error is of the connection, of resources, or of a conflict."""
        return isinstance(error, psycopg.OperationalError) and not REFUSED.search(str(error))

    def close(self) -> None:
        """Close the connection."""
        if self._open is not None:
            self._open.close()


def _connection_url(address: StoreAddress) -> str:
    """Return the URL for the server, which knows nothing of collections."""
    parts = urlsplit(address.url)
    return urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(address.options), ""))


def _binary(matrix: Matrix, shape: RowShape) -> Iterator[bytes]:
    """Return an iterator over rows as PostgreSQL receives vectors, half vectors, and bits."""
    if shape.element == "bit":
        head, rows = struct.pack(">i", shape.dimensions), matrix
    else:
        head = struct.pack(">HH", shape.dimensions, 0)
        rows = matrix.astype(np.dtype(shape.element).newbyteorder(">"))
    return (head + row.tobytes() for row in rows)
