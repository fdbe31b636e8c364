"""Copies of a corpus's files, of Parquet or Arrow, with the vectors as one more column.

A file is there when all of it is.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from embedfarm.collector.corpus_neighbours import check_apart
from embedfarm.collector.manifest import STATE_DIRECTORY, Manifest, OutputError, read_manifest
from embedfarm.collector.output_directory import check_sizes, locked
from embedfarm.collector.output_reader import OutputReader
from embedfarm.collector.source_check import PrefixCheck
from embedfarm.contract.durable_files import (
    ByteRange,
    make_directories,
    remove_temporaries,
    replacing,
    sha256_of,
    whole,
)
from embedfarm.contract.records import text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.readers import BadRow, CorpusError, CorpusOptions, Cursor, look_at
from embedfarm.readers.corpus import format_of
from embedfarm.readers.directory import locate
from embedfarm.readers.fields import Fields
from embedfarm.readers.record_batches import RowReader
from embedfarm.readers.source import Location
from embedfarm.runs.arrow_copy import ArrowOriginal
from embedfarm.runs.originals import Original, RowVectors
from embedfarm.runs.parquet_copy import ParquetOriginal
from embedfarm.runs.request import options_of

LISTING: Final = "_copy.json"
ORIGIN_FILE: Final = "copy.json"
SCRATCH_FILE: Final = "rows"
ORIGINALS: Final[dict[str, Callable[[Location], Original]]] = {
    "parquet": ParquetOriginal,
    "arrow": ArrowOriginal,
}
"""What copies a file, by its format."""


class CopiedFile(msgspec.Struct):
    """A file of a copy, as it was written.

    Attributes:
        file: Path below the copy.
        bytes: Its size.
        sha256: SHA-256 of it.
        rows: Number of its rows.
        vectors: Number of its rows that have a vector; of the others it is null.
    """

    file: str
    bytes: int
    sha256: str
    rows: int
    vectors: int


class Copy(msgspec.Struct):
    """_copy.json: a copy that has one is complete.

    Attributes:
        origin: What it was made of: job, moment when the output was finished or retried, column,
            and the corpus as it was.
        files: Its files, in the order of the corpus.
    """

    origin: dict[str, str]
    files: list[CopiedFile]


def copy_with_vectors(directory: Path, target: Path, column: str, settings: Settings) -> Copy:
    """Copy the corpus of a finished output, with its vectors as one more column behind the others.

    A row whose chunk failed, or that became none, has a null there. Row groups and record batches,
    what the file and its columns say of themselves, compressions and dictionaries are those of the
    corpus. An interrupted copy goes on behind its last whole file; one that is done stays as it is.

    Args:
        directory: A finished output, of a corpus of Parquet or Arrow.
        target: Directory of the copy.
        column: Name of the column.
        settings: Settings, which say where models are kept.

    Returns:
        What is in the copy.

    Raises:
        CorpusError: The corpus is neither, came on standard input, has such a column, or is not
            where it was.
        SourceChanged: The corpus has other rows than the output was made from.
        OutputError: There is no finished output, or `target` holds something else.
        OSError: The disk refuses; the same call goes on.
    """
    manifest = read_manifest(directory)
    sources = manifest.settings["sources"]
    options = options_of(manifest.settings, sources, settings)
    locations = [each for source in sources for each in locate(source, options.glob)]
    originals = [_original(location, options, column) for location in locations]
    _keep_apart(target, sources, locations)
    names = _name_files(locations)
    check_apart(target, [LISTING, *names], sources, options.glob)
    origin = {
        "job": manifest.job, "output": str(manifest.created), "column": column,
        "corpus": look_at(sources, options).digest,
    }  # fmt: skip
    done: Copy | None = _read(target / LISTING, Copy)
    if done is not None:
        _compare(done.origin, origin, target)
        spans = [ByteRange(target / each.file, 0, each.bytes) for each in done.files]
        check_sizes(target, spans, LISTING)
        return done
    private = target / STATE_DIRECTORY
    with locked(private):
        _begin(target, private / ORIGIN_FILE, origin)
        with OutputReader(directory) as reader:
            check = PrefixCheck(manifest.parts)
            kind = pa.from_numpy_dtype(np.dtype(manifest.dtype))
            field = pa.field(column, pa.list_(kind, manifest.dimensions))
            vectors, scratch = _OutputVectors(reader, manifest), private / SCRATCH_FILE
            copier = _Copier(vectors, check, options.fields(), field, scratch)
            copied = [
                copier.copy(original, target / name, name)
                for original, name in zip(originals, names, strict=True)
            ]
            if check.finish() != manifest.count:
                raise OutputError(f"the corpus has more rows than {manifest.count:,} now")
        copy = Copy(origin, copied)
        with replacing(target / LISTING) as file:
            file.write(msgspec.json.format(msgspec.json.encode(copy)) + b"\n")
        shutil.rmtree(private)
    return copy


def _original(location: Location, options: CorpusOptions, column: str) -> Original:
    """Return a file of the corpus, of which a copy can be made.

    Raises:
        CorpusError: The file is of another format, or has such a column.
    """
    name = location.name
    if location.is_stdin:
        raise CorpusError(f"{name}: it was read, and cannot be read again to be copied")
    kind = "documents" if location.is_directory else format_of(location, options)
    if kind not in ORIGINALS:
        raise CorpusError(f"{name}: a column is added to Parquet and Arrow, and not to {kind}")
    original = ORIGINALS[kind](location)
    if column in original.schema.names:
        raise CorpusError(f"{name}: there is a column {column!r} already")
    return original


def _keep_apart(target: Path, sources: Sequence[str], locations: Sequence[Location]) -> None:
    """Refuse a copy that would be read with the corpus from then on, or be among its files.

    Raises:
        OutputError: The copy would be one.
    """
    place = target.resolve()
    files = [Path(each.path) for each in locations if not each.is_url]
    directories = [Path(source) for source in sources if Path(source).is_dir()]
    read_with_it = any(place.is_relative_to(each) for each in directories)
    if read_with_it or any(file.is_relative_to(place) for file in files):
        raise OutputError(f"{target} is in the directory of the corpus: copy it elsewhere")


def _name_files(locations: Sequence[Location]) -> list[str]:
    """Return where the copy of each file is below the copy: as it is below what they all share.

    Raises:
        CorpusError: They share nothing, since they are on several file systems.
    """
    for location in locations:
        if location.filesystem != locations[0].filesystem:
            raise CorpusError(
                f"{location.name} is on another file system than {locations[0].name}: a column is "
                "added to files of one"
            )
    paths = [PurePosixPath(location.path) for location in locations]
    shared = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(shared)) for path in paths]


def _begin(target: Path, path: Path, origin: dict[str, str]) -> None:
    """Make `target` a copy of this origin, unless it is something else already."""
    if (begun := _read(path, dict[str, str])) is not None:
        _compare(begun, origin, target)
        for directory in {path.parent for path in target.rglob("*")}:
            remove_temporaries(directory)
        return
    if others := sorted(each.name for each in target.iterdir() if each.name != STATE_DIRECTORY):
        raise OutputError(f"{target} holds {others[0]}, which is of no copy of this corpus")
    with replacing(path) as file:
        file.write(json.dumps(origin).encode())


def _compare(begun: dict[str, str], origin: dict[str, str], target: Path) -> None:
    """Refuse to go on with the copy of another output, column or corpus."""
    if others := [name for name, value in origin.items() if begun.get(name) != value]:
        raise OutputError(
            f"{target} is a copy made of another {others[0]}: choose another --out, or remove it"
        )


def _read(path: Path, kind: Any) -> Any:  # noqa: ANN401 # a type, and one of it
    """Return what is in a file of JSON; None where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise OutputError(f"{path} is damaged: {error}") from error


class _OutputVectors:
    """The vectors of an output, from its first chunk to its last; memory holds one part."""

    def __init__(self, reader: OutputReader, manifest: Manifest) -> None:
        self._reader, self._manifest = reader, manifest
        self._next = 0
        self._part = reader.read_part(0).batch if manifest.count else None

    def take(self, count: int) -> RowVectors:
        """Return the vectors of the next chunks; those behind the last chunk have none."""
        manifest = self._manifest
        matrix = np.zeros((count, manifest.dimensions), manifest.dtype)
        good = np.zeros(count, np.bool_)
        done = 0
        while done < count and self._part is not None and self._next < manifest.count:
            part, first = self._part, self._next - self._part.start
            step = min(count - done, len(part.good) - first)
            matrix[done : done + step] = part.matrix[first : first + step]
            good[done : done + step] = part.good[first : first + step]
            done, self._next = done + step, self._next + step
            if first + step == len(part.good) and self._next < manifest.count:
                self._part = self._reader.read_part(self._next).batch
        return RowVectors(matrix, good)


class _Copier:
    """Copies the files of a corpus, one after the other, and compares all of its rows.

    Args:
        vectors: The vectors of the output.
        check: Compares the rows with those that the output was made of.
        fields: The fields of text and id.
        field: The column that is added.
        scratch: File that holds a row group meanwhile.
    """

    def __init__(
        self,
        vectors: _OutputVectors,
        check: PrefixCheck,
        fields: Fields,
        field: pa.Field,
        scratch: Path,
    ) -> None:
        self._vectors, self._check, self._fields = vectors, check, fields
        self._field, self._scratch = field, scratch

    def copy(self, original: Original, path: Path, name: str) -> CopiedFile:
        """Write the copy of one file, unless it is there."""
        self._rows = self._made = 0
        self._reader = RowReader(original.schema, original.location.name, self._fields)
        if path.exists():
            for batch in original.batches(self._reader.columns):
                self._embed(batch)
        else:
            make_directories(path.parent)
            with replacing(path) as file:
                original.write(file, self._field, self._embed, self._scratch)
        size, sha256 = path.stat().st_size, sha256_of([whole(path)])
        return CopiedFile(name, size, sha256, self._rows, self._made)

    def _embed(self, batch: pa.RecordBatch) -> RowVectors:
        """Return the vectors of the next rows; those that became no chunk have none."""
        items = list(self._reader.items([batch], 0, Cursor()))
        good = np.array([not isinstance(item, BadRow) for item in items], np.bool_)
        texts, ids = [], []
        for item in items:
            if not isinstance(item, BadRow):
                texts.append(item[0])
                ids.append(item[1])
        self._check.feed(text_checksums(texts), None if self._fields.id is None else ids)
        matrix, made = self._vectors.take(len(texts))
        valid = np.zeros(len(items), np.bool_)
        valid[good] = made
        values = np.zeros((len(items), matrix.shape[1]), matrix.dtype)
        values[good] = matrix
        self._rows, self._made = self._rows + len(items), self._made + int(made.sum())
        return RowVectors(values, valid)
