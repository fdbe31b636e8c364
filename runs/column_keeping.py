"""Columns of a corpus that stay beside its vectors: whether they can, before anything is sent."""

from pathlib import Path

import pyarrow as pa

from embedfarm.collector.column_spool import ColumnSpool
from embedfarm.collector.manifest import STATE_DIRECTORY
from embedfarm.collector.sinks import keeps_columns, sink_kind, sink_names
from embedfarm.collector.sinks.arrow_columns import own_columns
from embedfarm.collector.sinks.parquet import Parquet, given_back
from embedfarm.readers import CorpusError
from embedfarm.readers.kept_columns import find_columns
from embedfarm.runs.request import Request


def make_spool(request: Request, out: Path) -> ColumnSpool | None:
    """Return what columns are put into between the corpus and the parts; None where none are kept.

    Args:
        request: Says what is read, and which columns are kept.
        out: The output directory.

    Raises:
        CorpusError: The corpus has not these columns, or not the same in all files; or the output's
            format has no place for them, or for the name or type of one.
    """
    options = request.options
    if not options.keep:
        return None
    if not keeps_columns(request.sink):
        able = " or ".join(filter(keeps_columns, sink_names()))
        raise CorpusError(f"columns are kept in {able}, and not in {request.sink}")
    schema = find_columns(request.sources, options)
    if schema is None:
        return None
    for name in own_columns(ids=options.id_field is not None):
        if name in schema.names:
            hint = ", or leave out --id-field, and it stays as it is" if name == "id" else ""
            raise CorpusError(
                f"column {name!r} cannot be kept: the output has one of that name of its own; name "
                f"the others (--keep){hint}"
            )
    if sink_kind(request.sink) is Parquet:
        _check_types(schema)
    return ColumnSpool(out / STATE_DIRECTORY / "columns", schema)


def _check_types(schema: pa.Schema) -> None:
    """Refuse a column that Parquet would give back in another type, or cannot hold."""
    for field in schema:
        back = given_back(field)
        if back is None or not back.equals(field):
            other = "" if back is None else f", and would give back {back.type}"
            raise CorpusError(
                f"column {field.name!r} cannot be kept: Parquet has no {field.type}{other}; "
                "name the others (--keep), or convert it in the corpus"
            )
