"""Vectors that are there already, found by the texts that they were made of.

They are those of finished outputs, and those of the rows of a corpus that come before in it.
"""

import hashlib
import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.digest_index import NOWHERE, DigestIndex
from embedfarm.collector.manifest import (
    OWN,
    Manifest,
    OutputError,
    Part,
    read_failures,
)
from embedfarm.collector.output import Output
from embedfarm.collector.output_reader import OutputReader
from embedfarm.collector.text_digests import DIGEST_BYTES, DIGESTS_FILE
from embedfarm.contract.durable_files import read_pieces, whole
from embedfarm.contract.records import ChunkError, Result

OUTPUT: Final = 1 << 40  # places of one output; the next output has the next so many

Matrix = NDArray[Any]
Span = TypeVar("Span", Part, Result)


class Known(NamedTuple):
    """A finished output whose vectors are known.

    Attributes:
        directory: Its directory.
        manifest: Its manifest.
    """

    directory: Path
    manifest: Manifest


class FilledResult(NamedTuple):
    """A result with the vectors of all its chunks.

    Attributes:
        result: The result.
        reused: How many of its vectors were known, by the output that had them.
    """

    result: Result
    reused: Mapping[str, int]


class KnownVectors:
    """Vectors by the texts that they were made of, in other outputs and in the own one so far.

    Memory holds some parts of the outputs; one that is wanted again later is put on the disk as it
    is in memory, so that each part is decoded twice at most, in whatever order texts come.

    One thread may ask what is known while another one fills results.

    Args:
        directory: A directory for the index and for such parts; whatever is in it goes.
        bytes_max: Bytes of vectors in memory at a time; one part more than fit.
        own: Directory of the output that is written.
        outputs: Other outputs; of a text that several have the first one's vector is taken, and
            chunks that failed are not known.

    Raises:
        OutputError: An output has other digests than were written.
    """

    def __init__(
        self, directory: Path, bytes_max: int, own: Path, outputs: Sequence[Known]
    ) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self.outputs = outputs
        self._directory, self._bytes_max = directory, bytes_max
        self._own_digests = own / DIGESTS_FILE
        self._index = _make_index(directory / "others")
        self._own = _make_index(directory / "own")
        self._decoded: OrderedDict[tuple[int, int], Matrix] = OrderedDict()
        self._bytes = 0
        self._seen: set[tuple[int, int]] = set()
        self._spilled: dict[tuple[int, int], Matrix] = {}
        self._learn()

    def _learn(self) -> None:
        """Put the texts of the other outputs into the index."""
        for number, (directory, manifest) in enumerate(self.outputs):
            without = np.array([each.index for each in read_failures(directory)], np.int64)
            path, first = directory / DIGESTS_FILE, OUTPUT * number
            sha256 = _add_digests(self._index, path, manifest.count, first, without)
            if sha256 != manifest.digests_sha256:
                raise OutputError(f"{path} has other bytes than were written")

    # The reader's side.

    def begin(self, count: int) -> None:
        """Begin with the corpus, or begin again behind its first `count` rows.

        These are known as far as the output has their digests: one that an earlier version began
        has none, and what would have taken their vectors is embedded.
        """
        self._own = _make_index(self._directory / "own")
        first, none = OUTPUT * len(self.outputs), np.zeros(0, np.int64)
        _add_digests(self._own, self._own_digests, count, first, none)

    def find(self, digests: bytes, row: int) -> NDArray[np.int64]:
        """Return where the vectors of the next rows are: int64, shape (rows,).

        `NOWHERE` stands for those whose text is in no other output, nor in a row before.

        Args:
            digests: The `text_digests` of the rows.
            row: Index of the first of them.
        """
        places = self._index.find(digests)
        new = np.flatnonzero(places == NOWHERE)
        if len(new):
            own = np.frombuffer(digests, f"V{DIGEST_BYTES}")[new].tobytes()
            here = OUTPUT * len(self.outputs) + row + new
            self._own.add(own, here)
            first = self._own.find(own)
            places[new] = np.where(first == here, NOWHERE, first)
        return places

    # The collector's side.

    def fill(self, result: Result, places: NDArray[np.int64], output: Output) -> FilledResult:
        """Return a result with the vectors that were known, and that its worker left out.

        A chunk whose text failed in a row before fails for the same reason.

        Args:
            result: The next result of the corpus.
            places: What `find` said of its rows.
            output: The output of the corpus, which has the rows before.

        Raises:
            OutputError: A part is damaged, or gone; or the result has vectors of another layout.
            OSError: The disk refused; nothing has changed.
        """
        known = np.frombuffer(result.known, np.bool_)
        matrix = np.empty((result.count, result.dimensions), result.dtype)
        matrix[~known] = result.matrix()
        numbers, rows = np.divmod(places, OUTPUT)
        errors = {error.index: error for error in result.errors}
        reused: Counter[str] = Counter()
        for number in np.unique(numbers[known]).tolist():
            wanted = np.flatnonzero(known & (numbers == number))
            if number < len(self.outputs):
                name = str(self.outputs[number].directory)
                matrix[wanted] = self._take(number, rows[wanted], result)
            else:
                name, before = OWN, wanted[rows[wanted] < result.start]
                matrix[before] = self._take_own(rows[before], result, output)
                here = wanted[rows[wanted] >= result.start]
                matrix[here] = matrix[rows[here] - result.start]
                failed = self._own_errors(rows[before], output) | errors
                errors |= {
                    at: msgspec.structs.replace(failed[row], index=at)
                    for at, row in zip(
                        (result.start + wanted).tolist(), rows[wanted].tolist(), strict=True
                    )
                    if row in failed
                }
            reused[name] += len(wanted)
        filled = msgspec.structs.replace(
            result,
            vectors=matrix.tobytes(),
            known=b"",
            receipt=None,
            errors=[errors[at] for at in sorted(errors)],
        )
        return FilledResult(filled, reused)

    def _take(self, number: int, rows: NDArray[np.int64], result: Result) -> Matrix:
        """Return the vectors of some rows of another output."""
        directory, manifest = self.outputs[number]
        matrix = np.empty((len(rows), result.dimensions), result.dtype)
        for part, here in _by_part(manifest.parts, rows):
            decoded = self._part(number, directory, part)
            if decoded.shape[1:] != matrix.shape[1:] or decoded.dtype != matrix.dtype:
                raise OutputError(
                    f"{directory} has vectors of {decoded.shape[1]} {decoded.dtype}, and the "
                    f"workers make {matrix.shape[1]} {matrix.dtype}"
                )
            matrix[here] = decoded[rows[here] - part.start]
        return matrix

    def _take_own(self, rows: NDArray[np.int64], result: Result, output: Output) -> Matrix:
        """Return the vectors of some rows of the output that come before a result."""
        matrix = np.empty((len(rows), result.dimensions), result.dtype)
        for part, here in _by_part(output.parts, rows):
            decoded = self._part(len(self.outputs), output.directory, part)
            matrix[here] = decoded[rows[here] - part.start]
        for held, here in _by_part(output.held, rows):
            matrix[here] = held.matrix()[rows[here] - held.start]
        return matrix

    def _own_errors(self, rows: NDArray[np.int64], output: Output) -> dict[int, ChunkError]:
        """Return the errors of the output in the parts and results that have some rows."""
        errors = [error for held, _ in _by_part(output.held, rows) for error in held.errors]
        for part, _ in _by_part([part for part in output.parts if part.errors], rows):
            with OutputReader(output.directory) as reader:
                failures = reader.failures(part.start, part.errors)
            errors += [
                ChunkError(index=each.index, reason=each.reason, attempts=each.attempts)
                for each in failures
            ]
        return {error.index: error for error in errors}

    def _part(self, number: int, directory: Path, part: Part) -> Matrix:
        """Return all vectors of a part."""
        key = number, part.start
        if key in self._decoded:
            self._decoded.move_to_end(key)
            return self._decoded[key]
        if key in self._spilled:
            return self._spilled[key]
        matrix = _decode(directory, part)
        if key in self._seen:
            path = self._directory / f"{number}-{part.start}"
            path.write_bytes(np.ascontiguousarray(matrix).data)
            self._spilled[key] = np.memmap(path, matrix.dtype, "r", shape=matrix.shape)
            return matrix
        self._seen.add(key)
        self._decoded[key] = matrix
        self._bytes += matrix.nbytes
        while self._bytes > self._bytes_max and len(self._decoded) > 1:
            self._bytes -= self._decoded.popitem(last=False)[1].nbytes
        return matrix


def _by_part(
    parts: Sequence[Span], rows: NDArray[np.int64]
) -> Iterator[tuple[Span, NDArray[np.intp]]]:
    """Yield what has some of the rows, and which of them: parts of an output, or results."""
    starts = np.array([part.start for part in parts], np.int64)
    at_part = starts.searchsorted(rows, "right") - 1
    for at in np.unique(at_part[at_part >= 0]).tolist():
        part = parts[at]
        here = np.flatnonzero((at_part == at) & (rows < part.start + part.count))
        if len(here):
            yield part, here


def _decode(directory: Path, part: Part) -> Matrix:
    """Read a part."""
    with OutputReader(directory) as reader:
        reader.expect(part)
        return reader.read_part(part.start).batch.matrix


def _make_index(directory: Path) -> DigestIndex:
    """Make an empty index in a directory, which is emptied."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return DigestIndex(directory)


def _add_digests(
    index: DigestIndex, path: Path, count: int, first: int, without: NDArray[np.int64]
) -> str:
    """Put the texts of a file of digests into an index, but for some of its rows.

    Args:
        index: The index.
        path: The file; rows that it does not have are not known.
        count: Number of rows that are put there.
        first: Place of the first row.
        without: Rows that are left out, in order.

    Returns:
        The SHA-256 of what was read.
    """
    row, digest = 0, hashlib.sha256()
    for piece in read_pieces(whole(path)) if path.exists() else ():
        digest.update(piece)
        rows = np.arange(row, min(count, row + len(piece) // DIGEST_BYTES))
        kept = np.ones(len(rows), np.bool_)
        bounds = without.searchsorted([row, row + len(rows)])
        kept[without[slice(*bounds)] - row] = False
        digests = np.frombuffer(piece, f"V{DIGEST_BYTES}")[: len(rows)][kept]
        index.add(digests.tobytes(), first + rows[kept])
        row += len(rows)
    return digest.hexdigest()
