"""What a store has confirmed of an output: a durable line for each part of it."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Self

import msgspec

from embedfarm.collector.manifest import Part
from embedfarm.collector.output_directory import OutputBusy, locked
from embedfarm.collector.stores.address import StoreAddress
from embedfarm.collector.stores.store import StoreError
from embedfarm.contract.durable_files import replacing, sync

STORES_DIRECTORY: Final = "_stores"
JOURNAL_FILE: Final = "confirmed.jsonl"


class ExportHead(msgspec.Struct, kw_only=True):
    """First line: which export of which output the journal is of.

    Attributes:
        store: URL of the store, without secrets, for people.
        token: A random word, which the collection has in its mark for as long as nobody else has
            exported into it.
        job: Job of the output.
        exact: Whether the collection held, before, only rows that this export knows of.
        base: Directory of the output that the collection held before, and of which this one is a
            new version; "" where there is none.
        all_rows: Whether all rows are sent, and not only those that are not as in `base`.
        changes: SHA-256 of the list of changes since `base`; "" where there is none.
        failures: `Manifest.errors_sha256` of `base` as the collection holds it.
    """

    store: str
    token: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    job: str
    exact: bool
    base: str = ""
    all_rows: bool = True
    changes: str = ""
    failures: str = ""


class ConfirmedPart(msgspec.Struct, kw_only=True):
    """One line: a part whose rows the store has, as the output had them.

    Attributes:
        start: Index of the part's first chunk.
        sha256: `Part.sha256`: a retry of failed chunks changes it.
        texts: Digests of the texts and the ids, which a retry does not change.
    """

    start: int
    sha256: str
    texts: str


class ConfirmedWhole(msgspec.Struct, kw_only=True):
    """One line: the store has the whole output.

    Attributes:
        rows: Number of rows in the collection.
        exact: Whether the collection has these rows only.
    """

    rows: int
    exact: bool


class JournalEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of any kind.

    Attributes:
        left: Whether the store may have rows of a part that the output does not have any more.
    """

    head: ExportHead | None = None
    part: ConfirmedPart | None = None
    whole: ConfirmedWhole | None = None
    left: bool = False


class StoreJournal:
    """A journal of one output and one collection; a line is on the disk when `add` returns.

    A crash damages no more than the last line, which is then as if it had not been written: its
    part is sent again.

    Attributes:
        head: First line, or None while there is none.
        parts: Confirmed parts by their start.
        whole: What the last line says, if that is that all is confirmed.
        left: Whether the store may have rows of parts that are no more.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL_FILE
        self.head: ExportHead | None = None
        self.parts: dict[int, ConfirmedPart] = {}
        self.whole: ConfirmedWhole | None = None
        self.left = False
        if self._path.exists():
            self._read()

    @classmethod
    def of(cls, out: Path, address: StoreAddress) -> Self:
        """Return the journal of an output for a collection."""
        return cls(journal_directory(out, address))

    def _read(self) -> None:
        """Take what the lines say."""
        try:
            entries = [msgspec.json.decode(line, type=JournalEntry) for line in self._lines()]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(
                f"{self._path} is damaged: remove it, and all is sent again ({error})"
            ) from error
        for entry in entries:
            self._take(entry)

    def _take(self, entry: JournalEntry) -> None:
        self.whole = entry.whole
        if entry.head is not None:
            self.head, self.parts, self.left = entry.head, {}, False
        if entry.part is not None:
            self.parts[entry.part.start] = entry.part
        self.left |= entry.left

    def begin(self, head: ExportHead) -> None:
        """Begin anew with an export of which nothing is confirmed."""
        entry = JournalEntry(head=head)
        with replacing(self._path) as file:
            file.write(msgspec.json.encode(entry) + b"\n")
        self._take(entry)

    def renew(self) -> None:
        """Write the lines into a new file, since a sync of the old one may have failed."""
        if self.head is not None:
            lines = self._lines()
            with replacing(self._path) as file:
                file.writelines(lines)

    def _lines(self) -> list[bytes]:
        """Return the lines that have an end."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        return [line for line in lines if line.endswith(b"\n")]

    def add(self, entry: JournalEntry) -> None:
        """Add a line."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
            sync(file)
        self._take(entry)

    def remove(self) -> None:
        """Forget what was confirmed."""
        self._path.unlink(missing_ok=True)
        self.head, self.whole = None, None


def confirmed_part(part: Part) -> ConfirmedPart:
    """Return the line that says that a store has a part."""
    return ConfirmedPart(start=part.start, sha256=part.sha256, texts=part.rows_made_of)


def journal_directory(out: Path, address: StoreAddress) -> Path:
    """Return the directory with an output's journal for a collection.

    It is beside the parts, and not in the state directory, which goes when a job ends.
    """
    return out / STORES_DIRECTORY / address.digest


@contextmanager
def locked_journal(out: Path, address: StoreAddress) -> Iterator[StoreJournal]:
    """Keep other processes from exporting an output into a collection; yield its journal.

    Raises:
        StoreError: Another process exports this output into this collection.
    """
    directory = journal_directory(out, address)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(directory))
        except OutputBusy as error:
            raise StoreError(f"another command exports {out} to {address.shown}") from error
        journal = StoreJournal(directory)
        journal.renew()
        yield journal
