"""Limits of a corpus, checked while it is read, before it fills a memory or a disk."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from embedfarm.contract.records import Rows
from embedfarm.readers.items import CorpusError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a corpus may hold; 0 allows any number.

    Attributes:
        chunks_max: Rows, after documents were cut.
        bytes_max: Bytes that one compressed file unpacks to, and characters of text that are read.
        chunks_before: Rows that come before the place where reading begins.
    """

    chunks_max: int = 0
    bytes_max: int = 0
    chunks_before: int = 0


UNLIMITED: Final = Limits()


class Unpacked(io.RawIOBase):
    """A compressed file that is read up to a limit.

    Args:
        file: Stream that unpacks it.
        bytes_max: Most bytes that it may unpack to; 0 allows any number.
    """

    def __init__(self, file: Any, bytes_max: int) -> None:  # noqa: ANN401 -- Arrow's is untyped
        super().__init__()
        self._file = file
        self._bytes_max = bytes_max
        self._size = 0

    def readable(self) -> bool:
        """Tell that this file can be read."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 -- as its base
        """Read the next bytes into `buffer`, and return their number.

        Raises:
            OSError: The file is damaged, or too large.
        """
        count = int(self._file.readinto(buffer))
        self._size += count
        if 0 < self._bytes_max < self._size:
            raise OSError(f"it unpacks to more than corpus_bytes_max, {self._bytes_max:,} bytes")
        return count


def limit_rows(batches: Iterable[Rows], limits: Limits) -> Iterator[Rows]:
    """Yield the batches, as long as they are within the limits.

    Raises:
        CorpusError: The batches exceed a limit, which the message names.
    """
    chunks, characters = limits.chunks_before, 0
    for rows in batches:
        chunks += len(rows.texts)
        characters += sum(map(len, rows.texts))
        _check("chunks", chunks, "job_chunks_max", limits.chunks_max)
        _check("characters of text", characters, "corpus_bytes_max", limits.bytes_max)
        yield rows


def _check(what: str, count: int, name: str, most: int) -> None:
    if 0 < most < count:
        raise CorpusError(f"the corpus has more {what} than {name} allows, {most:,}")
