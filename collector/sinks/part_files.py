"""What the formats share that have one file for each part."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from collector.files import HashingFile, replacing
from collector.manifest import Part, Written
from collector.sinks.batch import PartError


def write_part(path: Path, write: Callable[[HashingFile], object]) -> Written:
    """Let `write` write a file that holds one part; it takes its place when it is whole."""
    with replacing(path) as file:
        hashing = HashingFile(file, digest := hashlib.sha256())
        write(hashing)
    return Written(file=path.name, bytes=hashing.bytes, sha256=digest.hexdigest())


def check_parts(directory: Path, parts: Iterable[Part]) -> None:
    """Check that each part has its file.

    Raises:
        PartError: One is missing or has another size.
    """
    for part in parts:
        path = directory / part.file
        if not path.is_file() or path.stat().st_size != part.bytes:
            raise PartError(f"{path} is not the file of {part.bytes} bytes that was written")
