"""Copies of a corpus's Parquet files with the vectors as one more column.

A file is there when all of it is. The row groups are those of the corpus, so that a row group of it
lies in a file meanwhile, and memory holds a few batches, and one part of the output.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embedfarm.collector.durable_files import (
    make_directories,
    remove_temporaries,
    replacing,
    sha256_of,
    whole,
)
from embedfarm.collector.manifest import STATE_DIRECTORY, Manifest, OutputError, read_manifest
from embedfarm.collector.output_directory import locked
from embedfarm.collector.output_reader import OutputReader
from embedfarm.collector.sinks.arrow_columns import numbers
from embedfarm.collector.source_check import PrefixCheck
from embedfarm.contract.records import text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.producer.readers import BadRow, CorpusError, CorpusOptions, Cursor, look_at
from embedfarm.producer.readers.corpus import format_of
from embedfarm.producer.readers.directory import locate
from embedfarm.producer.readers.fields import Fields
from embedfarm.producer.readers.record_batches import RowReader
from embedfarm.producer.readers.source import Location, named_errors, open_binary
from embedfarm.runs.request import options_of

LISTING: Final = "_copy.json"
ORIGIN_FILE: Final = "copy.json"
ROW_GROUP_FILE: Final = "row-group.arrow"
_BATCH_ROWS: Final = 1024
_BUFFER_BYTES: Final = 1 << 20
_DICTIONARIES: Final = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY"})


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
        origin: What it was made of: job, errors, column, and the corpus as it was.
        files: Its files, in the order of the corpus.
    """

    origin: dict[str, str]
    files: list[CopiedFile]


def copy_with_vectors(directory: Path, target: Path, column: str, settings: Settings) -> Copy:
    """Copy the corpus of a finished output, with its vectors as one more column behind the others.

    A row whose chunk failed, or that became none, has a null there. Row groups, what the file and
    its columns say of themselves, compressions and dictionaries are those of the corpus. An
    interrupted copy goes on behind its last whole file; one that is done stays as it is.

    Args:
        directory: A finished output, of a corpus of Parquet.
        target: Directory of the copy.
        column: Name of the column.
        settings: Settings, which say where models are kept.

    Returns:
        What is in the copy.

    Raises:
        CorpusError: The corpus is no Parquet, has such a column, or is not where it was.
        SourceChanged: The corpus has other rows than the output was made from.
        OutputError: There is no finished output, or `target` holds something else.
        OSError: The disk refuses; the same call goes on.
    """
    manifest = read_manifest(directory)
    sources = manifest.settings["sources"]
    options = options_of(manifest.settings, sources, settings)
    locations = [each for source in sources for each in locate(source, options.glob)]
    names = _name_files(locations, options, column, target)
    origin = {
        "job": manifest.job, "errors": manifest.errors_sha256, "column": column,
        "corpus": look_at(sources, options).digest,
    }  # fmt: skip
    done: Copy | None = _read(target / LISTING, Copy)
    if done is not None:
        _compare(done.origin, origin, target)
        return done
    private = target / STATE_DIRECTORY
    with locked(private):
        _begin(target, private / ORIGIN_FILE, origin)
        with OutputReader(directory) as reader:
            check = PrefixCheck(manifest.parts)
            kind = pa.from_numpy_dtype(np.dtype(manifest.dtype))
            field = pa.field(column, pa.list_(kind, manifest.dimensions))
            vectors, scratch = _Vectors(reader, manifest), private / ROW_GROUP_FILE
            copier = _Copier(vectors, check, options.fields(), field, scratch)
            copied = [
                copier.copy(location, target / name, name)
                for location, name in zip(locations, names, strict=True)
            ]
            if check.finish() != manifest.count:
                raise OutputError(f"the corpus has more rows than {manifest.count:,} now")
        copy = Copy(origin, copied)
        with replacing(target / LISTING) as file:
            file.write(msgspec.json.format(msgspec.json.encode(copy)) + b"\n")
        shutil.rmtree(private)
    return copy


def _name_files(
    locations: Sequence[Location], options: CorpusOptions, column: str, target: Path
) -> list[str]:
    """Return where the copy of each file is below the copy: as it is below what they all share."""
    for location in locations:
        kind = "documents" if location.is_directory else format_of(location, options)
        if kind != "parquet":
            raise CorpusError(f"{location.name}: a column is added to Parquet, and not to {kind}")
        if not location.is_url and target.resolve().is_relative_to(Path(location.path).parent):
            raise OutputError(f"{target} is in the directory of the corpus: copy it elsewhere")
        with _opened(location) as table:
            if column in table.schema_arrow.names:
                raise CorpusError(f"{location.name}: there is a column {column!r} already")
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


class _Taken(NamedTuple):
    """Vectors of consecutive chunks, and which of these have one."""

    matrix: NDArray[Any]
    good: NDArray[np.bool_]


class _Vectors:
    """The vectors of an output, from its first chunk to its last; memory holds one part."""

    def __init__(self, reader: OutputReader, manifest: Manifest) -> None:
        self._reader, self._manifest = reader, manifest
        self._next = 0
        self._part = reader.read_part(0).batch if manifest.count else None

    def take(self, count: int) -> _Taken:
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
        return _Taken(matrix, good)


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
        vectors: _Vectors,
        check: PrefixCheck,
        fields: Fields,
        field: pa.Field,
        scratch: Path,
    ) -> None:
        self._vectors, self._check, self._fields = vectors, check, fields
        self._field, self._scratch = field, scratch

    def copy(self, location: Location, path: Path, name: str) -> CopiedFile:
        """Write the copy of one file, unless it is there."""
        self._made = 0
        with _opened(location) as table:
            reader = RowReader(table.schema_arrow, location.name, self._fields)
            if path.exists():
                for batch in _batches(table, location, None, reader.columns):
                    self._embedding(batch, reader)
            else:
                make_directories(path.parent)
                with replacing(path) as file:
                    self._write(file, table, location, reader)
            rows = table.metadata.num_rows
        return CopiedFile(name, path.stat().st_size, sha256_of([whole(path)]), rows, self._made)

    def _write(
        self, file: BinaryIO, table: pq.ParquetFile, location: Location, reader: RowReader
    ) -> None:
        """Write a file, a row group at a time."""
        schema = table.schema_arrow.append(self._field)
        with pq.ParquetWriter(file, schema, **_encodings(table.metadata)) as writer:
            for group in range(table.num_row_groups):
                with self._scratch.open("wb") as scratch, pa.ipc.new_stream(scratch, schema) as out:
                    for batch in _batches(table, location, group, None):
                        columns = [*batch.columns, self._embedding(batch, reader)]
                        out.write_batch(pa.record_batch(columns, schema=schema))
                with pa.memory_map(str(self._scratch)) as scratch:
                    rows = pa.ipc.open_stream(scratch).read_all().unify_dictionaries()
                    writer.write_table(rows, row_group_size=max(1, rows.num_rows))

    def _embedding(self, batch: pa.RecordBatch, reader: RowReader) -> pa.Array:
        """Return the vectors of the next rows as a column, null where a row has none."""
        items = list(reader.items([batch], 0, Cursor()))
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
        self._made += int(made.sum())
        return pa.FixedSizeListArray.from_arrays(
            numbers(values.reshape(-1)), type=self._field.type, mask=pa.array(~valid)
        )


@contextmanager
def _opened(location: Location) -> Iterator[pq.ParquetFile]:
    """Open a file of the corpus; what is wrong with it becomes a `CorpusError`."""
    with ExitStack() as stack:
        with named_errors(location.name, is_url=location.is_url):
            file = stack.enter_context(open_binary(location.filesystem, location.path))
            table = pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        yield table


def _batches(
    table: pq.ParquetFile, location: Location, group: int | None, columns: list[str] | None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, or of one of its row groups, with these columns or all."""
    groups = range(table.num_row_groups) if group is None else [group]
    with named_errors(location.name, is_url=location.is_url):
        yield from table.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=columns)


def _encodings(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Return how the columns of a file are written as they were, and the vectors as they are."""
    if not metadata.num_row_groups:
        return {}
    group = metadata.row_group(0)
    columns = [group.column(place) for place in range(group.num_columns)]
    codecs = {each.path_in_schema: each.compression.lower() for each in columns}
    known = {"snappy", "gzip", "brotli", "lz4", "zstd"}
    return {
        "compression": {
            path: codec.removesuffix("_raw")
            for path, codec in codecs.items()
            if codec.removesuffix("_raw") in known
        },
        "use_dictionary": [
            each.path_in_schema for each in columns if _DICTIONARIES & set(each.encodings)
        ],
        "write_statistics": [each.path_in_schema for each in columns if each.is_stats_set],
        "sorting_columns": group.sorting_columns or None,
    }
