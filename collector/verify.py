"""Checks that an output holds what its manifest says, and comes from the source it names."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.manifest import (
    CHECKSUM_BYTES,
    ERRORS_FILE,
    MANIFEST_FILE,
    Layout,
    Manifest,
    OutputError,
    Part,
    TilingError,
    find_listing,
    read_failures,
    read_manifest,
    tile,
)
from embedfarm.collector.output_directory import list_output_files
from embedfarm.collector.sinks import PartError, Sink, Vectors, open_sink
from embedfarm.contract.durable_files import sha256_of, whole
from embedfarm.contract.records import Rows, text_checksums


@dataclass(frozen=True)
class OutputProblem:
    """Something an output should not have.

    Attributes:
        file: Name of the file in the output directory.
        sentence: What is wrong with the file.
    """

    file: str
    sentence: str


def verify(directory: Path, against: Iterator[Rows] | None = None) -> list[OutputProblem]:
    """Return all problems of an output; none when it is as it was when it was finished.

    Args:
        directory: A finished output.
        against: The rows of the source, in batches of any size, to compare texts and ids with.
    """
    try:
        manifest = read_manifest(directory)
        sink = open_sink(manifest.format, directory)
    except ValueError as error:
        return [OutputProblem(MANIFEST_FILE, str(error))]
    problems = [
        *_check_totals(manifest),
        *_check_files(directory, manifest),
        *_check_lists(directory, manifest),
    ]
    try:
        failed = _read_failed(directory, manifest)
    except OutputError as error:
        failed = np.empty(0, dtype=np.int64)
        problems.append(OutputProblem(ERRORS_FILE, str(error)))
    source = None if against is None else _Source(against)
    for part in manifest.parts:
        expected = _expect(part, failed, source)
        problems += _check_part(directory, sink, manifest.layout, part, expected)
    if source is not None and (count := source.count_all()) != manifest.count:
        sentence = f"counts {manifest.count} chunks, the source has {count} rows"
        problems.append(OutputProblem(MANIFEST_FILE, sentence))
    # Parts that share a file all miss it when it is gone.
    return list(dict.fromkeys(problems))


def comparison(manifest: Manifest) -> dict[str, Any] | None:
    """Return who compared all texts with the source, when, and how many; None if nobody did."""
    compared = manifest.source.get("compared")
    return compared if isinstance(compared, dict) else None


def describe_comparison(compared: dict[str, Any] | None, *, against: bool) -> str:
    """Describe for people whether an output's texts were compared with its source.

    Args:
        compared: What `comparison` says.
        against: Whether the texts were compared just now.
    """
    if against:
        return "its texts are those of the source"
    if compared is None:
        return "its texts were never compared with their source; verify --against CORPUS does that"
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(compared["at"]))
    who = f"{compared['by']}, {day} UTC"
    return f"its {compared['rows']:,} texts were compared with their source by {who}"


class _Expected(NamedTuple):
    """Rows that a part should hold, by its manifest and its source.

    Attributes:
        indices: Indices of the part's chunks that did not fail.
        texts_sha256: SHA-256 over the checksums of the source's rows, "" when there is no source
            to compare with.
        ids: Ids of the chunks that did not fail, None when there is no source to compare with or
            it has none.
    """

    indices: NDArray[np.int64]
    texts_sha256: str
    ids: list[str] | None


class _Source:
    """The rows of a source, a part at a time."""

    def __init__(self, batches: Iterator[Rows]) -> None:
        self._batches = batches
        self._count = 0
        self._checksums = bytearray()
        self._ids: list[str] = []

    def take(self, count: int) -> tuple[bytes, list[str]]:
        """Return checksums and ids of the next `count` rows, fewer at the end of the source."""
        size = count * CHECKSUM_BYTES
        while len(self._checksums) < size and self._fetch():
            pass
        rows = bytes(self._checksums[:size]), self._ids[:count]
        del self._checksums[:size], self._ids[:count]
        return rows

    def count_all(self) -> int:
        """Return the number of rows in the source; what was not taken is read and dropped."""
        while self._fetch():
            self._checksums.clear()
            self._ids.clear()
        return self._count

    def _fetch(self) -> bool:
        """Read a batch, and tell whether there was one."""
        batch = next(self._batches, None)
        if batch is None:
            return False
        self._count += len(batch.texts)
        self._checksums += text_checksums(batch.texts)
        self._ids += batch.ids or ()
        return True


def _check_totals(manifest: Manifest) -> Iterator[OutputProblem]:
    """Check that the parts tile the chunks and add up."""
    try:
        tile(manifest.parts, manifest.count)
    except TilingError as error:
        yield OutputProblem(MANIFEST_FILE, str(error))
    failed = sum(part.errors for part in manifest.parts)
    if failed != manifest.failed:
        yield OutputProblem(
            MANIFEST_FILE, f"counts {manifest.failed} failed chunks, its parts {failed}"
        )
    for part in manifest.parts:
        if part.rows + part.errors != part.count:
            yield _problem(part, f"does not add up: {part.rows} and {part.errors} failed")


def _check_files(directory: Path, manifest: Manifest) -> Iterator[OutputProblem]:
    """Check that files have the size their parts make up, and that each is listed."""
    spans = [span for part in manifest.parts for span in part.spans(directory)]
    errors = find_listing(directory, ERRORS_FILE).name
    ends = {span.path.name: span.offset + span.bytes for span in spans}
    for name in list_output_files(directory):
        size = (directory / name).stat().st_size
        listed = name in {*ends, errors, *manifest.lists}
        if not listed:
            yield OutputProblem(name, "is not listed in the manifest")
        elif size != ends.get(name, size):
            yield OutputProblem(name, f"has {size} bytes instead of {ends[name]}")


def _check_lists(directory: Path, manifest: Manifest) -> Iterator[OutputProblem]:
    """Check that the digests of the texts, and the list of changes, are as they were written."""
    for name, sha256 in manifest.lists.items():
        path = directory / name
        if not path.exists():
            yield OutputProblem(name, "is missing")
        elif sha256_of([whole(path)]) != sha256:
            yield OutputProblem(name, "has other bytes than were written")


def _read_failed(directory: Path, manifest: Manifest) -> NDArray[np.int64]:
    """Read the chunks that _errors.jsonl lists, which has to be the file that was written."""
    path = find_listing(directory, ERRORS_FILE)
    sha256 = sha256_of([whole(path)]) if path.exists() else ""
    if sha256 != manifest.errors_sha256:
        raise OutputError("is not the error list that was written" if sha256 else "is missing")
    failed = np.fromiter((line.index for line in read_failures(directory)), dtype=np.int64)
    if len(failed) != manifest.failed:
        raise OutputError(f"lists {len(failed)} chunks, the manifest {manifest.failed}")
    return failed


def _expect(part: Part, failed: NDArray[np.int64], source: _Source | None) -> _Expected:
    """Return the rows that a part should hold, and take them from the source."""
    indices = np.setdiff1d(np.arange(part.start, part.end, dtype=np.int64), failed)
    if source is None:
        return _Expected(indices, "", None)
    checksums, ids = source.take(part.count)
    rows = indices - part.start
    good = [ids[row] for row in rows[rows < len(ids)]] if ids else None
    return _Expected(indices, hashlib.sha256(checksums).hexdigest(), good)


def _check_part(
    directory: Path, sink: Sink, layout: Layout, part: Part, expected: _Expected
) -> Iterator[OutputProblem]:
    """Check that a part is undamaged, and holds what is expected."""
    if expected.texts_sha256 not in ("", part.texts_sha256):
        yield _problem(part, "was made from other texts than the source has there")
    try:
        vectors = _read(directory, sink, layout, part)
    except FileNotFoundError as error:
        yield OutputProblem(Path(error.filename).name, "is missing")
    except (OSError, PartError) as error:
        yield _problem(part, str(error))
    else:
        yield from (_problem(part, sentence) for sentence in _check_vectors(vectors, expected))


def _read(directory: Path, sink: Sink, layout: Layout, part: Part) -> Vectors:
    """Read the rows of a part; damaged bytes are not even parsed."""
    if sha256_of(part.spans(directory)) != part.sha256:
        raise PartError("has other bytes than were written")
    return sink.read(part, layout)


def _check_vectors(vectors: Vectors, expected: _Expected) -> Iterator[str]:
    """Check that the right chunks are there in order, with the right ids and sound vectors."""
    for index in np.setdiff1d(expected.indices, vectors.indices)[:1]:
        yield f"misses chunk {index}, which {ERRORS_FILE} does not list"
    for index in np.setdiff1d(vectors.indices, expected.indices)[:1]:
        yield f"has a vector of chunk {index}, which does not belong there"
    if (np.diff(vectors.indices) <= 0).any():
        yield "has its chunks out of order"
    if vectors.matrix.dtype.kind == "f":
        yield from _check_floats(vectors)
    if expected.texts_sha256 and vectors.ids != expected.ids:
        yield "has other ids than the source has there"


def _check_floats(vectors: Vectors) -> Iterator[str]:
    """Check that vectors of floats are finite and not zero."""
    for index in vectors.indices[~np.isfinite(vectors.matrix).all(axis=1)][:1]:
        yield f"has a vector that is not finite, the first for chunk {index}"
    for index in vectors.indices[~vectors.matrix.any(axis=1)][:1]:
        yield f"has a vector that is zero, the first for chunk {index}"


def _problem(part: Part, sentence: str) -> OutputProblem:
    """Return a problem of one part, with its chunks named in the sentence."""
    return OutputProblem(part.file, f"chunks {part.start} to {part.end - 1}: {sentence}")
