"""CSV and TSV: a header row, then rows of plain or quoted cells."""

import csv
from collections.abc import Iterator
from typing import BinaryIO

from embedfarm.producer.readers.items import BadRow, CorpusError, Item, is_unicode
from embedfarm.producer.readers.source import LINE_BYTES_MAX, Cursor, number_lines


def read(  # noqa: PLR0913 -- the readers' common arguments, and one of its own
    file: BinaryIO,
    name: str,
    text_field: str,
    id_field: str | None,
    cursor: Cursor,
    *,
    delimiter: str,
) -> Iterator[Item]:
    """Yield an item per row under the header; skip blank lines; quoted cells may hold line ends.

    A row must be as wide as the header. A wider one is bad too: a stray delimiter has most likely
    cut its text in two.

    Raises:
        CorpusError: There is no header row, or it lacks a field.
    """
    begin = Cursor()
    header = _header(_read_rows(file, name, delimiter, begin), name)
    if not cursor.offset:
        cursor.offset, cursor.line = begin.offset, begin.line
    rows = _read_rows(file, name, delimiter, cursor, begin.offset)
    columns = [(field, _column(header, field, name)) for field in (text_field, id_field) if field]
    for line, row in rows:
        if isinstance(row, csv.Error):
            yield BadRow(name, line, None, f"no row: {row}")
        elif len(row) != len(header):
            reason = f"{len(row)} columns, where the header has {len(header)}"
            yield BadRow(name, line, None, reason)
        else:
            yield _item(row, columns, name, line)


def _read_rows(
    file: BinaryIO, name: str, delimiter: str, cursor: Cursor, read_bytes: int = 0
) -> Iterator[tuple[int, list[str] | csv.Error]]:
    """Yield each row, or the error in its place, with the physical line on which it begins."""
    csv.field_size_limit(LINE_BYTES_MAX)
    # Bytes that are not UTF-8 pass as surrogates, so that they cost their own row only.
    numbered = number_lines(file, name, cursor, read_bytes)
    lines = (line.decode("utf-8", "surrogateescape") for _, line in numbered)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    before = cursor.line
    while True:
        line = before + reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield line, error
            continue
        if row is None:
            return
        if row:
            yield line, row


def _header(rows: Iterator[tuple[int, list[str] | csv.Error]], name: str) -> list[str]:
    """Return the first row, or raise `CorpusError` if it is no header."""
    line, header = next(rows, (1, []))
    if isinstance(header, csv.Error):
        raise CorpusError(f"{name} line {line}: no header row: {header}")
    if not header:
        raise CorpusError(f"{name}: no header row, the file is empty")
    return header


def _column(header: list[str], field: str, name: str) -> int:
    """Return the index of a field's column, or raise `CorpusError` if there is not just one."""
    if header.count(field) != 1:
        raise CorpusError(f"{name}: no single column {field!r}; it has {', '.join(header)}")
    return header.index(field)


def _item(row: list[str], columns: list[tuple[str, int]], name: str, line: int) -> Item:
    """Return the cells asked for, or a bad row if one of them was not UTF-8."""
    for field, column in columns:
        if not is_unicode(row[column]):
            return BadRow(name, line, field, "not UTF-8")
    values = [row[column] for _, column in columns]
    return values[0], values[1] if len(values) > 1 else ""
