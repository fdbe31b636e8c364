"""What an Arrow file or stream says of its record batches, which pyarrow does not tell.

Messages and footer are FlatBuffers: a table has its fields at offsets that its vtable lists, as
FlatBuffers' internals and Arrow's Message.fbs and File.fbs document. No rows are read.
"""

import io
import struct
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

from embedfarm.readers.source import skip_bytes

_FOOTER_TAIL_BYTES: Final = 10  # the size of the footer, and the magic word
_BATCHES: Final = 3  # a field of the footer: where each record batch is
_CONTINUATION: Final = b"\xff" * 4
_KIND, _HEADER, _BODY_BYTES = 1, 2, 3  # fields of a message
_DICTIONARY, _ROWS = 2, 3  # kinds of headers
_DICTIONARY_ROWS, _IS_DELTA = 1, 2  # fields of a dictionary
_COMPRESSION: Final = 3  # a field of rows
_CODEC: Final = 0  # a field of their compression
_CODECS: Final = ("lz4", "zstd")


class ArrowForm(NamedTuple):
    """How record batches are written.

    Attributes:
        codec: What their columns are compressed with; None where they are not.
        has_deltas: Whether a dictionary of a stream grows from batch to batch.
    """

    codec: str | None = None
    has_deltas: bool = False


def form_of_file(file: BinaryIO) -> ArrowForm:
    """Return how the first record batch of a file is written.

    Raises:
        ValueError: Its footer, or that message, is damaged.
    """
    end = file.seek(-_FOOTER_TAIL_BYTES, io.SEEK_END)
    try:
        file.seek(end - struct.unpack_from("<i", file.read(_FOOTER_TAIL_BYTES))[0])
        footer = file.read()
        batches = _field(footer, _indirect(footer, 0), _BATCHES)
        places = _indirect(footer, batches) if batches else 0
        if not (places and struct.unpack_from("<I", footer, places)[0]):
            return ArrowForm()
        file.seek(struct.unpack_from("<q", footer, places + 4)[0])
        return next(_forms(file), ArrowForm())
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError("its footer or first record batch is damaged") from error


def form_of_stream(file: BinaryIO) -> ArrowForm:
    """Return how the record batches of a stream are written, all of whose messages are looked at.

    Raises:
        ValueError: A message is damaged.
    """
    try:
        forms = _forms(file)
        first = next(forms, ArrowForm())
        return ArrowForm(first.codec, any(each.has_deltas for each in forms))
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError("a message in it is damaged") from error


def _forms(file: BinaryIO) -> Iterator[ArrowForm]:
    """Yield what each message with rows or a dictionary says, up to the end of the stream."""
    while begin := file.read(4):
        (size,) = struct.unpack("<I", file.read(4) if begin == _CONTINUATION else begin)
        if not size:
            return
        data = file.read(size)
        message = _indirect(data, 0)
        kind = data[_field(data, message, _KIND)]
        if kind in {_DICTIONARY, _ROWS}:
            yield _form(data, _indirect(data, _field(data, message, _HEADER)), kind)
        body = _field(data, message, _BODY_BYTES)
        skip_bytes(file, struct.unpack_from("<Q", data, body)[0] if body else 0)


def _form(data: bytes, header: int, kind: int) -> ArrowForm:
    """Return what the header of a message says."""
    is_delta = False
    if kind == _DICTIONARY:
        place = _field(data, header, _IS_DELTA)
        is_delta = bool(place and data[place])
        header = _indirect(data, _field(data, header, _DICTIONARY_ROWS))
    if not (compression := _field(data, header, _COMPRESSION)):
        return ArrowForm(None, is_delta)
    codec = _field(data, _indirect(data, compression), _CODEC)
    return ArrowForm(_CODECS[data[codec] if codec else 0], is_delta)


def _indirect(data: bytes, place: int) -> int:
    """Return the place that is noted at a place."""
    distance: int = struct.unpack_from("<I", data, place)[0]
    return place + distance


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a field of a table lies; 0 if it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    slot = 4 + 2 * number
    is_there = slot < struct.unpack_from("<H", data, vtable)[0]
    offset: int = struct.unpack_from("<H", data, vtable + slot)[0] if is_there else 0
    return table + offset if offset else 0
