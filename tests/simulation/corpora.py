"""Corpora that their users change, between runs and while a run reads them.

A corpus remembers each state that it was in, so that an output can be compared with what its
source has held, and not with what the farm says about it.
"""

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from tests.simulation.world import EPOCH_SECONDS

NANOSECONDS: Final = 1_000_000_000
WORDS: Final = ("a", "vector", "for", "each", "text", "no", "index", "lost", "or", "doubled")
BAD_LINES: Final = ('{"text": 7}', '{"text": "torn', "not JSON")
GROWN_ROWS_MAX: Final = 5

Row: TypeAlias = str | None
"""A text, or None for a row that nobody can read."""


class Version(NamedTuple):
    """The rows that a corpus holds from a moment on."""

    since: float
    rows: Sequence[Row]

    @property
    def texts(self) -> list[str]:
        """The rows that can be embedded, in order."""
        return [row for row in self.rows if row is not None]


@dataclass
class Corpus:
    """A corpus of one or more files, which remembers all that it has held.

    Attributes:
        files: Its files, in the order in which they are read.
        clock: Returns the virtual time in seconds.
        random: Decides what is written; used by this corpus only, so that edits do not depend on
            who makes them.
        versions: All versions of the corpus, the oldest first.
    """

    files: Sequence[Path]
    clock: Callable[[], float]
    random: random.Random
    versions: list[Version] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    @property
    def rows(self) -> list[Row]:
        """The rows that the corpus holds now."""
        return list(self.versions[-1].rows)

    @property
    def is_bad(self) -> bool:
        """Whether a row of the corpus cannot be read."""
        return None in self.versions[-1].rows

    def since(self, moment: float) -> list[Version]:
        """Return the versions that the corpus has held at a moment or later, the newest first."""
        after = [each for each in self.versions if each.since > moment]
        before = [each for each in self.versions if each.since <= moment][-1:]
        return list(reversed(before + after))

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows into the files, about as many into each."""
        self.versions.append(Version(self.clock(), tuple(rows)))
        size = -(-len(rows) // len(self.files)) or 1
        for number, path in enumerate(self.files):
            some = rows[number * size : (number + 1) * size]
            self._write_file(path, "".join(map(self._line, some)))

    def _write_file(self, path: Path, content: str) -> None:
        """Write a file in place, or replace it by a new one; its mtime is the virtual time."""
        if path.exists() and path.read_text(encoding="utf-8") == content:
            return
        place = path if self.random.random() < 0.5 else path.with_suffix(".new")
        place.write_text(content, encoding="utf-8")
        seconds = EPOCH_SECONDS + self.clock()
        changed = int(seconds * NANOSECONDS) + len(self.versions)
        os.utime(place, ns=(changed, changed))
        place.replace(path)

    def _line(self, row: Row) -> str:
        """Return a row as a line of JSON; for None, a line that cannot be read."""
        if row is None:
            return self.random.choice(BAD_LINES) + "\n"
        return json.dumps({"text": row}) + "\n"

    def make_texts(self, count: int) -> list[str]:
        """Return texts that no other row of any corpus has."""
        some = self.random
        name = self.files[0].stem
        return [
            f"{name} {next(self._serial)} " + " ".join(some.choices(WORDS, k=some.randint(0, 9)))
            for _ in range(count)
        ]

    # What users do to it.

    def grow(self) -> None:
        """Add rows behind the others."""
        self.write([*self.rows, *self.make_texts(self.random.randint(1, GROWN_ROWS_MAX))])

    def lose(self) -> None:
        """Remove one row, or all rows from one on; at least one row stays."""
        rows = self.rows
        first = self.random.randrange(len(rows))
        last = self.random.choice([first + 1, len(rows)])
        self.write(rows[:first] + rows[last:] or rows[:1])

    def insert(self) -> None:
        """Insert rows in front of the others, or between them."""
        rows = self.rows
        place = self.random.choice([0, self.random.randrange(len(rows))])
        rows[place:place] = self.make_texts(self.random.randint(1, GROWN_ROWS_MAX))
        self.write(rows)

    def swap(self) -> None:
        """Let two rows change places."""
        rows = self.rows
        one, other = (self.random.randrange(len(rows)) for _ in range(2))
        rows[one], rows[other] = rows[other], rows[one]
        self.write(rows)

    def reorder(self) -> None:
        """Shuffle all rows."""
        rows = self.rows
        self.random.shuffle(rows)
        self.write(rows)

    def change(self) -> None:
        """Give a row another text."""
        rows = self.rows
        rows[self.random.randrange(len(rows))] = self.make_texts(1)[0]
        self.write(rows)

    def spoil(self) -> None:
        """Make a row, most often one of the last, unreadable, or insert one that is."""
        rows = self.rows
        earliest = self.random.choice([0, len(rows) * 3 // 4, len(rows) - 1])
        place = self.random.randrange(earliest, len(rows))
        rows[place : place + self.random.choice([0, 1, 1])] = [None]
        self.write(rows)

    def mend(self) -> None:
        """Give the rows that cannot be read a text, or remove them."""
        dropped = self.random.random() < 0.5
        rows = [row or self.make_texts(1)[0] for row in self.rows if row is not None or not dropped]
        self.write(rows or self.make_texts(1))

    def restore(self, version: Version) -> None:
        """Write the rows of an earlier version again."""
        self.write(version.rows)
