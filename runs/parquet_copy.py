"""A Parquet file and its copy: row groups, statistics, compressions and dictionaries stay."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from embedfarm.readers.source import Location, named_errors, open_binary
from embedfarm.runs.originals import Embed

_BATCH_ROWS: Final = 1024
_BUFFER_BYTES: Final = 1 << 20
_DICTIONARIES: Final = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY"})
_CODECS: Final = frozenset({"snappy", "gzip", "brotli", "lz4", "zstd"})


class ParquetOriginal:
    """A Parquet file of a corpus; see `Original`."""

    def __init__(self, location: Location) -> None:
        self.location = location
        with self._opened() as table:
            self.schema: pa.Schema = table.schema_arrow

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows, with these columns."""
        with self._opened() as table:
            yield from self._rows(table, range(table.num_row_groups), columns)

    def write(self, file: BinaryIO, field: pa.Field, embed: Embed, scratch: Path) -> None:
        """Write a copy, a row group at a time, which lies in `scratch` until all of it is there."""
        schema = self.schema.append(field)
        with (
            self._opened() as table,
            pq.ParquetWriter(file, schema, **_encodings(table.metadata)) as writer,
        ):
            for group in range(table.num_row_groups):
                with scratch.open("wb") as rows, pa.ipc.new_stream(rows, schema) as out:
                    for batch in self._rows(table, [group], None):
                        columns = [*batch.columns, embed(batch).column(field.type)]
                        out.write_batch(pa.record_batch(columns, schema=schema))
                with pa.memory_map(str(scratch)) as rows:
                    whole = pa.ipc.open_stream(rows).read_all().unify_dictionaries()
                    writer.write_table(whole, row_group_size=max(1, whole.num_rows))

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        """Open the file; what is wrong with it becomes a `CorpusError`."""
        location = self.location
        with ExitStack() as stack:
            with named_errors(location.name, is_url=location.is_url):
                file = stack.enter_context(open_binary(location.filesystem, location.path))
                table = pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
            yield table

    def _rows(
        self, table: pq.ParquetFile, groups: Sequence[int], columns: list[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of some row groups, with these columns or all."""
        with named_errors(self.location.name, is_url=self.location.is_url):
            yield from table.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=columns)


def _encodings(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Return how the columns of a file are written as they were, and the vectors as they are."""
    if not metadata.num_row_groups:
        return {}
    group = metadata.row_group(0)
    columns = [group.column(place) for place in range(group.num_columns)]
    codecs = {
        each.path_in_schema: each.compression.lower().removesuffix("_raw") for each in columns
    }
    return {
        "compression": {path: codec for path, codec in codecs.items() if codec in _CODECS},
        "use_dictionary": [
            each.path_in_schema for each in columns if _DICTIONARIES & set(each.encodings)
        ],
        "write_statistics": [each.path_in_schema for each in columns if each.is_stats_set],
        "sorting_columns": group.sorting_columns or None,
    }
