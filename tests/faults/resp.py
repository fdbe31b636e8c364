"""Part of the protocol RESP that a proxy needs: ends of frames, and commands of requests."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

from embedfarm.contract import wire

BLOBS: Final = b"$=!"
LISTS: Final = b"*~>%|"
PAIRS: Final = b"%|"


def frame_end(data: bytes | bytearray, at: int = 0) -> int:
    """Return the index after the frame that begins at `at`; -1 while it is not all there."""
    line = data.find(b"\r\n", at)
    if line < 0:
        return -1
    kind, end = data[at : at + 1], line + 2
    if kind in BLOBS:
        size = int(data[at + 1 : line])
        end += size + 2 if size >= 0 else 0
        return end if end <= len(data) else -1
    if kind in LISTS:
        size = int(data[at + 1 : line])
        for _ in range(2 * size if kind in PAIRS else size):
            end = frame_end(data, end)
            if end < 0:
                return -1
    return end


def take_frames(buffer: bytearray) -> list[bytes]:
    """Remove all whole frames from the start of a buffer, and return them."""
    frames, at = [], 0
    while (end := frame_end(buffer, at)) > 0:
        frames.append(bytes(buffer[at:end]))
        at = end
    del buffer[:at]
    return frames


def asks_for(request: bytes) -> str:
    """Return a request's command in capitals; for a farm's script its name, such as "commit"."""
    words = request.split(b"\r\n", 5)
    command = words[2].decode().upper()
    if command == "EVALSHA":
        return script_names().get(words[4].decode(), command)
    return command


@cache
def script_names() -> dict[str, str]:
    """Return the names of the farm's scripts by their hash."""
    scripts = (Path(wire.__file__).parent / "scripts").glob("*.lua")
    return {
        hashlib.sha1(wire.script(path.stem).encode(), usedforsecurity=False).hexdigest(): path.stem
        for path in scripts
    }
