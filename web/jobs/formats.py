"""Results as Arrow, JSON Lines and npy, and which of them a client wants."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from embedfarm.collector.output_reader import Chunks
from embedfarm.collector.sinks.jsonl import print_rows
from embedfarm.collector.sinks.npy import fill_failed, make_header

COMPONENTS_AT_A_TIME: Final = 1 << 16  # half a megabyte as text


def encode_lines(chunks: Chunks) -> Iterator[bytes]:
    """Yield JSON Lines: an object for each chunk, in pieces of many lines."""
    rows = max(1, COMPONENTS_AT_A_TIME // chunks.layout.dimensions)
    for start in range(chunks.batch.start, chunks.end, rows):
        yield b"".join(_lines(chunks.within(start, rows)))


def _lines(chunks: Chunks) -> Iterator[bytes]:
    batch = chunks.batch
    reasons = {each.index: each.reason for each in chunks.failures}
    for row, vector in enumerate(print_rows(batch.matrix)):
        index = batch.start + row
        head = b'{"index":%d,' % index
        if batch.ids is not None:
            head += b'"id":' + msgspec.json.encode(batch.ids[row]) + b","
        if batch.good[row]:
            yield head + b'"embedding":[' + vector.encode() + b"]}\n"
        else:
            yield head + b'"error":' + msgspec.json.encode(reasons.get(index, "")) + b"}\n"


def encode_arrow(chunks: Chunks) -> Iterator[bytes]:
    """Yield an Arrow IPC stream of one batch."""
    table = record_batch(chunks)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_batch(table)
    yield sink.getvalue().to_pybytes()


def record_batch(chunks: Chunks) -> pa.RecordBatch:
    """Make an Arrow batch of chunks, with columns index, id, embedding and error."""
    batch = chunks.batch
    reasons = {each.index: each.reason for each in chunks.failures}
    indices = range(batch.start, chunks.end)
    values = pa.array(batch.matrix.reshape(-1))
    columns = {
        "index": pa.array(indices, pa.int64()),
        "id": pa.nulls(len(indices), pa.string())
        if batch.ids is None
        else pa.array(batch.ids, pa.string()),
        "embedding": pa.FixedSizeListArray.from_arrays(
            values, chunks.layout.dimensions, mask=pa.array(~batch.good)
        ),
        "error": pa.array(map(reasons.get, indices), pa.string()),
    }
    return pa.record_batch(columns)


def encode_npy(chunks: Chunks) -> Iterator[bytes]:
    """Yield an npy matrix; a failed chunk's row is NaN, or zero where vectors are integers."""
    yield make_header(len(chunks.batch.good), chunks.layout)
    yield np.ascontiguousarray(fill_failed(chunks.batch)).tobytes()


FORMATS: Final[Mapping[str, Callable[[Chunks], Iterator[bytes]]]] = {
    "application/jsonl": encode_lines,
    "application/x-ndjson": encode_lines,
    "application/vnd.apache.arrow.stream": encode_arrow,
    "application/x-npy": encode_npy,
    "application/octet-stream": encode_npy,
}
"""Encoders by media type; the first one is for clients that take anything."""


def choose_format(accept: str) -> str | None:
    """Choose the media type of `FORMATS` that an Accept header prefers; None if it takes none."""
    wanted = dict(map(_range, filter(str.strip, accept.split(","))))
    if not wanted:
        return next(iter(FORMATS))
    qualities = {name: _quality(wanted, name) for name in FORMATS}
    best = max(FORMATS, key=qualities.__getitem__)  # of several that are as good the first one
    return best if qualities[best] > 0 else None


def _range(text: str) -> tuple[str, float]:
    """Parse a media range of an Accept header and its quality, which is 0 if it is malformed."""
    name, *parameters = (word.strip().lower() for word in text.split(";"))
    quality = next((each[2:] for each in parameters if each.startswith("q=")), "1")
    try:
        return name, float(quality)
    except ValueError:
        return name, 0.0


def _quality(wanted: Mapping[str, float], name: str) -> float:
    """Return the quality of the most specific media range that fits a media type, 0 without one."""
    ranges = (name, f"{name.partition('/')[0]}/*", "*/*")
    return next((wanted[each] for each in ranges if each in wanted), 0.0)
