"""What a finished output says about itself, and how its source is recognised again."""

import fcntl
import hashlib
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from embedfarm.collector.id_digests import RepeatedIds
from embedfarm.collector.text_digests import DIGESTS_FILE
from embedfarm.contract.canaries import Canaries
from embedfarm.contract.durable_files import ByteRange, replacing, sha256_of, sync_directory
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.formatting import HOUR
from embedfarm.contract.spending import Spent

VERSION: Final = 1
MANIFEST_FILE: Final = "_manifest.json"
ERRORS_FILE: Final = "_errors.jsonl"
SKIPPED_FILE: Final = "_skipped.jsonl"
IDS_FILE: Final = "ids.jsonl"
STATE_DIRECTORY: Final = ".embedfarm"
DECIDED: Final = f"{STATE_DIRECTORY}/decided"
CHANGES_FILE: Final = "_changes.parquet"
SAMPLE_FILE: Final = "_sample.parquet"
OWN: Final = "."  # what `Manifest.reused` calls the output itself
# Size of each checksum in `Result.checksums`.
CHECKSUM_BYTES: Final = 4


class OutputError(EmbedfarmError, ValueError):
    """Base of all errors about an output; the message is for people."""

    exit_status = 2


class ManifestError(OutputError):
    """Raised when a manifest or error list is absent, damaged or of another version."""


class TilingError(OutputError):
    """Raised when parts do not cover every chunk exactly once."""


class Layout(msgspec.Struct, frozen=True):
    """What every row of an output has in common.

    Attributes:
        dimensions: Components per vector; for sign bits the bytes, of eight bits each.
        dtype: "float32", "float16", "int8" or "uint8" (sign bits).
        ids: Whether the chunks carry identifiers of the caller's.
    """

    dimensions: int
    dtype: str
    ids: bool

    @property
    def row_bytes(self) -> int:
        """Size of one vector in bytes."""
        return self.dimensions * np.dtype(self.dtype).itemsize


class Written(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where the rows of a part are.

    Attributes:
        file: Name of the file in the output directory.
        offset_bytes: Where the part begins in `file`; not 0 only where parts share a file (npy).
        bytes: Size of the part in `file`.
        ids_offset_bytes: Where the part's lines begin in ids.jsonl (npy).
        ids_bytes: Size of the part's lines in ids.jsonl; 0 where ids are in `file` or absent.
        sha256: SHA-256 of the part in `file`, followed by its lines in ids.jsonl.
        linked: Directory of the output whose file it was as well when it was written; "" for none.
        stored_bytes: Size of the vectors that `file` only lists, where they are stored.
    """

    file: str
    offset_bytes: int = 0
    bytes: int
    ids_offset_bytes: int = 0
    ids_bytes: int = 0
    sha256: str
    linked: str = ""
    stored_bytes: int = 0

    def spans(self, directory: Path) -> list[ByteRange]:
        """Return the spans of bytes that `sha256` is computed over."""
        spans = [ByteRange(directory / self.file, self.offset_bytes, self.bytes)]
        if self.ids_bytes:
            spans.append(ByteRange(directory / IDS_FILE, self.ids_offset_bytes, self.ids_bytes))
        return spans


class Part(Written, kw_only=True):
    """Consecutive chunks that were written, and survive a crash, together.

    Attributes:
        start: Index of the first chunk.
        count: Number of chunks, the failed ones included.
        rows: Number of vectors: `count - errors`.
        errors: Number of chunks that failed.
        tokens: Tokens of the texts, as the model counts.
        texts_sha256: SHA-256 over the checksums of the chunks in order (`Result.checksums`).
        names_sha256: SHA-256 over the ids of the chunks in order, each with a zero byte behind it;
            "" where they have none.
    """

    start: int
    count: int
    rows: int
    errors: int
    tokens: int
    texts_sha256: str
    names_sha256: str = ""

    @property
    def end(self) -> int:
        """Index after the last chunk."""
        return self.start + self.count

    @property
    def rows_made_of(self) -> str:
        """Count and checksums of its texts and ids, which a retry does not change."""
        return f"{self.count} {self.texts_sha256} {self.names_sha256}"


def check_bytes(directory: Path, part: Part) -> None:
    """Refuse a part of a finished output in `directory` that is not as it was written.

    What makes a lasting copy of vectors asks this first: the copy has checksums of its own, which
    would call the damage whole.

    Raises:
        OutputError: The part has other bytes than were written.
        OSError: A file cannot be read.
    """
    if sha256_of(part.spans(directory)) != part.sha256:
        raise OutputError(f"{directory / part.file} has other bytes than were written")


class Failure(msgspec.Struct, kw_only=True):
    """One line of _errors.jsonl: a chunk that was given up on."""

    index: int
    id: str | None = None
    reason: str
    attempts: int


class WorkerFigures(msgspec.Struct):
    """What one worker did for an output; seconds are its devices', and the cost is theirs."""

    chunks: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cost: float = 0.0

    def __add__(self, other: "WorkerFigures") -> "WorkerFigures":
        return WorkerFigures(
            self.chunks + other.chunks,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.cost + other.cost,
        )


def library_versions() -> dict[str, str]:
    """Return the versions of Python and the libraries that decide about an output's bytes."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyarrow": pa.__version__,
    }


class Changes(msgspec.Struct, frozen=True):
    """How many chunks of an output are not what they were in another one, by their ids.

    Attributes:
        since: Directory of the other output.
        added: Chunks whose id it does not have.
        changed: Chunks whose text was another one.
        moved: Chunks with the same text that have another index.
        removed: Chunks of the other output whose id is no more.
        sha256: SHA-256 of the list.
        since_rows: `Manifest.rows_sha256` of the other output, whose directory may have another one
            by now; "" in manifests of earlier versions.
    """

    since: str
    added: int
    changed: int
    moved: int
    removed: int
    sha256: str
    since_rows: str = ""


class SampleList(msgspec.Struct, frozen=True):
    """List of a few texts of an output beside their vectors (`embedfarm.collector.text_sample`).

    Attributes:
        texts: How many.
        sha256: SHA-256 of the list.
    """

    texts: int
    sha256: str


class About(msgspec.Struct, kw_only=True):
    """What only the caller knows about an output.

    Attributes:
        job: Identifier of the job.
        model: Name of the model, as the user wrote it.
        fingerprint: Fingerprint of the model, by component.
        source: Description of the corpus. "compared" in it says who has compared all texts with it,
            and when; without that nobody has.
        skipped: Number of rows of the source that became no chunk.
        settings: Whatever else decided about the vectors.
        load_seconds: Time until the model was loaded.
        embed_seconds: Time from the first block to the last result.
        embedded: Unix time of the last result, by the server's clock.
        created: Unix time when this was made.
        versions: Versions of Python and the libraries, by name.
        accounts: What each worker's device did in the run that finished the output, by name:
            engine, padding, where time went, share of the peak, and a sample of its vectors beside
            float32 (`embedfarm.contract.usage`).
        estimate: What the job was estimated to take before it ran, as `contract.spending.Estimate`
            has it; empty if nobody asked.
        changes: How the chunks differ from those of the first output that was reused, by their ids;
            None where one of the two has none.
        canaries: What the model makes of fixed texts, by which it is known again; None where no
            worker said so, as with an earlier version.
        sample: Some texts of the output, with their vectors; None where there are none.
    """

    job: str
    model: str
    fingerprint: dict[str, str]
    source: dict[str, Any]
    skipped: int = 0
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    load_seconds: float = 0.0
    embed_seconds: float = 0.0
    embedded: float = 0.0
    created: float = msgspec.field(default_factory=time.time)
    versions: dict[str, str] = msgspec.field(default_factory=library_versions)
    accounts: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    changes: Changes | None = None
    estimate: dict[str, float] = msgspec.field(default_factory=dict)
    canaries: Canaries | None = None
    sample: SampleList | None = None


class Manifest(About, kw_only=True):
    """_manifest.json: an output that has one is complete.

    Attributes:
        version: Version of the layout of _manifest.json.
        format: Name of the sink.
        dimensions: Components per vector; for sign bits the bytes, of eight bits each.
        dtype: "float32", "float16", "int8" or "uint8" (sign bits).
        ids: Whether the identifiers of the chunks are stored.
        count: Number of chunks: 0 to `count - 1` are each in a part or in _errors.jsonl.
        failed: Number of chunks in _errors.jsonl.
        tokens: Tokens of the texts that were embedded for it, as the model counts.
        errors_sha256: SHA-256 of _errors.jsonl, "" when no chunk failed.
        digests_sha256: SHA-256 of _digests.bin, which has 16 bytes for each chunk in order
            (`embedfarm.collector.text_digests`); "" where the digest of a text is not known.
        parts: Parts in order; they tile the chunks.
        workers: What each worker did, by name.
        repeated_ids: Chunks whose id an earlier chunk has; None where there are none, or that is
            not known.
        reused: How many vectors were not made for this output: by directory those of other
            outputs, and under `OWN` those of texts that an earlier row of the corpus has.
        manifest_sha256: SHA-256 of all the rest: of the manifest without this, as JSON with names
            in order and no white space (`checksum`); "" in manifests of earlier versions.
    """

    version: int = VERSION
    format: str
    dimensions: int
    dtype: str
    ids: bool
    count: int
    failed: int
    tokens: int
    errors_sha256: str
    parts: list[Part]
    workers: dict[str, WorkerFigures]
    repeated_ids: RepeatedIds | None = None
    digests_sha256: str = ""
    reused: dict[str, int] = msgspec.field(default_factory=dict)
    manifest_sha256: str = ""

    @property
    def spent(self) -> Spent:
        """Devices' time that its results took, in all runs, and what that cost."""
        figures = self.workers.values()
        seconds = sum(each.seconds for each in figures)
        return Spent(seconds / HOUR, sum(each.cost for each in figures))

    @property
    def lists(self) -> dict[str, str]:
        """The SHA-256 of each list beside the parts and the failed chunks, by its name."""
        changes = "" if self.changes is None else self.changes.sha256
        sample = "" if self.sample is None else self.sample.sha256
        sums = {
            DIGESTS_FILE: self.digests_sha256, CHANGES_FILE: changes, SAMPLE_FILE: sample,
        }  # fmt: skip
        return {name: sha256 for name, sha256 in sums.items() if sha256}

    @property
    def rows_sha256(self) -> str:
        """SHA-256 over the parts' `rows_made_of`, one on each line."""
        rows = "\n".join(part.rows_made_of for part in self.parts)
        return hashlib.sha256(rows.encode()).hexdigest()

    @property
    def layout(self) -> Layout:
        """What every row of the output has in common."""
        return Layout(self.dimensions, self.dtype, self.ids)


def find_listing(directory: Path, name: str) -> Path:
    """Return the path of a manifest, or of a list of failed or skipped rows; it need not exist.

    Names begin with `_` so that programs which read all files of a directory leave these out. An
    older output has them without.
    """
    older = directory / name.removeprefix("_")
    return older if older.exists() and not (directory / name).exists() else directory / name


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """Put `_manifest.json` in `directory`, whole and durably; return it with its checksum."""
    sealed = msgspec.structs.replace(manifest, manifest_sha256="")
    sealed.manifest_sha256 = checksum(msgspec.to_builtins(sealed))
    with replacing(directory / MANIFEST_FILE) as file:
        file.write(msgspec.json.format(msgspec.json.encode(sealed)) + b"\n")
    return sealed


def checksum(facts: dict[str, Any]) -> str:
    """Return the checksum of a manifest: it depends on what it says, and not on its layout.

    Args:
        facts: The manifest, as decoded from JSON.
    """
    said = {name: value for name, value in facts.items() if name != "manifest_sha256"}
    return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a finished output.

    A change of the output that was decided and then interrupted is completed first.

    Raises:
        ManifestError: The manifest is absent, damaged or of another version.
    """
    settle(directory)
    return _read_manifest(find_listing(directory, MANIFEST_FILE))


def settle(directory: Path) -> None:
    """Put the files of `DECIDED` in their places in `directory`, or go on with doing that.

    `DECIDED` appears at once, with all files that change and the manifest that lists them, so that
    an output is the old one before and, for all that read it by its manifest, the new one
    from then on. The manifest comes last; it tells whether an error list is still wanted.

    Raises:
        ManifestError: The manifest that was decided on is damaged.
        OSError: The disk refuses.
    """
    decided = directory / DECIDED
    if not decided.exists():
        return
    with (decided.parent / "settle").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for place in (decided, directory):
            for name in (MANIFEST_FILE, ERRORS_FILE):
                if (older := find_listing(place, name)) != place / name:
                    older.replace(place / name)
        if (decided / MANIFEST_FILE).exists():
            for path in decided.iterdir():
                if path.name != MANIFEST_FILE:
                    path.replace(directory / path.name)
            if not _read_manifest(decided / MANIFEST_FILE).errors_sha256:
                (directory / ERRORS_FILE).unlink(missing_ok=True)
            sync_directory(directory)
            (decided / MANIFEST_FILE).replace(directory / MANIFEST_FILE)
            sync_directory(directory)
        shutil.rmtree(decided, ignore_errors=True)


def _read_manifest(path: Path) -> Manifest:
    try:
        data = path.read_bytes()
        manifest = msgspec.json.decode(data, type=Manifest)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ManifestError(f"{path} does not exist: no finished output is here") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} is damaged: {error}") from error
    if manifest.version != VERSION:
        raise ManifestError(
            f"{path} is of version {manifest.version}; this program reads {VERSION}"
        )
    if manifest.manifest_sha256 not in ("", checksum(msgspec.json.decode(data))):
        raise ManifestError(
            f"{path} is damaged, or was changed by hand: its own checksum is that of another"
        )
    return manifest


def read_failures(directory: Path) -> Iterator[Failure]:
    """Yield the lines of _errors.jsonl in their order; none when there is no such file.

    Raises:
        ManifestError: A line is damaged; the message has its number.
    """
    path = find_listing(directory, ERRORS_FILE)
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(Failure)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ManifestError(f"{path}, line {number} is damaged: {error}") from error


def tile(parts: Iterable[Part], count: int) -> None:
    """Check that the parts, in their order, cover 0 to `count - 1` without gap or overlap.

    Raises:
        TilingError: The message names the first chunks that are missing or double.
    """
    bounds = [(0, 0), *((part.start, part.end) for part in parts), (count, count)]
    for (_, end), (start, _) in pairwise(bounds):
        if start > end:
            raise TilingError(f"chunks {end} to {start - 1} are in no part")
        if start < count and start < end:
            raise TilingError(f"chunks {start} to {end - 1} are in more than one part")
        if start < end:
            raise TilingError(f"the parts go on to chunk {end - 1}, but there are only {count}")
