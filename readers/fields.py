"""Fields of a row that become its text and its id, and columns that stay beside them."""

import re
import string
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from embedfarm.readers.items import CorpusError

ALL: Final = "all"
"""Stands for every column, where columns to keep are named."""

_ESCAPES: Final = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}
_ESCAPED: Final = re.compile(r"\\[nt\\]")

ColumnQueue: TypeAlias = deque[Any]
"""Columns to keep of the rows that become chunks, in order, as `pyarrow.RecordBatch`.

Readers append them, so that nothing can go wrong on the side of whoever takes them meanwhile.
"""


@dataclass(frozen=True)
class Template:
    """A text made of fields of a row, such as "{title}: {body}".

    Attributes:
        fields: The fields, in the order in which they stand.
        between: What stands before, between and behind them: one piece more than fields.
    """

    fields: tuple[str, ...]
    between: tuple[str, ...]

    def fill(self, values: Sequence[str]) -> str:
        """Return the text of one row, whose fields have these values."""
        pieces = [self.between[0]]
        for value, behind in zip(values, self.between[1:], strict=True):
            pieces += value, behind
        return "".join(pieces)


def parse_template(template: str) -> Template:
    r"""Parse a template, in which a field stands in braces, and a brace is written twice.

    A line end may be written as \n, a tab as \t, and a backslash as \\.

    Raises:
        CorpusError: A brace stands alone, a field is nameless or has a conversion or format, or
            there is no field.
    """
    fields, between, text = [], [], ""
    try:
        for literal, field, form, conversion in string.Formatter().parse(template):
            text += _ESCAPED.sub(lambda found: _ESCAPES[found[0]], literal)
            if field is None:
                continue
            plain = not (form or conversion)
            fields.append(field if plain else "")
            between.append(text)
            text = ""
    except ValueError as error:
        raise CorpusError(f"{template!r} is no template of a text: {error}") from error
    if not all(fields):
        raise CorpusError(f"{template!r} is no template of a text: braces hold the name of a field")
    if not fields:
        raise CorpusError(f"{template!r} names no field: one stands in braces, such as {{title}}")
    return Template(tuple(fields), (*between, text))


class KeptField(NamedTuple):
    """A field of rows that are text, which becomes a column beside the vectors.

    Attributes:
        name: Its name, at the top of a row.
        type: Type of its values, by name.
        declared: Whether somebody said that it is of this type.
    """

    name: str
    type: str = "string"
    declared: bool = False


@dataclass(frozen=True)
class Fields:
    """What is taken of each row.

    Attributes:
        texts: Fields of the text: one, or those of `template`.
        id: Field of the id; None for rows without ids.
        template: What makes a text of several fields; None where the one field is the text.
        keep: Names of the columns to keep, or `ALL` alone.
        columns: Gets these columns; None where nobody wants them now.
        kept: The columns to keep where rows are text, of JSON or CSV, and have no types.
    """

    texts: tuple[str, ...]
    id: str | None
    template: Template | None = None
    keep: tuple[str, ...] = ()
    columns: ColumnQueue | None = None
    kept: tuple[KeptField, ...] = ()

    @property
    def names(self) -> list[str]:
        """The fields of the text and of the id, in this order."""
        return [*self.texts, *(() if self.id is None else (self.id,))]

    def row(self, values: Sequence[str]) -> tuple[str, str]:
        """Return text and id of a row whose `names` have these values."""
        text = values[0] if self.template is None else self.template.fill(values[: len(self.texts)])
        return text, "" if self.id is None else values[-1]

    @property
    def text_option(self) -> str:
        """The option by which the fields of the text are chosen."""
        return "--text-field" if self.template is None else "--text"

    def numbers_allowed(self, place: int) -> bool:
        """Tell whether one of `names` may hold a number, which becomes its digits."""
        return self.template is not None or place >= len(self.texts)
