"""The way into the readers: sources in, batches of good rows out."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import BinaryIO, Final, TypeAlias

from embedfarm.contract.records import Rows
from embedfarm.contract.source_places import Places, RowRun
from embedfarm.readers import (
    arrow,
    chunker,
    database,
    delimited,
    directory,
    jsonl,
    lance,
    parquet,
    text,
)
from embedfarm.readers.fields import ALL, ColumnQueue, Fields, KeptField, parse_template
from embedfarm.readers.items import BadRow, CorpusError, Item
from embedfarm.readers.limits import UNLIMITED, Limits, limit_rows
from embedfarm.readers.recoded import UTF_8, canonical, is_encoding, recode
from embedfarm.readers.source import (
    COMPRESSIONS,
    DATABASE,
    LANCE,
    TABLES,
    Cursor,
    Location,
    named_errors,
    open_binary,
    split_compression,
)
from embedfarm.readers.text_columns import parse_kept

BATCH_ROWS_MAX: Final = 2048
BATCH_CHARACTERS_MAX: Final = 1 << 20
"""A batch ends with the row that reaches this."""

_Read: TypeAlias = Callable[[BinaryIO, str, Fields, Cursor], Iterator[Item]]
_Cut: TypeAlias = Callable[[str], Iterator[str]]
_Opened: TypeAlias = Callable[[Location], AbstractContextManager[BinaryIO]]

FORMATS: Final[dict[str, _Read]] = {
    "jsonl": jsonl.read,
    "json": jsonl.read_json,
    "csv": partial(delimited.read, delimiter=","),
    "tsv": partial(delimited.read, delimiter="\t"),
    "parquet": parquet.read,
    "arrow": arrow.read,
    "txt": text.read,
}
SUFFIXES: Final = TABLES | {".txt": "txt"}
WITHOUT_ENCODING: Final = frozenset({"parquet", "arrow"})


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """Options that say how sources are read.

    Attributes:
        text_field: Column or key of the text.
        template: Text made of several fields, such as "{title}: {body}", in place of that
            of one field.
        id_field: Column or key of the id; None for rows without ids.
        query: Query that gives the rows of a database, which come in the order of `id_field`.
        keep: Columns that stay beside the vectors, `("all",)` for every one, at the top of a row.
            Of JSON and CSV they are strings, or what is declared, as in "year:int64".
        format: A name in `FORMATS` for every file named as a source; None goes by the suffix.
        glob: Which files of a directory are read, by their path below it. If they are all of one
            format of rows, they are read as such; else each of them is a document.
        encoding: Encoding of the files, as Python names it; those of Parquet and Arrow have none.
        tokenizer_file: A tokenizer.json, which a directory needs to be cut into chunks.
        chunk_tokens: Tokens of a chunk of a directory's file, at most.
        chunk_overlap: Tokens of a chunk that the next one repeats, at most.

    Raises:
        CorpusError: The options contradict one another or themselves.
    """

    text_field: str = "text"
    template: str | None = None
    id_field: str | None = None
    query: str | None = None
    keep: tuple[str, ...] = ()
    format: str | None = None
    glob: str = "**/*"
    encoding: str = UTF_8
    tokenizer_file: str | None = None
    chunk_tokens: int = 200
    chunk_overlap: int = 20

    def __post_init__(self) -> None:
        if self.template is None and self.id_field == self.text_field:
            raise CorpusError(f"field {self.text_field!r} cannot be text and id at once")
        if self.format is not None and self.format not in FORMATS:
            raise CorpusError(f"unknown format {self.format!r}; known: {', '.join(FORMATS)}")
        if not is_encoding(self.encoding):
            raise CorpusError(
                f"unknown encoding {self.encoding!r}; it is named such as cp1252 or utf-16"
            )
        if self.chunk_tokens < 1 or not 0 <= self.chunk_overlap <= self.chunk_tokens // 2:
            raise CorpusError(
                f"chunks of {self.chunk_tokens} tokens cannot overlap by {self.chunk_overlap};"
                " from 0 to half of the chunk can"
            )
        self.fields()

    def fields(self, columns: ColumnQueue | None = None) -> Fields:
        """Return what is taken of each row; `columns` gets the columns to keep.

        Raises:
            CorpusError: The template is none.
        """
        if self.template is None:
            return Fields((self.text_field,), self.id_field, None, self.keep, columns)
        template = parse_template(self.template)
        return Fields(template.fields, self.id_field, template, self.keep, columns)


_Look: TypeAlias = Callable[[BinaryIO, str, Fields], list[str]]

LOOKS: Final[dict[str, _Look]] = {
    "jsonl": jsonl.names_in_json,
    "json": jsonl.names_in_json,
    "csv": partial(delimited.names_in_header, delimiter=","),
    "tsv": partial(delimited.names_in_header, delimiter="\t"),
}
"""Formats of text whose rows have fields, and what finds the names of these in a file."""


def read_corpus(  # noqa: PLR0913 -- the last three are for those who need them
    sources: Sequence[str],
    options: CorpusOptions,
    bad_rows: Callable[[BadRow], None],
    stdin: BinaryIO | None = None,
    *,
    cursor: Cursor | None = None,
    limits: Limits = UNLIMITED,
    columns: ColumnQueue | None = None,
    placed: bool = False,
) -> Iterator[Rows]:
    """Read the good rows of all sources, in the order given, in batches that stay small.

    A source is a path, an fsspec URL, a glob of either, or "-" for standard input (JSON Lines
    unless `options.format` says otherwise). `bad_rows` gets every row that is left out, when its
    turn comes: it raises to stop (`fail_on_bad_row`) or keeps account and returns to go on.

    `stdin` stands in for the process's own standard input. Reading begins at `cursor`, and moves it
    along: when a batch is yielded it is the place behind it, where another reading may go on.
    Documents of a directory have a limit of their own beside `limits`.

    To `columns` those to keep are appended of all rows that are yielded, in order, in batches of
    their own: those of a row before the row is yielded.

    With `placed`, rows have their `places`, of files that `references` accepts.

    Raises:
        CorpusError: At the call: a source is missing, its format unknown, a directory has no
            tokenizer, or some sources have ids and some have none. While iterating: a file is
            damaged, or is not what its format promises, or the sources are beyond the limits.
    """
    locations = [each for source in sources for each in directory.locate(source, options.glob)]
    with_ids = _agree_on_ids(locations, options)
    cut = _load_cut(locations, options)
    for location in locations:
        if not location.is_directory:
            format_of(location, options)
    opened = partial(_open, stdin=stdin, bytes_max=limits.bytes_max)
    fields = replace(options.fields(columns), kept=kept_fields(locations, options))
    cursor = cursor or Cursor()
    items = _read_all(locations, options, fields, cut, opened, cursor)
    batches = _gather(items, bad_rows, cursor if placed else None, with_ids=with_ids)
    return limit_rows(batches, limits)


def _agree_on_ids(locations: Sequence[Location], options: CorpusOptions) -> bool:
    """Tell whether rows have ids: those of a directory do, others where a field is named."""
    directories = [location.name for location in locations if location.is_directory]
    files = [location.name for location in locations if not location.is_directory]
    if directories and files and options.id_field is None:
        raise CorpusError(
            f"the chunks of {directories[0]} have ids and those of {files[0]} have none:"
            " name the id field, or read them apart"
        )
    return bool(directories) or options.id_field is not None


def _load_cut(locations: Sequence[Location], options: CorpusOptions) -> _Cut | None:
    """Return the function that cuts the files of directories; None where there is no directory."""
    names = [location.name for location in locations if location.is_directory]
    if not names:
        return None
    if options.template is not None:
        raise CorpusError(f"{names[0]}: the files of a directory have no fields to make a text of")
    if options.tokenizer_file is None:
        raise CorpusError(f"{names[0]}: a directory is cut into chunks, which needs a tokenizer")
    try:
        tokenizer = chunker.load_tokenizer(options.tokenizer_file)
    except ValueError as error:
        raise CorpusError(str(error)) from error
    return partial(
        chunker.cut,
        find_spans=partial(chunker.token_spans, tokenizer),
        chunk_tokens=options.chunk_tokens,
        chunk_overlap=options.chunk_overlap,
    )


def format_of(location: Location, options: CorpusOptions) -> str:
    """Return the name in `FORMATS` of the format in which a file is read.

    Raises:
        CorpusError: Neither the options nor the name of the file say it, or it cannot be read so.
    """
    if location.is_database:
        return DATABASE
    if options.query is not None:
        raise CorpusError(f"{location.name}: a query is for a database, which this is not")
    if location.is_lance:
        return LANCE
    stem, compression = split_compression(location.path)
    by_name = "jsonl" if location.is_stdin else SUFFIXES.get(PurePosixPath(stem).suffix.lower())
    chosen = options.format or by_name
    if chosen is None:
        raise CorpusError(
            f"{location.name}: unknown format; name one of {', '.join(FORMATS)}, or use a suffix:"
            f" {', '.join(SUFFIXES)}, each but .parquet also with {' or '.join(COMPRESSIONS)}"
        )
    if chosen == "parquet" and (compression or location.is_stdin):
        raise CorpusError(
            f"{location.name}: Parquet is read from a file as it is, which this is not"
        )
    return chosen


def kept_fields(locations: Sequence[Location], options: CorpusOptions) -> tuple[KeptField, ...]:
    """Return the fields to keep where rows are text; if all of them are kept, those of all files.

    Raises:
        CorpusError: A file has to be looked into and cannot, or one field is named with two types.
    """
    if not options.keep:
        return ()
    files = [each for each in locations if not each.is_directory]
    texts = [each for each in files if format_of(each, options) in LOOKS]
    if texts and options.keep != (ALL,):
        return parse_kept(options.keep)
    names = dict.fromkeys(name for each in texts for name in names_in(each, options))
    return tuple(map(KeptField, names))


def names_in(location: Location, options: CorpusOptions) -> list[str]:
    """Return the names of the fields in a file of text: in its first rows, or its header.

    Raises:
        CorpusError: It is standard input, or cannot be read.
    """
    name, chosen = location.name, format_of(location, options)
    if location.is_stdin:
        raise CorpusError(
            f"{name}: nobody can look into it beforehand: name the columns to keep, each with its "
            "type (--keep title:string,year:int64)"
        )
    with (
        named_errors(name, is_url=location.is_url),
        open_binary(location.filesystem, location.path) as file,
    ):
        return LOOKS[chosen](_in_utf_8(file, chosen, options), name, options.fields())


def _in_utf_8(file: BinaryIO, chosen: str, options: CorpusOptions) -> BinaryIO:
    """Return a file's content, in UTF-8 if it is one of text."""
    has_none = chosen in WITHOUT_ENCODING or canonical(options.encoding) == UTF_8
    return file if has_none else recode(file, options.encoding)


def _read_all(  # noqa: PLR0913, PLR0917 -- what the one call has in hand
    locations: Sequence[Location],
    options: CorpusOptions,
    fields: Fields,
    cut: _Cut | None,
    opened: _Opened,
    cursor: Cursor,
) -> Iterator[Item]:
    """Yield the items of all locations from the cursor on."""
    for location in locations[cursor.location :]:
        items = _read(location, options, fields, cut, opened, cursor)
        is_usual = canonical(options.encoding) == UTF_8
        yield from items if is_usual else (_named(each, options.encoding) for each in items)
        cursor.location, cursor.offset, cursor.line = cursor.location + 1, 0, 0


def _read(  # noqa: PLR0913, PLR0917 -- what the one call has in hand
    location: Location,
    options: CorpusOptions,
    fields: Fields,
    cut: _Cut | None,
    opened: _Opened,
    cursor: Cursor,
) -> Iterator[Item]:
    """Yield the items of one location; what is wrong with all of it becomes a `CorpusError`."""
    with named_errors(location.name, is_url=location.is_url):
        if cut is not None and location.is_directory:
            yield from directory.read(location, options.glob, options.encoding, cut, cursor)
            return
        chosen = format_of(location, options)
        if location.is_database:
            yield from database.read(location.path, location.name, fields, options.query, cursor)
            return
        if location.is_lance:
            yield from lance.read(location.path, location.name, fields, cursor)
            return
        with opened(location) as file:
            content = _in_utf_8(file, chosen, options)
            yield from FORMATS[chosen](content, location.name, fields, cursor)


def _named(item: Item, encoding: str) -> Item:
    """Return an item; the reason of a bad row names the encoding that its file was to have."""
    if not isinstance(item, BadRow):
        return item
    return replace(item, reason=item.reason.replace("UTF-8", encoding, 1))


def _open(
    location: Location, stdin: BinaryIO | None, bytes_max: int
) -> AbstractContextManager[BinaryIO]:
    """Open a location for its bytes, unpacked; standard input is left open at the end."""
    if location.is_stdin:
        return nullcontext(sys.stdin.buffer if stdin is None else stdin)
    return open_binary(location.filesystem, location.path, bytes_max)


def _gather(
    items: Iterable[Item],
    bad_rows: Callable[[BadRow], None],
    cursor: Cursor | None,
    *,
    with_ids: bool,
) -> Iterator[Rows]:
    """Yield batches of the rows, in order; give bad rows to `bad_rows` in between.

    Rows have their places if there is a cursor, which moves along with the items.
    """
    texts: list[str] = []
    ids: list[str] = []
    runs: list[RowRun] = []
    begins: list[int] = []
    ends: list[int] = []
    characters = 0
    file, before = (0, 0) if cursor is None else (cursor.location, cursor.offset)
    run = RowRun(file, before)
    for item in items:
        if cursor is not None and cursor.location != file:
            file, before = cursor.location, 0
            run = RowRun(file, 0)
        if isinstance(item, BadRow):
            bad_rows(item)
            if cursor is not None:
                before = cursor.offset
                run = RowRun(file, before)
            continue
        if cursor is not None:
            runs.append(run)
            begins.append(before)
            ends.append(before := cursor.offset)
        texts.append(item[0])
        ids.append(item[1])
        characters += len(item[0])
        if characters >= BATCH_CHARACTERS_MAX or len(texts) >= BATCH_ROWS_MAX:
            yield Rows(texts, ids if with_ids else None, places=Places(runs, begins, ends))
            texts, ids, characters = [], [], 0
            runs, begins, ends = [], [], []
    if texts:
        yield Rows(texts, ids if with_ids else None, places=Places(runs, begins, ends))
