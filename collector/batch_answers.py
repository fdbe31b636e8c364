"""Answers to the requests of a batch, out of a finished output."""

import base64
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.manifest import Manifest, read_failures
from embedfarm.collector.sinks import open_sink
from embedfarm.contract.batch_requests import Planned

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


def read_chunks(directory: Path, manifest: Manifest) -> Iterator[Chunk]:
    """Yield all chunks of a finished output, in order; memory holds one part.

    Raises:
        OutputError, OSError: The output is damaged.
    """
    sink, failures = open_sink(manifest.format, directory), read_failures(directory)
    for part in manifest.parts:
        vectors = sink.read(part, manifest.layout)
        failed = {each.index: each.reason for each in islice(failures, part.errors)}
        rows = iter(np.asarray(vectors.matrix, np.float32))
        for index in range(part.start, part.end):
            reason = failed.get(index)
            yield Chunk(next(rows)) if reason is None else Chunk(None, reason)


def assemble(
    manifest: Manifest,
    requests: Iterable[Planned],
    chunks: Iterator[Chunk],
    lengths: Iterator[int],
    files: tuple[BinaryIO, BinaryIO],
) -> Tally:
    """Write a line for each request, in their order: answers into one file, errors into the other.

    Args:
        manifest: Manifest of the output; it names the batch and its model.
        requests: All requests of the batch.
        chunks: Chunks of all requests, in the order of the requests.
        lengths: Tokens of each chunk.
        files: The file of the answers, and that of the errors.
    """
    tally = Tally()
    for number, request in enumerate(requests):
        own, tokens = list(islice(chunks, request.chunks)), sum(islice(lengths, request.chunks))
        code, message = find_fault(request, own)
        name = f"{manifest.job.replace('batch_', 'batch_req_')}-{number}"
        line: dict[str, Any] = {"id": name, "custom_id": request.custom_id}
        if code:
            line |= {"response": None, "error": {"code": code, "message": message}}
            tally = tally._replace(failed=tally.failed + 1)
        else:
            body = answer(request, own, manifest.model, tokens)
            response = {"status_code": 200, "request_id": name, "body": body}
            line |= {"response": response, "error": None}
            tally = tally._replace(completed=tally.completed + 1, tokens=tally.tokens + tokens)
        files[bool(code)].write(msgspec.json.encode(line) + b"\n")
    return tally


def find_fault(request: Planned, chunks: Iterable[Chunk]) -> tuple[str, str]:
    """Return code and message of why a request has no answer, both "" if it has one."""
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
