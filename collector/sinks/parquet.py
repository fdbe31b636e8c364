"""Parquet: one file a part, columns index, id (if given), those that are kept, and embedding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.parquet as pq

from embedfarm.collector.column_rows import unify_dictionaries
from embedfarm.collector.manifest import Failure, Layout, Part, Written
from embedfarm.collector.sinks.arrow_columns import numbers, own_columns, strings
from embedfarm.collector.sinks.part_files import keep_parts, write_part
from embedfarm.collector.sinks.part_rows import (
    KeptColumns,
    Matrix,
    PartError,
    PartRows,
    Vectors,
    check_layout,
    spread,
)
from embedfarm.contract.durable_files import HashingFile

# Encoding vectors as they are is what keeps up with a farm: components hardly ever repeat, so
# dictionaries, compression and statistics cost time and save nothing. Few large batches of
# levels: 340 instead of 210 MB/s on one core with 384 dimensions.
_AS_THEY_ARE: Final[dict[str, Any]] = {
    "write_batch_size": 1 << 16,
    "data_page_size": 1 << 18,
}
_KEPT_COMPRESSION: Final = "snappy"
# A column of texts that never repeat gives its dictionary up sooner than at a MiB.
_DICTIONARY_BYTES_MAX: Final = 1 << 18


class Parquet:
    """Writes and reads `part-<start>.parquet`; failed chunks have no row."""

    about: ClassVar[str] = "Parquet: for most programs"
    files: ClassVar[str] = r"part-\d{12}\.parquet"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def resume(self, parts: Sequence[Part]) -> None:
        """Check the files of the parts, and remove those of other parts."""
        keep_parts(self._directory, parts, "parquet")

    def write(self, batch: PartRows) -> Written:
        """Write a part into a file of its own; the rows are encoded from where they are."""
        path = self._directory / f"part-{batch.start:012d}.parquet"
        table = _table(batch.vectors(), batch.columns)
        options = _AS_THEY_ARE | _encodings(batch.columns)
        return write_part(path, lambda file: _write(table, file, options))

    def replace(self, part: Part, batch: PartRows, original: Path) -> Written:
        """Write the file of a part anew."""
        del part, original
        return self.write(batch)

    def finish(self, count: int, layout: Layout) -> None:
        """Do nothing: every part is final already."""

    def read(self, part: Part, layout: Layout) -> Vectors:
        """Read the rows of a part from its file."""
        with self._open(part) as file:
            vectors = _vectors(file.read(own_columns(ids=layout.ids)), layout)
        return check_layout(vectors, part, layout)

    def read_columns(self, part: Part, layout: Layout) -> KeptColumns | None:
        """Read the columns of the corpus that a part has beside its vectors; None for none."""
        with self._open(part) as file:
            own = own_columns(ids=layout.ids)
            names = [name for name in file.schema_arrow.names if name not in own]
            if not names:
                return None
            table = file.read(["index", *names]).replace_schema_metadata()
            return KeptColumns(table.column("index").to_numpy(), table.select(names))

    @contextmanager
    def _open(self, part: Part) -> Iterator[pq.ParquetFile]:
        """Open the file of a part; what is wrong with it becomes a `PartError`."""
        try:
            with pq.ParquetFile(self._directory / part.file) as file:
                yield file
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise PartError(f"is not Parquet as it was written: {error}") from error

    def read_all(self, part: Part, layout: Layout, failures: Sequence[Failure]) -> PartRows:
        """Read all chunks of a part from its file, the failed ones as zeros."""
        return spread(self.read(part, layout), part, failures)


def _table(vectors: Vectors, kept: pa.Table | None) -> pa.Table:
    """Return the rows as columns over the same memory."""
    columns = {"index": numbers(vectors.indices)}
    if vectors.ids is not None:
        columns["id"] = strings(vectors.ids)
    fields = [pa.field(name, column.type, nullable=False) for name, column in columns.items()]
    if kept is not None:
        fields += kept.schema
        columns |= dict(zip(kept.column_names, kept.columns, strict=True))
    columns["embedding"] = embedding = _embedding(vectors.matrix)
    fields.append(pa.field("embedding", embedding.type, nullable=False))
    return pa.table(list(columns.values()), schema=pa.schema(fields))


def _write(table: pa.Table, file: HashingFile, options: dict[str, Any]) -> None:
    """Write a file of one row group, or of several where one dictionary has no room for all."""
    with pq.ParquetWriter(file, table.schema, **options) as writer:
        for group in unify_dictionaries(table):
            writer.write_table(group)


def _encodings(kept: pa.Table | None) -> dict[str, Any]:
    """Return how columns are encoded: those of a corpus as usual, and ours as they are."""
    if kept is None:
        return {"compression": "none", "use_dictionary": False, "write_statistics": ["index"]}
    schema = _empty_file(kept.schema).schema
    leaves = [schema.column(place).path for place in range(len(schema.names))]
    return {
        "compression": dict.fromkeys(leaves, _KEPT_COMPRESSION),
        "use_dictionary": leaves,
        "dictionary_pagesize_limit": _DICTIONARY_BYTES_MAX,
        "write_statistics": ["index", *leaves],
    }


def given_back(field: pa.Field) -> pa.Field | None:
    """Return a column as it is read again once it was written; None if there is no writing it."""
    try:
        return _empty_file(pa.schema([field])).schema_arrow.field(0)
    except (pa.ArrowException, OSError):  # the latter for strings of no bytes; no disk is asked
        return None


def _empty_file(schema: pa.Schema) -> pq.ParquetFile:
    """Return a file in memory that has columns and no row."""
    pq.write_table(schema.empty_table(), file := pa.BufferOutputStream())
    return pq.ParquetFile(file.getvalue())


def _embedding(matrix: Matrix) -> pa.FixedSizeListArray:
    """Return a matrix as a column without nulls, which spares the levels that mark them."""
    values = numbers(matrix.reshape(-1))
    item = pa.field("item", values.type, nullable=False)
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(item, matrix.shape[1]))


def _vectors(table: pa.Table, layout: Layout) -> Vectors:
    """Return the columns as rows over the same memory."""
    embedding = table.column("embedding").combine_chunks()
    values = embedding.flatten().to_numpy(zero_copy_only=True)
    return Vectors(
        indices=table.column("index").to_numpy(),
        ids=table.column("id").to_pylist() if layout.ids else None,
        matrix=values.reshape(-1, embedding.type.list_size),
    )
