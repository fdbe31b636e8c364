"""Corpora as Python has them, texts, rows and tables, written where a run can read them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from embedfarm.collector.durable_files import replacing
from embedfarm.collector.manifest import STATE_DIRECTORY
from embedfarm.contract.private_directories import make_private
from embedfarm.producer.readers import CorpusError, CorpusOptions

CORPUS_FILE: Final = f"{STATE_DIRECTORY}/corpus.parquet"
ROWS_AT_A_TIME: Final = 8192


@runtime_checkable
class ArrowStream(Protocol):
    """A table of any library that speaks Arrow: pyarrow, pandas, polars, DuckDB and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return the table as a stream of Arrow's C interface."""


@runtime_checkable
class Dataset(Protocol):
    """A data set of Hugging Face's `datasets`, in memory or streamed."""

    column_names: Sequence[str] | None

    def iter(self, batch_size: int) -> Iterator[Mapping[str, Sequence[Any]]]:
        """Yield the rows as columns, `batch_size` of them at a time."""


Row: TypeAlias = str | Mapping[str, Any]
Corpus: TypeAlias = str | Path | Sequence[Path] | ArrowStream | Dataset | Iterable[Row]
"""A path, URL or glob; paths; a table or data set with a column of texts; texts, or rows."""


def as_sources(
    corpus: Corpus, out: Path, options: CorpusOptions
) -> tuple[tuple[str, ...], CorpusOptions]:
    """Return sources that hold the corpus, and how they are read.

    What is no file already is written into the state directory of the output, where it stays until
    the output is finished: a run reads its corpus again when a server has lost a part of it.

    Raises:
        CorpusError: The corpus has no such column, or something in it is no text.
    """
    if isinstance(corpus, str | Path):
        return (str(corpus),), options
    if isinstance(corpus, Sequence) and corpus and all(isinstance(each, Path) for each in corpus):
        return tuple(map(str, corpus)), options
    make_private(out / STATE_DIRECTORY)
    path = out / CORPUS_FILE
    columns = [options.text_field, *([options.id_field] if options.id_field else [])]
    with replacing(path) as file:
        writer: pq.ParquetWriter | None = None
        for table in _tables(corpus, columns):
            writer = writer or pq.ParquetWriter(file, table.schema)
            writer.write_table(table)
        if writer is None:
            writer = pq.ParquetWriter(file, pa.schema([(name, pa.string()) for name in columns]))
        writer.close()
    return (str(path),), replace(options, format="parquet")


def _tables(corpus: object, columns: list[str]) -> Iterator[pa.Table]:
    """Yield the columns of a corpus, some rows at a time."""
    if isinstance(corpus, ArrowStream):
        reader = pa.RecordBatchReader.from_stream(corpus)
        _check_columns(reader.schema.names, columns)
        for part in reader:
            yield pa.Table.from_batches([part]).select(columns)
    elif isinstance(corpus, Dataset):
        _check_columns(corpus.column_names or columns, columns)
        for batch in corpus.iter(ROWS_AT_A_TIME):
            yield _table({name: batch[name] for name in columns})
    elif isinstance(corpus, Iterable):
        rows = iter(corpus)
        while some := list(islice(rows, ROWS_AT_A_TIME)):
            yield _table({name: [_cell(row, name, columns) for row in some] for name in columns})
    else:
        raise CorpusError(f"{type(corpus).__name__} is no corpus: no path, texts, rows or table")


def _table(columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    try:
        return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise CorpusError(f"a text or id that is no string: {error}") from error


def _check_columns(there: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in there:
            raise CorpusError(f"the table has no column {name!r}: it has {', '.join(there)}")


def _cell(row: object, name: str, columns: Sequence[str]) -> object:
    """Return a field of a row; a row that is a text has no other field."""
    if isinstance(row, Mapping):
        if name not in row:
            raise CorpusError(f"a row has no field {name!r}: it has {', '.join(map(str, row))}")
        return row[name]
    if name != columns[0]:
        raise CorpusError(f"texts without fields have no id {name!r}: give rows, or no id_field")
    return row
