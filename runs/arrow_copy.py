"""An Arrow file or stream and its copy: record batches, metadata and compressions stay."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from embedfarm.readers import arrow
from embedfarm.readers.arrow_form import ArrowForm, form_of_file, form_of_stream
from embedfarm.readers.source import (
    Location,
    named_errors,
    open_binary,
    split_compression,
)
from embedfarm.runs.originals import Embed, RowVectors


class ArrowOriginal:
    """An Arrow file or stream of a corpus; see `Original`.

    Memory holds one record batch as it was written, as it did when the corpus was read.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        with self._opened() as file:
            self._is_file = arrow.is_file(file, location.name)
            source = self._reader(file)
            self.schema: pa.Schema = source.schema
            self._metadata = getattr(source, "metadata", None)  # of a file, by a newer pyarrow

    def batches(self, _columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows, with all columns."""
        yield from arrow.pieces(batch for batch, _ in self._whole_batches())

    def write(self, file: BinaryIO, field: pa.Field, embed: Embed, scratch: Path) -> None:
        """Write a copy, a record batch at a time, whose vectors lie in `scratch`."""
        schema, form = self.schema.append(field), self._form()
        options = pa.ipc.IpcWriteOptions(
            compression=form.codec, emit_dictionary_deltas=form.has_deltas, allow_64bit=True
        )
        more = {"metadata": self._metadata} if self._metadata else {}
        new = pa.ipc.new_file if self._is_file else pa.ipc.new_stream
        with self._packing(file) as target, new(target, schema, options=options, **more) as out:
            for batch, metadata in self._whole_batches():
                columns = [*batch.columns, _column(batch, field.type, embed, scratch)]
                out.write_batch(pa.record_batch(columns, schema=schema), metadata)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """Open the file, unpacked; what is wrong with it becomes a `CorpusError`."""
        location = self.location
        with (
            named_errors(location.name, is_url=location.is_url),
            open_binary(location.filesystem, location.path) as file,
        ):
            yield file

    def _form(self) -> ArrowForm:
        """Return how the record batches are written."""
        with self._opened() as file:
            return (form_of_file if self._is_file else form_of_stream)(file)

    def _reader(self, file: BinaryIO) -> Any:  # noqa: ANN401 # of files or of streams
        """Return what reads the record batches."""
        opened = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        return opened(pa.PythonFile(file, mode="r"))

    def _whole_batches(self) -> Iterator[tuple[pa.RecordBatch, pa.KeyValueMetadata | None]]:
        """Yield the record batches, each with what it says of itself."""
        with self._opened() as file:
            source = self._reader(file)
            if self._is_file:
                for number in range(source.num_record_batches):
                    yield source.get_batch_with_custom_metadata(number)
            else:
                yield from source.iter_batches_with_custom_metadata()

    @contextmanager
    def _packing(self, file: BinaryIO) -> Iterator[Any]:
        """Yield where a copy is written, to be packed as the original is."""
        _, compression = split_compression(self.location.path)
        with os.fdopen(file.fileno(), "wb", closefd=False) as same:  # pyarrow may close it
            if compression is None:
                yield same
                return
            with pa.CompressedOutputStream(pa.PythonFile(same, mode="w"), compression) as packed:
                yield packed


def _column(batch: pa.RecordBatch, kind: pa.DataType, embed: Embed, scratch: Path) -> pa.Array:
    """Return the vectors of a record batch, which lie in a file that is mapped into memory."""
    if not batch.num_rows:
        return pa.array([], kind)
    scratch.unlink(missing_ok=True)
    good = [np.empty(0, np.bool_)]
    with scratch.open("xb") as file:
        for piece in arrow.pieces([batch]):
            vectors = embed(piece)
            file.write(vectors.matrix.data)
            good.append(vectors.good)
    matrix = np.memmap(scratch, kind.value_type.to_pandas_dtype(), "r")
    return RowVectors(matrix, np.concatenate(good)).column(kind)
