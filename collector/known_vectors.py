"""Vectors of finished outputs, found by the texts that they were made of."""

import hashlib
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.digest_index import DigestIndex
from embedfarm.collector.durable_files import read_pieces, replacing, sha256_of, whole
from embedfarm.collector.manifest import (
    Failure,
    Manifest,
    OutputError,
    Part,
    read_failures,
    read_manifest,
)
from embedfarm.collector.output_reader import OutputReader
from embedfarm.collector.text_digests import DIGEST_BYTES, DIGESTS_FILE

OUTPUT: Final = 1 << 40  # places of one output; the next output has the next so many
Matrix = NDArray[Any]


class Known(NamedTuple):
    """A finished output whose vectors are known.

    Attributes:
        directory: Its directory.
        manifest: Its manifest.
        reader: Reads its chunks.
    """

    directory: Path
    manifest: Manifest
    reader: OutputReader


class KnownRows(NamedTuple):
    """What is known of some texts.

    Attributes:
        matrix: Vectors, shape (texts, dimensions); the rows of failed chunks mean nothing.
        failures: Why some have no vector, by row of `matrix`.
    """

    matrix: Matrix
    failures: dict[int, Failure]


class KnownVectors:
    """Vectors of finished outputs, which stay as they are, by the texts that they were made of.

    Memory holds some parts of the outputs; one that is wanted again later is put on the disk as it
    is in memory, so that each part is decoded twice at most, in whatever order texts come.

    Args:
        directory: A directory for the index and for such parts; whatever is in it goes.
        bytes_max: Bytes of vectors in memory at a time; one part more than fit.
    """

    def __init__(self, directory: Path, bytes_max: int) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.outputs: list[Known] = []
        self._directory, self._bytes_max = directory, bytes_max
        self._index = DigestIndex(directory)
        self._decoded: OrderedDict[tuple[int, int], Matrix] = OrderedDict()
        self._bytes = 0
        self._seen: set[tuple[int, int]] = set()

    def add(self, directory: Path, *, failed: bool = False) -> None:
        """Add the texts of an output; those that are known already keep their vectors.

        Args:
            directory: The output.
            failed: Whether chunks that failed are known as well, as such.

        Raises:
            OutputError: It is not finished, or damaged; or it has no digests of its texts, or
                vectors of another layout than the outputs before.
        """
        manifest = read_manifest(directory)
        layouts = {(m.dimensions, m.dtype) for m in [manifest, *(o.manifest for o in self.outputs)]}
        if len(layouts) > 1:
            has = " and ".join(f"{count} {dtype}" for count, dtype in sorted(layouts))
            raise OutputError(f"{directory} has vectors of another kind than those before: {has}")
        if not manifest.digests_sha256:
            raise OutputError(
                f"{directory} has no {DIGESTS_FILE}, by which its texts are known again: an "
                "earlier version made it, or its texts were not compared with their source"
            )
        first = OUTPUT * len(self.outputs)
        self.outputs.append(Known(directory, manifest, OutputReader(directory)))
        without = [] if failed else [each.index for each in read_failures(directory)]
        self._add_digests(directory, manifest, first, np.array(without, np.int64))

    def _add_digests(
        self, directory: Path, manifest: Manifest, first: int, without: NDArray[np.int64]
    ) -> None:
        """Put an output's texts into the index, but for some of its chunks.

        Raises:
            OutputError: The digests are not those that were written.
        """
        path, row = directory / DIGESTS_FILE, 0
        digest = hashlib.sha256()
        for piece in read_pieces(whole(path)) if path.exists() else ():
            digest.update(piece)
            rows = np.arange(row, row + len(piece) // DIGEST_BYTES)
            kept = np.ones(len(rows), np.bool_)
            bounds = without.searchsorted([row, row + len(rows)])
            kept[without[slice(*bounds)] - row] = False
            digests = np.frombuffer(piece, f"V{DIGEST_BYTES}")[kept]
            self._index.add(digests.tobytes(), first + rows[kept])
            row += len(rows)
        if digest.hexdigest() != manifest.digests_sha256:
            raise OutputError(f"{path} has other bytes than were written")

    def expect(self, digests: bytes, row: int) -> None:
        """Make texts known that the next output to be added will have, from a row on, in order.

        `add` finds them known then.
        """
        rows = np.arange(row, row + len(digests) // DIGEST_BYTES)
        self._index.add(digests, OUTPUT * len(self.outputs) + rows)

    def find(self, digests: bytes) -> NDArray[np.int64]:
        """Return the places of texts by their digests; `NOWHERE` for those that are not known."""
        return self._index.find(digests)

    def take(self, places: NDArray[np.int64]) -> KnownRows:
        """Return what is known of the texts at some places.

        Raises:
            OutputError: A part is damaged, or gone.
            OSError: It cannot be read.
        """
        numbers, rows = np.divmod(places, OUTPUT)
        layout = self.outputs[0].manifest.layout
        matrix = np.empty((len(places), layout.dimensions), layout.dtype)
        failures: dict[int, Failure] = {}
        for number in np.unique(numbers).tolist():
            known = self.outputs[number]
            own = np.flatnonzero(numbers == number)
            ends = np.array([part.end for part in known.manifest.parts])
            parts = ends.searchsorted(rows[own], "right")
            for at in np.unique(parts).tolist():
                part, here = known.manifest.parts[at], own[parts == at]
                matrix[here] = self._rows(number, at)[rows[here] - part.start]
                if part.errors:
                    failures |= _failures(known.reader, part, here, rows[here])
        return KnownRows(matrix, failures)

    def _rows(self, number: int, at: int) -> Matrix:
        """Return all rows of a part."""
        key, path = (number, at), self._directory / f"{number}-{at}.npy"
        if key in self._decoded:
            self._decoded.move_to_end(key)
            return self._decoded[key]
        if path.exists():
            spilled: Matrix = np.load(path, mmap_mode="r")
            return spilled
        matrix = _decode(self.outputs[number], at)
        if key in self._seen:
            with replacing(path) as file:
                np.save(file, matrix)
            return matrix
        self._seen.add(key)
        self._decoded[key] = matrix
        self._bytes += matrix.nbytes
        while self._bytes > self._bytes_max and len(self._decoded) > 1:
            self._bytes -= self._decoded.popitem(last=False)[1].nbytes
        return matrix


def _decode(known: Known, at: int) -> Matrix:
    """Read a part, which has to be as it was written."""
    part = known.manifest.parts[at]
    if sha256_of(part.spans(known.directory)) != part.sha256:
        raise OutputError(f"{known.directory / part.file} has other bytes than were written")
    return known.reader.read_part(part.start).batch.matrix


def _failures(
    reader: OutputReader, part: Part, here: NDArray[np.int64], rows: NDArray[np.int64]
) -> dict[int, Failure]:
    """Return the failures of a part that are among some of its rows, by where those are wanted."""
    failed = {each.index: each for each in reader.failures(part.start, part.errors)}
    return {
        place: failed[row]
        for place, row in zip(here.tolist(), rows.tolist(), strict=True)
        if row in failed
    }
