"""Answers to the requests of a batch, out of its output, which a cancelled one has in part."""

import base64
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.output_reader import OutputReader
from embedfarm.contract.batch_requests import Planned

NOT_DONE: Final = ("batch_cancelled", "the batch was cancelled before this request was done")
Vector = NDArray[np.float32]


class Chunk(NamedTuple):
    """One chunk of an output: its vector, or the reason why it has none."""

    vector: Vector | None
    reason: str = ""


class Tally(NamedTuple):
    """Numbers of requests with and without an answer, and the tokens of those with one."""

    completed: int = 0
    failed: int = 0
    tokens: int = 0


def read_chunks(reader: OutputReader) -> Iterator[Chunk]:
    """Yield all chunks of an output that are on the disk, in order; memory holds one part.

    Raises:
        OutputError, OSError: The output is damaged.
    """
    index = 0
    while (found := reader.read(index, reader.available)) is not None:
        reasons = {each.index: each.reason for each in found.failures}
        for row in np.asarray(found.batch.matrix, np.float32):
            yield Chunk(None, reasons[index]) if index in reasons else Chunk(row)
            index += 1


def assemble(  # noqa: PLR0913, PLR0917 # two names, and four streams
    batch: str,
    model: str,
    requests: Iterable[Planned],
    chunks: Iterator[Chunk],
    lengths: Iterator[int],
    files: tuple[BinaryIO, BinaryIO],
) -> Tally:
    """Write a line for each request, in their order: answers into one file, errors into the other.

    Args:
        batch: Id of the batch.
        model: Model that made the vectors.
        requests: All requests of the batch.
        chunks: Chunks of all requests, in the order of the requests; requests whose chunks they
            lack, because the batch was cancelled, are among the errors.
        lengths: Tokens of each chunk.
        files: The file of the answers, and that of the errors.
    """
    tally = Tally()
    for number, request in enumerate(requests):
        own, tokens = list(islice(chunks, request.chunks)), sum(islice(lengths, request.chunks))
        code, message = find_fault(request, own)
        name = f"{batch.replace('batch_', 'batch_req_')}-{number}"
        line: dict[str, Any] = {"id": name, "custom_id": request.custom_id}
        if code:
            line |= {"response": None, "error": {"code": code, "message": message}}
            tally = tally._replace(failed=tally.failed + 1)
        else:
            body = answer(request, own, model, tokens)
            response = {"status_code": 200, "request_id": name, "body": body}
            line |= {"response": response, "error": None}
            tally = tally._replace(completed=tally.completed + 1, tokens=tally.tokens + tokens)
        files[bool(code)].write(msgspec.json.encode(line) + b"\n")
    return tally


def find_fault(request: Planned, chunks: Sequence[Chunk]) -> tuple[str, str]:
    """Return code and message of why a request has no answer, both "" if it has one."""
    if len(chunks) < request.chunks:
        return NOT_DONE
    for place, chunk in enumerate(chunks):
        if chunk.vector is None:
            return "failed", f"input {place}: {chunk.reason}"
        if request.dimensions > len(chunk.vector):
            return "invalid_request", f"dimensions: the model has {len(chunk.vector)}"
    return request.code, request.message


def answer(request: Planned, chunks: Iterable[Chunk], model: str, tokens: int) -> dict[str, Any]:
    """Return the body that `/v1/embeddings` would have answered."""
    vectors = (chunk.vector for chunk in chunks if chunk.vector is not None)
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _write(_shape(vector, request.dimensions), request),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _shape(vector: Vector, dimensions: int) -> Vector:
    """Return the leading `dimensions` components (0: all), scaled to length 1."""
    kept = vector[: dimensions or None]
    length = np.linalg.norm(kept)
    return np.asarray(kept / (length if length > 0 else 1), "<f4")


def _write(vector: Vector, request: Planned) -> list[float] | str:
    if request.base64:
        return base64.b64encode(vector.tobytes()).decode()
    components: list[float] = vector.astype(np.float64).tolist()
    return components
