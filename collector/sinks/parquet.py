"""Parquet: one file a part, columns index, id (if given) and embedding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.parquet as pq

from embedfarm.collector.manifest import Failure, Layout, Part, Written
from embedfarm.collector.sinks.arrow_columns import numbers, strings
from embedfarm.collector.sinks.part_files import keep_parts, write_part
from embedfarm.collector.sinks.part_rows import (
    Matrix,
    PartError,
    PartRows,
    Vectors,
    check_layout,
    spread,
)

# Encoding vectors as they are is what keeps up with a farm: components hardly ever repeat, so
# dictionaries, compression and statistics cost time and save nothing. Few large batches of
# levels: 340 instead of 210 MB/s on one core with 384 dimensions.
_AS_THEY_ARE: Final[dict[str, Any]] = {
    "compression": "none",
    "use_dictionary": False,
    "write_statistics": ["index"],
    "write_batch_size": 1 << 16,
    "data_page_size": 1 << 18,
}


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
        table = _table(batch.vectors())
        return write_part(path, lambda file: pq.write_table(table, file, **_AS_THEY_ARE))

    def replace(self, part: Part, batch: PartRows, original: Path) -> Written:
        """Write the file of a part anew."""
        del part, original
        return self.write(batch)

    def finish(self, count: int, layout: Layout) -> None:
        """Do nothing: every part is final already."""

    def read(self, part: Part, layout: Layout) -> Vectors:
        """Read the rows of a part from its file."""
        try:
            with pq.ParquetFile(self._directory / part.file) as file:
                vectors = _vectors(file.read())
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise PartError(f"is not Parquet as it was written: {error}") from error
        return check_layout(vectors, part, layout)

    def read_all(self, part: Part, layout: Layout, failures: Sequence[Failure]) -> PartRows:
        """Read all chunks of a part from its file, the failed ones as zeros."""
        return spread(self.read(part, layout), part, failures)


def _table(vectors: Vectors) -> pa.Table:
    """Return the rows as columns over the same memory."""
    embedding = _embedding(vectors.matrix)
    columns = {"index": numbers(vectors.indices), "embedding": embedding}
    if vectors.ids is not None:
        columns["id"] = strings(vectors.ids)
    names = [name for name in ("index", "id", "embedding") if name in columns]
    schema = pa.schema([pa.field(name, columns[name].type, nullable=False) for name in names])
    return pa.table([columns[name] for name in names], schema=schema)


def _embedding(matrix: Matrix) -> pa.FixedSizeListArray:
    """Return a matrix as a column without nulls, which spares the levels that mark them."""
    values = numbers(matrix.reshape(-1))
    item = pa.field("item", values.type, nullable=False)
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(item, matrix.shape[1]))


def _vectors(table: pa.Table) -> Vectors:
    """Return the columns as rows over the same memory."""
    embedding = table.column("embedding").combine_chunks()
    values = embedding.flatten().to_numpy(zero_copy_only=True)
    return Vectors(
        indices=table.column("index").to_numpy(),
        ids=table.column("id").to_pylist() if "id" in table.column_names else None,
        matrix=values.reshape(-1, embedding.type.list_size),
    )
