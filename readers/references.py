"""Texts by reference: where in the files of a corpus they are, and what is read there."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import fsspec
from fsspec import AbstractFileSystem
from msgspec.structs import replace

from embedfarm.contract.redaction import hide_in_word
from embedfarm.contract.source_places import SourceReference
from embedfarm.readers.corpus import FORMATS, CorpusOptions, format_of
from embedfarm.readers.directory import locate
from embedfarm.readers.items import BadRow, CorpusError, Item
from embedfarm.readers.json_rows import JsonRows
from embedfarm.readers.recoded import UTF_8, canonical
from embedfarm.readers.source import (
    BYTE_ORDER_MARK,
    Cursor,
    Location,
    named_errors,
    open_binary,
    split_compression,
)

REFERABLE: Final = ("jsonl", "parquet", "arrow")
"""Formats in which a place can be found without reading all that comes before it."""


def references(sources: Sequence[str], options: CorpusOptions) -> list[SourceReference]:
    """Return a reference to the beginning of each file of a corpus, in the order of reading.

    Raises:
        CorpusError: One of them is in no format in which blocks can refer to a place, or a source
            is missing.
    """
    locations = [each for source in sources for each in locate(source, options.glob)]
    return [_refer(location, options) for location in locations]


def _refer(location: Location, options: CorpusOptions) -> SourceReference:
    """Return a reference to the beginning of a file.

    Raises:
        CorpusError: Nobody can refer to a place in it.
    """
    name, is_row_file = location.name, not (location.is_directory or location.is_stdin)
    if is_row_file and not (location.is_database or location.is_lance):
        chosen, path = format_of(location, options), location.path
        packed = split_compression(path)[1] or canonical(options.encoding) != UTF_8
        if chosen in REFERABLE and not packed:
            url = location.filesystem.unstrip_protocol(path) if location.is_url else path
            if hide_in_word(url) != url:
                raise CorpusError(f"{name}: a URL with secrets is in no block")
            return SourceReference(
                file=url,
                format=chosen,
                text_field=options.text_field,
                template=options.template or "",
            )
    raise CorpusError(
        f"{name}: workers read texts out of files of {', '.join(REFERABLE)} that are in UTF-8 and "
        "not compressed; leave --texts-from away"
    )


def texts_of(wanted: Iterable[SourceReference]) -> Iterator[list[str]]:
    """Yield the texts of each reference; those that follow one another are read in one go.

    They are fewer than wanted where a file ends before, or has a bad row there.

    Raises:
        CorpusError: A file cannot be read, or has not the fields.
    """
    run: list[SourceReference] = []
    for each in wanted:
        if run and not _follows(each, run[-1]):
            yield from _read(run)
            run = []
        run.append(each)
    if run:
        yield from _read(run)


def _follows(reference: SourceReference, before: SourceReference) -> bool:
    """Tell whether a reference goes on where another one ends."""
    place = {"offset": before.offset + before.length}
    rest = {name: getattr(before, name) for name in ("length", "rows", "checksum")}
    return replace(reference, **rest) == replace(before, **place)


def _read(run: Sequence[SourceReference]) -> Iterator[list[str]]:
    """Yield the texts of references that follow one another."""
    first = run[0]
    name = first.file
    options = CorpusOptions(text_field=first.text_field, template=first.template or None)
    with named_errors(name, is_url="://" in name):
        filesystem, path = fsspec.core.url_to_fs(name)
        if first.format == "jsonl":
            yield from _read_lines(run, filesystem, path, JsonRows(name, options.fields()))
            return
        with open_binary(filesystem, path) as file:
            read, cursor = FORMATS[first.format], Cursor(offset=first.offset)
            items = read(file, name, options.fields(), cursor)
            for each in run:
                yield list(_good_texts(islice(items, each.rows)))


def _read_lines(
    run: Sequence[SourceReference], filesystem: AbstractFileSystem, path: str, rows: JsonRows
) -> Iterator[list[str]]:
    """Yield the texts of lines that follow one another."""
    first, last = run[0], run[-1]
    lines = filesystem.cat_file(path, start=first.offset, end=last.offset + last.length)
    for each in run:
        own = slice(each.offset - first.offset, each.offset - first.offset + each.length)
        yield rows.texts(lines[own].removeprefix(b"" if each.offset else BYTE_ORDER_MARK))


def _good_texts(items: Iterable[Item]) -> Iterator[str]:
    """Yield the texts of rows up to the first bad one."""
    for item in items:
        if isinstance(item, BadRow):
            return
        yield item[0]
