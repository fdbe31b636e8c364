"""Arrow's own formats, of files (Feather) and of streams: one item per row."""

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Final

import pyarrow as pa

from embedfarm.readers.fields import Fields
from embedfarm.readers.items import CorpusError, Item
from embedfarm.readers.record_batches import RowReader
from embedfarm.readers.source import Cursor

FILE_MAGIC: Final = b"ARROW1"
FEATHER_1_MAGIC: Final = b"FEA1"
_BATCH_ROWS: Final = 512


def read(file: BinaryIO, name: str, fields: Fields, cursor: Cursor) -> Iterator[Item]:
    """Yield an item per row; an integer as id becomes its digits.

    Memory holds one record batch as it was written: of a file the columns that are needed, of a
    stream all of them.

    Raises:
        CorpusError: A column is missing or of a type that holds no text, or the file is packed, or
            of Feather's first version.
    """
    try:
        yield from _items(file, name, fields, cursor)
    except MemoryError as error:  # a size in it is nonsense, or a batch does not fit
        raise CorpusError(f"{name}: a record batch takes more memory than there is") from error


def _items(file: BinaryIO, name: str, fields: Fields, cursor: Cursor) -> Iterator[Item]:
    """Yield the items of a file or stream."""
    if not is_file(file, name):
        stream = pa.ipc.open_stream(_raw(file))
        rows = RowReader(stream.schema, name, fields)
        yield from rows.items(pieces(stream), cursor.offset, cursor)
        return
    rows = RowReader(there := schema(file, name), name, fields)
    tops = {each.partition(".")[0] for each in rows.columns} | set(rows.columns)
    places = [place for place, each in enumerate(there.names) if each in tops]
    options = pa.ipc.IpcReadOptions(included_fields=places)
    source = pa.ipc.open_file(_raw(file), options=options)
    batches = (source.get_batch(number) for number in range(source.num_record_batches))
    yield from rows.items(pieces(batches), cursor.offset, cursor)


def schema(file: BinaryIO, name: str) -> pa.Schema:
    """Return the schema of a file or stream, whose rows are not read.

    Raises:
        CorpusError: The file is packed, or of Feather's first version.
    """
    opened = pa.ipc.open_file if is_file(file, name) else pa.ipc.open_stream
    return opened(_raw(file)).schema


def is_file(file: BinaryIO, name: str) -> bool:
    """Tell whether this is the format of files, and not that of streams."""
    buffered: Any = file  # whatever is opened here can be peeked into
    begin = buffered.peek(len(FILE_MAGIC))
    if begin.startswith(FEATHER_1_MAGIC):
        raise CorpusError(f"{name}: Feather's first version is not read; write it anew as Arrow")
    if begin.startswith(FILE_MAGIC) and not file.seekable():
        raise CorpusError(
            f"{name}: an Arrow file is read as it is, neither packed nor from a pipe; a stream of "
            "Arrow's is read from both"
        )
    return bool(begin.startswith(FILE_MAGIC))


def _raw(file: BinaryIO) -> pa.PythonFile:
    return pa.PythonFile(file, mode="r")


def pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches of few rows, of which nobody has checked yet that they are Arrow's."""
    for batch in batches:
        batch.validate(full=True)
        for first in range(0, batch.num_rows, _BATCH_ROWS):
            yield batch.slice(first, _BATCH_ROWS)
