"""Items that a reader yields row by row, and errors of a row or a corpus."""

from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

from embedfarm.contract.errors import EmbedfarmError


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot become a chunk.

    Attributes:
        file: The file, as the user named it or as the directory lists it.
        line: Physical line on which the row begins, from 1; for Parquet the row; None where the
            whole file is at fault.
        field: The field at fault, None where the row as a whole is.
        reason: What is wrong with it.
    """

    file: str
    line: int | None
    field: str | None
    reason: str

    def __str__(self) -> str:
        line = "" if self.line is None else f" line {self.line}"
        field = "" if self.field is None else f", field {self.field!r}"
        return f"{self.file}{line}{field}: {self.reason}"


ANOTHER: Final = "; a file of another encoding is read with that, as by --encoding cp1252"

Row: TypeAlias = tuple[str, str]
"""A text and its id; the id is "" where the source has none."""

Item: TypeAlias = Row | BadRow


class CorpusError(EmbedfarmError, ValueError):
    """Raised when a corpus cannot be read on; the message names the file and what is wrong.

    Attributes:
        bad_row: The row that stopped the reading, None where no single row did.
    """

    exit_status = 2

    def __init__(self, message: str, bad_row: BadRow | None = None) -> None:
        super().__init__(message)
        self.bad_row = bad_row


def fail_on_bad_row(bad_row: BadRow) -> NoReturn:
    """Stop at the first bad row.

    Raises:
        CorpusError: Always; it reads like "corpus.jsonl line 7, field 'text': missing".
    """
    hint = ANOTHER if bad_row.reason.startswith("not UTF-8") else ""
    raise CorpusError(f"{bad_row}{hint}", bad_row)


def is_unicode(text: str) -> bool:
    """Tell whether `text` can be written as UTF-8: it holds no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
