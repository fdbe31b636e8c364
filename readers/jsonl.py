"""JSON Lines, one object per line; and one array of objects."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, BinaryIO, Final

import msgspec

from embedfarm.readers.fields import Fields
from embedfarm.readers.items import CorpusError, Item
from embedfarm.readers.json_rows import JsonRows, decode_pieces
from embedfarm.readers.source import Cursor, number_lines

ARRAY_BYTES_MAX: Final = 256 << 20
"""A larger array is refused: it is decoded whole."""

FIRST_ROWS: Final = 10_000
FIRST_BYTES: Final = 8 << 20
"""The rows of a file that are looked at for the names of fields, and the bytes of them."""

PEEKED_BYTES: Final = 4096

_MARK_AND_BLANKS: Final = b"\xef\xbb\xbf \t\r\n"


def read(file: BinaryIO, name: str, fields: Fields, cursor: Cursor) -> Iterator[Item]:
    """Yield an item per line that is not blank.

    Raises:
        CorpusError: A line is too long, or the decoder cannot look for a field of that name.
    """
    rows = JsonRows(name, fields)

    def lines(cursor: Cursor) -> Iterator[Item]:
        for number, line in number_lines(file, name, cursor):
            item = rows.item(line, number)
            if item is not None:
                yield item

    yield from lines(cursor) if rows.columns is None else rows.columns.ahead(lines, cursor)


def read_json(file: BinaryIO, name: str, fields: Fields, cursor: Cursor) -> Iterator[Item]:
    """Yield an item per object of one array; a file that is no array is JSON Lines.

    Raises:
        CorpusError: The array is damaged or too large, or what `read` refuses.
    """
    if not _is_array(file):
        yield from read(file, name, fields, cursor)
        return
    objects = _objects(file, name)
    rows = JsonRows(name, fields)

    def items(cursor: Cursor) -> Iterator[Item]:
        for each in islice(objects, cursor.offset, None):
            cursor.offset += 1
            item = rows.item(bytes(each), cursor.offset)
            if item is not None:
                yield item

    yield from items(cursor) if rows.columns is None else rows.columns.ahead(items, cursor)


def names_in_json(file: BinaryIO, name: str, _fields: Fields) -> list[str]:
    """Return the names of the fields that the first rows of a file have, in their order.

    These are `FIRST_ROWS` of them, or as many as `FIRST_BYTES` hold. What is no object is passed
    over.

    Raises:
        CorpusError: An array is damaged or too large, or a line is too long.
    """
    is_array = _is_array(file)
    objects = map(bytes, _objects(file, name)) if is_array else _first_lines(file, name)
    names: dict[str, None] = {}
    for each in islice(objects, FIRST_ROWS):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            names |= dict.fromkeys(decode_pieces(each))
    return list(names)


def _first_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the lines that begin in the first bytes of a file."""
    cursor = Cursor()
    for _, line in number_lines(file, name, cursor):
        yield line
        if cursor.offset >= FIRST_BYTES:
            return


def _is_array(file: BinaryIO) -> bool:
    """Tell whether a file is one array, and not JSON Lines."""
    buffered: Any = file  # whatever is opened here can be peeked into
    begin: bytes = buffered.peek(PEEKED_BYTES)
    return begin.lstrip(_MARK_AND_BLANKS).startswith(b"[")


def _objects(file: BinaryIO, name: str) -> list[msgspec.Raw]:
    """Return the objects of an array, not decoded yet."""
    data = file.read(ARRAY_BYTES_MAX + 1)
    if len(data) > ARRAY_BYTES_MAX:
        raise CorpusError(
            f"{name}: an array is decoded whole, up to {ARRAY_BYTES_MAX >> 20} MiB; this one is "
            "larger, and can be read with one object a line (.jsonl)"
        )
    try:
        return msgspec.json.decode(data.lstrip(_MARK_AND_BLANKS), type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorpusError(f"{name}: no array of JSON: {error}") from error
