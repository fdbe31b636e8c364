"""Where texts lie in the files of a corpus."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from embedfarm.contract.encoding import Count, Record


class RowRun(NamedTuple):
    """Rows of one file that follow one another, without a bad one between them.

    Attributes:
        file: Number of the file in the corpus.
        offset: Bytes, or rows of Parquet and Arrow, of the file that come before the first.
    """

    file: int
    offset: int


class Places(NamedTuple):
    """Where rows lie in the files of a corpus.

    Attributes:
        runs: For each row the run that it is in.
        begins: For each row the offset in its file, as in `RowRun`, before it.
        ends: For each row the offset behind it.
    """

    runs: Sequence[RowRun] = ()
    begins: Sequence[int] = ()
    ends: Sequence[int] = ()

    def piece(self, first: int, end: int) -> "Places":
        """Return the places of rows `first` to `end - 1`, counted from 0."""
        return Places(self.runs[first:end], self.begins[first:end], self.ends[first:end])


UNPLACED: Final = Places()


class SourceReference(Record):
    """Where in a source the texts of a block are; they are read as a run reads them.

    Attributes:
        file: Absolute path or URL of the file, which workers open by the same name.
        format: Name of its format: jsonl, parquet or arrow.
        text_field: Column or key of the text.
        template: Text made of several fields, in place of that of one field; "" for none.
        offset: Bytes, or rows of Parquet and Arrow, of the file that come before them.
        length: Bytes, or rows of Parquet and Arrow, that they take there.
        rows: Number of rows, none of which is bad.
        checksum: CRC-32 of the `text_checksums` of those of them that are to be embedded.
    """

    file: str
    format: str
    text_field: str
    template: str = ""
    offset: Count = 0
    length: Count = 0
    rows: Count = 0
    checksum: Count = 0
