"""Downloads of whole outputs as one file, as far as they are on the disk."""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Final, Literal

import numpy as np
import pyarrow as pa
from fastapi import APIRouter, HTTPException, Path
from fastapi.responses import StreamingResponse

from embedfarm.collector.manifest import OutputError
from embedfarm.collector.output_reader import Chunks, OutputReader
from embedfarm.collector.sinks.npy import fill_failed, make_header
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.ingest.allow_list import PathRefused, allow
from embedfarm.producer.feed import is_feed
from embedfarm.web.auth.keys import Scope
from embedfarm.web.jobs.formats import encode_lines, record_batch
from embedfarm.web.jobs.job_watch import PLACE
from embedfarm.web.jobs.results import VECTOR_BYTES_GUESSED, open_output
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.services import Service, need

Format = Literal["jsonl", "npy", "arrow"]

router: Final = APIRouter(include_in_schema=False, dependencies=[*need(Scope.READ), PLACE])


@router.get("/jobs/{job}/results.{kind}")
def download(services: Service, job: JobId, kind: Annotated[Format, Path()]) -> StreamingResponse:
    """Send all chunks that are on the disk, in order; failed ones are marked as such.

    A matrix or a stream says how large a vector is, so that there is none of no chunk.
    """
    handle = services.farm.job(job)
    status = handle.status()
    if is_feed(handle):
        raise HTTPException(409, "results of a feed are read by the program that feeds it")
    try:
        reader = open_output(services.settings, job, status)
    except (OutputError, OSError) as error:
        raise HTTPException(409, f"the output cannot be read: {error}") from error
    if not reader.available and kind != "jsonl":
        with reader:
            raise HTTPException(409, f"there is no chunk on the disk to make a .{kind} file of")
    rows = services.settings.http_results_bytes_max // (status.vector_bytes or VECTOR_BYTES_GUESSED)
    media_type, encode = ENCODERS[kind]
    name = (
        re.sub(r"[^\w-]+", "-", handle.spec().name or job, flags=re.ASCII).strip("-") or "results"
    )
    return StreamingResponse(
        _close_after(reader, encode(reader, max(1, rows))),
        headers={"content-disposition": f'attachment; filename="{name}.{kind}"'},
        media_type=media_type,
    )


def why_not(settings: Settings, status: JobStatus) -> str:
    """Say why the results of a job cannot be had here; "" if they can."""
    if not status.out:
        return "they are where the job's own program collects them"
    try:
        allow(status.out, settings.task_roots)
    except PathRefused:
        return "they are in a directory that this farm's pages may not read"
    return ""


def _close_after(reader: OutputReader, pieces: Iterator[bytes]) -> Iterator[bytes]:
    with reader:
        yield from pieces


def _pieces(reader: OutputReader, rows: int) -> Iterator[Chunks]:
    """Yield all chunks, `rows` at a time."""
    start = 0
    while chunks := reader.read(start, rows):
        yield chunks
        start = chunks.end


def _lines(reader: OutputReader, rows: int) -> Iterator[bytes]:
    for chunks in _pieces(reader, rows):
        yield from encode_lines(chunks)


def _matrix(reader: OutputReader, rows: int) -> Iterator[bytes]:
    """Yield one npy matrix, whose header says how many rows will come."""
    for place, chunks in enumerate(_pieces(reader, rows)):
        if not place:
            yield make_header(reader.available, chunks.layout)
        yield np.ascontiguousarray(fill_failed(chunks.batch)).tobytes()


def _arrow(reader: OutputReader, rows: int) -> Iterator[bytes]:
    """Yield one Arrow stream of many batches."""
    data = io.BytesIO()
    stream = None
    for chunks in _pieces(reader, rows):
        batch = record_batch(chunks)
        stream = stream or pa.ipc.new_stream(data, batch.schema)
        stream.write_batch(batch)
        yield data.getvalue()
        data.seek(0)
        data.truncate()
    if stream is not None:
        stream.close()
        yield data.getvalue()


ENCODERS: Final[Mapping[Format, tuple[str, Callable[[OutputReader, int], Iterator[bytes]]]]] = {
    "jsonl": ("application/jsonl", _lines),
    "npy": ("application/x-npy", _matrix),
    "arrow": ("application/vnd.apache.arrow.stream", _arrow),
}
