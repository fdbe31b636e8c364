"""Corpora as Python has them, texts, rows and tables, written where a run can read them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from embedfarm.collector.manifest import STATE_DIRECTORY
from embedfarm.contract.durable_files import replacing
from embedfarm.contract.private_directories import make_private
from embedfarm.readers import CorpusError, CorpusOptions
from embedfarm.readers.fields import ALL

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

    def with_format(self, kind: str) -> Any:  # noqa: ANN401 # another data set
        """Return the data set so that it yields tables, with "arrow"."""

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
    columns = list(dict.fromkeys(options.fields().names))
    tables = _tables(corpus, columns, options.keep)
    none = pa.schema([(name, pa.string()) for name in columns]).empty_table()
    first = next(tables, none)
    with replacing(path) as file, pq.ParquetWriter(file, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(_as_before(table, writer.schema))
    return (str(path),), replace(options, format="parquet")


def _tables(corpus: object, columns: list[str], keep: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the columns of a corpus that are read and kept, some rows at a time."""
    if isinstance(corpus, ArrowStream):
        reader = pa.RecordBatchReader.from_stream(corpus)
        names = _check(_names(reader.schema.names, columns, keep), reader.schema.names)
        for part in reader:
            yield pa.Table.from_batches([part]).select(names)
    elif isinstance(corpus, Dataset):
        there = corpus.column_names or columns
        names = _check(_names(there, columns, keep), there)
        if keep:  # so the types of all columns are those of the data set
            for table in corpus.with_format("arrow").iter(ROWS_AT_A_TIME):
                yield table.select(names)
        else:
            for batch in corpus.iter(ROWS_AT_A_TIME):
                yield _table({name: batch[name] for name in names}, columns)
    elif isinstance(corpus, Iterable):
        rows, names = iter(corpus), []
        while some := list(islice(rows, ROWS_AT_A_TIME)):
            there = list(some[0]) if isinstance(some[0], Mapping) else columns
            names = names or _names(there, columns, keep)
            cells = {name: [_cell(row, name, columns) for row in some] for name in names}
            yield _table(cells, columns)
    else:
        raise CorpusError(f"{type(corpus).__name__} is no corpus: no path, texts, rows or table")


def _table(cells: Mapping[str, Sequence[Any]], texts: Sequence[str]) -> pa.Table:
    """Return columns as a table; those that are texts or ids are strings, others what they are."""
    table = {}
    for name, values in cells.items():
        try:
            table[name] = pa.array(values, pa.string() if name in texts else None)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            what = "a text or id that is no string" if name in texts else f"column {name!r}"
            raise CorpusError(f"{what}: {error}") from error
    return pa.table(table)


def _as_before(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows in the types of those before them, from which types were taken.

    Raises:
        CorpusError: The rows hold something else.
    """
    try:
        return table if table.schema.equals(schema) else table.cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise CorpusError(
            f"a column is of another type than in the rows before: {error}; a table says its types"
        ) from error


def _names(there: Sequence[str], wanted: Sequence[str], keep: Sequence[str]) -> list[str]:
    """Return the columns that are read, and those that are kept, each once."""
    return list(dict.fromkeys([*wanted, *(there if list(keep) == [ALL] else keep)]))


def _check(names: list[str], there: Sequence[str]) -> list[str]:
    """Return names of columns that are all there."""
    for name in names:
        if name not in there:
            raise CorpusError(f"the table has no column {name!r}: it has {', '.join(there)}")
    return names


def _cell(row: object, name: str, columns: Sequence[str]) -> object:
    """Return a field of a row; a row that is a text has no other field."""
    if isinstance(row, Mapping):
        if name not in row:
            raise CorpusError(f"a row has no field {name!r}: it has {', '.join(map(str, row))}")
        return row[name]
    if name != columns[0]:
        raise CorpusError(f"texts without fields have no id {name!r}: give rows, or no id_field")
    return row
