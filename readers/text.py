"""Plain text: every line is a chunk."""

from collections.abc import Iterator
from typing import BinaryIO

from embedfarm.readers.fields import Fields
from embedfarm.readers.items import BadRow, CorpusError, Item
from embedfarm.readers.source import Cursor, number_lines


def read(file: BinaryIO, name: str, fields: Fields, cursor: Cursor) -> Iterator[Item]:
    r"""Yield an item per line without its b"\n" or b"\r\n"; an empty line is an empty text.

    So, where no row is bad, the index of a chunk is the number of its line less one.

    Raises:
        CorpusError: Ids, or fields of a template, are asked for.
    """
    asked = fields.names if fields.template is not None else fields.names[1:]
    if asked:
        raise CorpusError(f"{name}: plain text has no field {asked[0]!r}, nor any other")
    for number, line in number_lines(file, name, cursor):
        try:
            yield line.removesuffix(b"\r\n").removesuffix(b"\n").decode(), ""
        except UnicodeDecodeError as error:
            yield BadRow(name, number, None, f"not UTF-8: {error.reason}")
