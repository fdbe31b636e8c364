"""JSON Lines, one object per line; and one array of objects."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO, Final

import msgspec

from embedfarm.producer.readers.fields import Fields
from embedfarm.producer.readers.items import CorpusError, Item
from embedfarm.producer.readers.json_rows import JsonRows
from embedfarm.producer.readers.source import Cursor, number_lines

ARRAY_BYTES_MAX: Final = 256 << 20
"""A larger array is refused: it is decoded whole."""

PEEKED_BYTES: Final = 4096

_MARK_AND_BLANKS: Final = b"\xef\xbb\xbf \t\r\n"


def read(file: BinaryIO, name: str, fields: Fields, cursor: Cursor) -> Iterator[Item]:
    """Yield an item per line that is not blank.

    Raises:
        CorpusError: A line is too long, or the decoder cannot look for a field of that name.
    """
    rows = JsonRows(name, fields)
    for number, line in number_lines(file, name, cursor):
        item = rows.item(line, number)
        if item is not None:
            yield item


def read_json(file: BinaryIO, name: str, fields: Fields, cursor: Cursor) -> Iterator[Item]:
    """Yield an item per object of one array; a file that is no array is JSON Lines.

    Raises:
        CorpusError: The array is damaged or too large, or what `read` refuses.
    """
    buffered: Any = file  # whatever is opened here can be peeked into
    if not buffered.peek(PEEKED_BYTES).lstrip(_MARK_AND_BLANKS).startswith(b"["):
        yield from read(file, name, fields, cursor)
        return
    data = file.read(ARRAY_BYTES_MAX + 1)
    if len(data) > ARRAY_BYTES_MAX:
        raise CorpusError(
            f"{name}: an array is decoded whole, up to {ARRAY_BYTES_MAX >> 20} MiB; this one is "
            "larger, and can be read with one object a line (.jsonl)"
        )
    try:
        objects = msgspec.json.decode(data.lstrip(_MARK_AND_BLANKS), type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorpusError(f"{name}: no array of JSON: {error}") from error
    rows = JsonRows(name, fields)
    for each in islice(objects, cursor.offset, None):
        cursor.offset += 1
        item = rows.item(bytes(each), cursor.offset)
        if item is not None:
            yield item
