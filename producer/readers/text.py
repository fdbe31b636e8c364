"""Plain text: every line is a chunk."""

from collections.abc import Iterator
from typing import BinaryIO

from embedfarm.producer.readers.items import BadRow, CorpusError, Item
from embedfarm.producer.readers.source import Cursor, number_lines


def read(
    file: BinaryIO, name: str, _text_field: str, id_field: str | None, cursor: Cursor
) -> Iterator[Item]:
    r"""Yield an item per line without its b"\n" or b"\r\n"; an empty line is an empty text.

    So, where no row is bad, the index of a chunk is the number of its line less one.

    Raises:
        CorpusError: Ids are asked for.
    """
    if id_field is not None:
        raise CorpusError(f"{name}: plain text has no field {id_field!r}, nor any other")
    for number, line in number_lines(file, name, cursor):
        try:
            yield line.removesuffix(b"\r\n").removesuffix(b"\n").decode(), ""
        except UnicodeDecodeError as error:
            yield BadRow(name, number, None, f"not UTF-8: {error.reason}")
