"""Columns of a corpus that stay beside its vectors: which there are, and of which types."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import BinaryIO, Final

import pyarrow as pa

from embedfarm.readers import arrow, database, lance, parquet
from embedfarm.readers.corpus import (
    LOOKS,
    CorpusOptions,
    format_of,
    kept_fields,
    names_in,
)
from embedfarm.readers.delimited import column_of
from embedfarm.readers.directory import locate
from embedfarm.readers.fields import KeptField
from embedfarm.readers.items import CorpusError
from embedfarm.readers.json_rows import FIELDS_SHOWN
from embedfarm.readers.record_batches import kept_names
from embedfarm.readers.source import Location, named_errors, open_binary
from embedfarm.readers.text_columns import schema_of

SCHEMAS: Final[Mapping[str, Callable[[BinaryIO, str], pa.Schema]]] = {
    "parquet": parquet.schema,
    "arrow": arrow.schema,
}
"""Formats whose columns have types, and what reads these from a file."""

JSON: Final = ("jsonl", "json")


def find_columns(sources: Sequence[str], options: CorpusOptions) -> pa.Schema | None:
    """Return the schema of the columns to keep, the same in all files; None where none are kept.

    Raises:
        CorpusError: A source is missing, has no columns or not these, or those of another file are
            of other types.
    """
    if not options.keep:
        return None
    locations = [each for source in sources for each in locate(source, options.glob)]
    kept = kept_fields(locations, options)
    _check_json(locations, options, kept)
    found = [(each.name, _columns_of(each, options, kept)) for each in locations]
    first, schema = found[0]
    for name, other in found[1:]:
        if problem := describe_other(schema, other):
            raise CorpusError(f"{name}: {problem} in {first}; their columns cannot be kept as one")
    return schema


def describe_other(schema: pa.Schema, other: pa.Schema) -> str:
    """Describe the first thing in which the columns of `other` differ, in any order; "" if none."""
    for field in other:
        if field.name not in schema.names:
            return f"has a column {field.name!r}, which is not"
        before = schema.field(field.name)
        if (field.type, field.nullable) != (before.type, before.nullable):
            return f"has a column {field.name!r} of type {_say(field)}, which is {_say(before)}"
    missing = [name for name in schema.names if name not in other.names]
    return f"has no column {missing[0]!r}, which is" if missing else ""


def _check_json(
    locations: Sequence[Location], options: CorpusOptions, kept: Sequence[KeptField]
) -> None:
    """Refuse to keep a field that no file of JSON has in its first rows, and nobody declared."""
    files = [each for each in locations if not each.is_directory]
    files = [each for each in files if format_of(each, options) in JSON]
    missing = {each.name for each in kept if not each.declared}
    there: dict[str, None] = {}
    for each in files:
        if not missing:
            return
        there |= dict.fromkeys(names_in(each, options))
        missing -= there.keys()
    if files and missing:
        name, shown = min(missing), [*islice(there, FIELDS_SHOWN)]
        raise CorpusError(
            f"{files[0].name}: none of the first rows has a field {name!r} to keep; they have "
            f"{', '.join(shown)}{', …' if len(there) > len(shown) else ''}; one that comes later "
            f"is kept with its type, as in --keep {name}:string"
        )


def _columns_of(location: Location, options: CorpusOptions, kept: Sequence[KeptField]) -> pa.Schema:
    """Return the columns to keep of one file."""
    kind = "a directory of documents" if location.is_directory else format_of(location, options)
    if location.is_database:
        with named_errors(location.name, is_url=True):
            return _kept(
                database.schema(location.path, location.name, options.query, options.id_field),
                location,
                options,
            )
    if location.is_lance:
        with named_errors(location.name, is_url=True):
            return _kept(lance.schema(location.path, location.name), location, options)
    if kind in LOOKS:
        _check_header(location, options, kept, kind)
        return schema_of(kept)
    read = SCHEMAS.get(kind)
    if read is None:
        able = ", ".join([*LOOKS, *SCHEMAS, "lance"])
        raise CorpusError(f"{location.name}: columns are kept of {able} and a database, not {kind}")
    if location.is_stdin:
        raise CorpusError(
            f"{location.name}: its columns are not known before it is read, so they cannot be "
            f"kept; a file of {kind} can be read twice"
        )
    is_url = location.is_url
    with (
        named_errors(location.name, is_url=is_url),
        open_binary(location.filesystem, location.path) as file,
    ):
        schema = read(file, location.name)
    return _kept(schema, location, options)


def _check_header(
    location: Location, options: CorpusOptions, kept: Sequence[KeptField], kind: str
) -> None:
    """Refuse a file of CSV that has not the columns to keep, each once."""
    is_declared = all(each.declared for each in kept)
    if kind in JSON or (location.is_stdin and is_declared):
        return
    header = names_in(location, options)
    for each in kept:
        column_of(header, each.name, location.name)


def _kept(schema: pa.Schema, location: Location, options: CorpusOptions) -> pa.Schema:
    names = kept_names(schema, location.name, options.keep)
    return pa.schema([schema.field(name) for name in names])


def _say(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"
