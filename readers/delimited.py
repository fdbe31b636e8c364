"""CSV and TSV: a header row, then rows of plain or quoted cells.

Spreadsheets of many countries write semicolons into a file that they call CSV. So if the header has
the wanted fields by another delimiter only, that one is meant.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Final

from embedfarm.readers.fields import Fields
from embedfarm.readers.items import BadRow, CorpusError, Item, is_unicode
from embedfarm.readers.source import LINE_BYTES_MAX, Cursor, number_lines
from embedfarm.readers.text_columns import TextColumns, columns_of_csv

DELIMITERS: Final = (",", ";", "\t", "|")


def read(
    file: BinaryIO, name: str, fields: Fields, cursor: Cursor, *, delimiter: str
) -> Iterator[Item]:
    """Yield an item per row under the header; skip blank lines; quoted cells may hold line ends.

    Cells are told apart by `delimiter`, or by another one of `DELIMITERS` by which alone the header
    has the fields. A row must be as wide as the header. A wider one is bad too: a stray delimiter
    has most likely cut its text in two.

    Raises:
        CorpusError: There is no header row, or it lacks a field.
    """
    begin = Cursor()
    header, used = _begin(file, name, fields, delimiter, begin)
    if not cursor.offset:
        cursor.offset, cursor.line = begin.offset, begin.line
    kept = columns_of_csv(fields)

    def rows(cursor: Cursor) -> Iterator[Item]:
        lines = _Lines(file, name, cursor, begin.offset)
        yield from _items(_read_rows(lines, used), header, name, fields, kept)

    yield from rows(cursor) if kept is None else kept.ahead(rows, cursor)


def names_in_header(file: BinaryIO, name: str, fields: Fields, *, delimiter: str) -> list[str]:
    """Return the names in the header of a file.

    Raises:
        CorpusError: There is no header row.
    """
    return _begin(file, name, fields, delimiter, Cursor())[0]


def column_of(header: Sequence[str], field: str, name: str) -> int:
    """Return the index of a field's column.

    Raises:
        CorpusError: There is not just one of that name.
    """
    if header.count(field) != 1:
        raise CorpusError(f"{name}: no single column {field!r}; it has {', '.join(header)}")
    return header.index(field)


def _begin(
    file: BinaryIO, name: str, fields: Fields, delimiter: str, cursor: Cursor
) -> tuple[list[str], str]:
    """Read a file up to its header; return that, and the delimiter."""
    csv.field_size_limit(LINE_BYTES_MAX)
    lines = _Lines(file, name, cursor)
    first = next((line for line in lines if line.strip()), "")
    lines.go_back(0)
    used = _find_delimiter(first, fields.names, delimiter)
    return _header(_read_rows(lines, used), name), used


def _items(
    rows: Iterator[tuple[int, list[str] | csv.Error]],
    header: Sequence[str],
    name: str,
    fields: Fields,
    kept: TextColumns | None,
) -> Iterator[Item]:
    """Yield an item per row."""
    columns = [column_of(header, field, name) for field in fields.names]
    beside = [column_of(header, field, name) for field in (kept.names if kept else ())]
    for line, row in rows:
        if isinstance(row, csv.Error):
            yield BadRow(name, line, None, f"no row: {row}")
        elif len(row) != len(header):
            reason = f"{len(row)} columns, where the header has {len(header)}"
            yield BadRow(name, line, None, reason)
        else:
            values = [row[column] for column in columns]
            damaged = next((n for n, value in enumerate(values) if not is_unicode(value)), None)
            if damaged is not None:
                yield BadRow(name, line, fields.names[damaged], "not UTF-8")
            elif kept and (unfit := kept.add([row[column] for column in beside])):
                yield BadRow(name, line, unfit.field, unfit.reason)
            else:
                yield fields.row(values)


class _Lines:
    """The lines of a file from the cursor on, of which those of one row can be read once more.

    Bytes that are not UTF-8 pass as surrogates, so that they cost their own row only.
    """

    def __init__(self, file: BinaryIO, name: str, cursor: Cursor, read_bytes: int = 0) -> None:
        self.cursor = cursor
        self._file = number_lines(file, name, cursor, read_bytes)
        self._again = io.BytesIO()
        self._before = cursor.line
        self._row = bytearray()

    def __iter__(self) -> Iterator[str]:
        for line in iter(self._again.readline, b""):
            self.cursor.offset += len(line)
            self.cursor.line += 1
            self._row += line
            yield line.decode("utf-8", "surrogateescape")
        for _, line in self._file:
            self._row += line
            yield line.decode("utf-8", "surrogateescape")

    def begin_row(self) -> int:
        """Begin with a row, and return the number of its first line."""
        self._before = self.cursor.line
        self._row.clear()
        return self._before + 1

    def go_back(self, count: int) -> None:
        """Go back behind the first lines of the row, so many of them, as does the cursor.

        An iteration that goes on must begin anew.
        """
        begin = 0
        for _ in range(count):
            begin = self._row.find(b"\n", begin) + 1 or len(self._row)
        rest = self._row[begin:]
        self.cursor.offset -= len(rest)
        self.cursor.line = self._before + count
        if self._again.read(1):  # the row ended before what is read once more does
            self._again.seek(-len(rest) - 1, io.SEEK_CUR)
        else:
            self._again = io.BytesIO(rest)


def _find_delimiter(line: str, fields: Sequence[str], usual: str) -> str:
    """Return the first delimiter by which a line has each field once, or else the usual one."""
    for each in (usual, *DELIMITERS):
        try:
            cells = next(csv.reader([line], delimiter=each))
        except csv.Error:  # so it is by the usual one as well, which says what is wrong
            break
        if all(cells.count(field) == 1 for field in fields):
            return each
    return usual


def _read_rows(lines: _Lines, delimiter: str) -> Iterator[tuple[int, list[str] | csv.Error]]:
    """Yield each row, or the error in its place, with the physical line on which it begins.

    A quote that nothing closes takes the lines behind it for its cell. So an error costs the first
    line alone, and a row may begin with the next one.

    Args:
        lines: Lines of the file.
        delimiter: What lies between cells.
    """
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        line = lines.begin_row()
        try:
            row = next(reader, None)
        except csv.Error as error:
            lines.go_back(1)
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
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
