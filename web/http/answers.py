"""Answers in JSON that may be large: encoded as they are sent, so that they are nowhere whole."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final

import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse

MEDIA_TYPE: Final = "application/json"
PIECE_BYTES: Final = 1 << 16


def respond(parts: Iterable[bytes]) -> Response:
    """Answer with JSON that comes in parts: a small one at once, else piece by piece in threads."""
    pieces = _gather(parts)
    first, second = next(pieces, b""), next(pieces, None)
    if second is None:
        return Response(first, media_type=MEDIA_TYPE)
    return StreamingResponse(chain((first, second), pieces), media_type=MEDIA_TYPE)


def list_of(items: Iterable[Any]) -> Iterator[bytes]:
    """Yield the parts of a JSON list."""
    before = b"["
    for item in items:
        yield before + msgspec.json.encode(item)
        before = b","
    yield b"]" if before == b"," else b"[]"


def _gather(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Join parts to pieces of at least `PIECE_BYTES`; the last one may be smaller."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)
