"""The beginning of a corpus, by which all of it is estimated where nobody waits for more."""

import io
from pathlib import Path
from typing import Final, NamedTuple

from embedfarm.readers import BadRow, CorpusError, CorpusOptions, read_corpus
from embedfarm.readers.recoded import UTF_8, canonical

BEGINNING_BYTES: Final = 1 << 19
LINE_FORMATS: Final = ("jsonl", "csv", "tsv", "txt")


class CorpusBeginning(NamedTuple):
    """Chunks at the beginning of a corpus.

    Attributes:
        texts: The chunks.
        chunks: Chunks of the whole corpus; they are estimated where not all of it was read.
        read_ratio: Share of the corpus that was read, 1 for all of it.
    """

    texts: list[str]
    chunks: int
    read_ratio: float


def read_beginning(
    path: Path, options: CorpusOptions, whole_bytes: int = 0, chunks: int = 0
) -> CorpusBeginning:
    """Read the first half mebibyte of a file of lines, whatever comes behind.

    Args:
        path: A file, which may be the beginning of a larger one.
        options: How it is read, with one of `LINE_FORMATS`.
        whole_bytes: Bytes of the larger file; 0 if the file is all of it.
        chunks: Chunks of the larger file, where somebody knows; 0 to go by the bytes.

    Raises:
        CorpusError: The file is of another format, or there is no good row in its beginning.
    """
    if options.format not in LINE_FORMATS:
        raise CorpusError(
            f"{options.format or 'this'} is not estimated by its beginning: send some of its texts,"
            " and in chunks how many it has"
        )
    if not path.is_file():  # to open a pipe could take for ever
        raise CorpusError("it is no file")
    with path.open("rb") as file:
        data = file.read(BEGINNING_BYTES)
    size = max(whole_bytes, path.stat().st_size)
    cut = data.rfind(b"\n") + 1
    if len(data) < size and cut and canonical(options.encoding) == UTF_8:
        data = data[:cut]
    texts = _read(data, options, whole=len(data) == size)
    total = max(len(texts), chunks or round(len(texts) * size / len(data)))
    return CorpusBeginning(texts, total, len(texts) / total)


def _read(data: bytes, options: CorpusOptions, *, whole: bool) -> list[str]:
    """Return the texts of good rows; a beginning may end within a row.

    Raises:
        CorpusError: There is no good row, or the whole file is damaged.
    """
    texts: list[str] = []
    bad: list[BadRow] = []
    try:
        for rows in read_corpus(["-"], options, bad.append, io.BytesIO(data)):
            texts += rows.texts
    except CorpusError:
        if whole or not texts:
            raise
    if not texts:
        raise CorpusError(str(bad[0]) if bad else "there is no row in it")
    return texts
