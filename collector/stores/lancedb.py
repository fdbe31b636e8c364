"""LanceDB: a table in a directory or in object storage, whose vector column has the mark."""

import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import lancedb as client
import numpy as np
import pyarrow as pa

from embedfarm.collector.stores.address import StoreAddress
from embedfarm.collector.stores.store import (
    BYTE_BITS,
    Element,
    Found,
    RowShape,
    StoreError,
    StoreRows,
)

MARK: Final = "embedfarm"
TYPES: Final = {"float32": pa.float32(), "float16": pa.float16(), "bit": pa.uint8()}
ELEMENTS: Final[dict[pa.DataType, Element]] = {
    pa.float32(): "float32",
    pa.float16(): "float16",
    pa.uint8(): "bit",
}
KEPT: Final = timedelta(hours=1)  # versions that somebody may still read
ABSENT: Final = re.compile(r"not found|does not exist", re.IGNORECASE)
PASSING: Final = re.compile(
    r"conflict|concurrent|timed? ?out|no space left|connection (refused|reset|closed|aborted)"
    r"|error sending request|slow ?down|service unavailable",
    re.IGNORECASE,
)


class LanceDb:
    """A table; each call is a version of it. Bits are eight in a uint8."""

    elements: Sequence[Element] = tuple(ELEMENTS.values())
    rows_max = 10_000  # each batch is a version, and a file
    bytes_max = 64 << 20

    def __init__(self, address: StoreAddress) -> None:
        self._place = _place(address)
        self._name = address.collection
        self._open: Any = None

    @property
    def _table(self) -> Any:  # noqa: ANN401 # remote or local, which share no class of use here
        """The table, which is opened when it is first asked."""
        if self._open is None:
            self._open = client.connect(self._place).open_table(self._name)
        return self._open

    def find(self) -> Found | None:
        """Return the table's column of vectors."""
        self._open = None  # or it would not see what others have written since
        try:
            schema: pa.Schema = self._table.schema
        except ValueError as error:
            if ABSENT.search(str(error)):
                return None
            raise
        names = set(schema.names)
        if not {"id", "embedding"} <= names:
            raise StoreError(f"table {self._name} has no columns id and embedding")
        field = schema.field("embedding")
        if not pa.types.is_fixed_size_list(field.type):
            raise StoreError(f"column embedding of table {self._name} is {field.type}")
        element = ELEMENTS.get(field.type.value_type, str(field.type.value_type))
        packed = element == "bit"
        size = field.type.list_size * (BYTE_BITS if packed else 1)
        mark = (field.metadata or {}).get(MARK.encode(), b"").decode()
        return Found(size, element, mark, "index" not in names, packed)

    def create(self, shape: RowShape, mark: str) -> None:
        """Make an empty table."""
        self._open = client.connect(self._place).create_table(
            self._name, schema=_schema(shape, mark), exist_ok=True
        )

    def write_mark(self, mark: str) -> None:
        """Put the mark among the metadata of the column of vectors."""
        self._table.update_field_metadata({"path": "embedding", "metadata": {MARK: mark}})

    def upsert(self, rows: StoreRows, shape: RowShape) -> None:
        """Merge rows into the table by their ids."""
        schema = _schema(shape, "")
        values = pa.array(np.ascontiguousarray(rows.matrix).reshape(-1))
        columns = [
            pa.array(rows.names, pa.string()),
            *([] if shape.ids else [pa.array(rows.indices)]),
            pa.FixedSizeListArray.from_arrays(values, rows.matrix.shape[1]),
        ]
        merge = self._table.merge_insert("id")
        merge.when_matched_update_all().when_not_matched_insert_all().execute(
            pa.table(columns, names=schema.names)
        )

    def delete(self, names: Sequence[str]) -> None:
        """Delete rows by their ids."""
        listed = ", ".join("'{}'".format(name.replace("'", "''")) for name in names)
        self._table.delete(f"id IN ({listed})")

    def count(self) -> int:
        """Count the rows."""
        return int(self._table.count_rows())

    def pages(self) -> Iterator[Sequence[str]]:
        """Yield all ids, batch by batch."""
        for batch in self._table.search().select(["id"]).to_batches(self.rows_max):
            yield batch.column("id").to_pylist()

    def key(self, name: str) -> str:
        """Return the name itself."""
        return name

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete rows by their ids."""
        self.delete(keys)

    def finish(self) -> None:
        """Put the files of many batches together."""
        self._table.optimize(cleanup_older_than=KEPT)

    def may_pass(self, error: Exception) -> bool:
        """Tell whether an error is of another writer, of a full disk, or of a connection."""
        self._open = None  # after a conflict the newest version is wanted
        return isinstance(error, (OSError, RuntimeError)) and bool(PASSING.search(str(error)))

    def close(self) -> None:
        """Let go of the table."""
        self._open = None


def _place(address: StoreAddress) -> str:
    """Return the directory, or the URL in object storage, that has the tables.

    Raises:
        StoreError: The address has a host, and does not say of which object storage.
    """
    if not address.host:
        return address.path
    if scheme := address.options.get("scheme"):
        return f"{scheme}://{address.host}{address.path}"
    raise StoreError(
        f"{address.shown}: a directory has three slashes, as in lancedb:///data/db#documents, and "
        "object storage a scheme, as in lancedb://bucket/db?scheme=s3#documents"
    )


def _schema(shape: RowShape, mark: str) -> pa.Schema:
    """Return the columns of a table."""
    size = shape.bit_bytes if shape.element == "bit" else shape.dimensions
    index = [] if shape.ids else [pa.field("index", pa.int64())]
    vectors = pa.list_(TYPES[shape.element], size)
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            *index,
            pa.field("embedding", vectors, metadata={MARK: mark}),
        ]
    )
