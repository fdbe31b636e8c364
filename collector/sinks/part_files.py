"""What the formats share that have one file for each part."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from collector.files import replacing, sha256_of, whole
from collector.manifest import Part, Written
from collector.sinks.batch import PartError


def describe_part(path: Path) -> Written:
    """Facts about a file that holds one part."""
    span = whole(path)
    return Written(file=path.name, bytes=span.bytes, sha256=sha256_of([span]))


def write_part(path: Path, data: memoryview) -> Written:
    """Write a file that holds one part, and hash it meanwhile: neither waits for the other."""
    with ThreadPoolExecutor(1, "hash") as thread:
        digest = thread.submit(lambda: hashlib.sha256(data).hexdigest())
        with replacing(path) as file:
            file.write(data)
        return Written(file=path.name, bytes=data.nbytes, sha256=digest.result())


def check_parts(directory: Path, parts: Iterable[Part]) -> None:
    """Check that each part has its file.

    Raises:
        PartError: One is missing or has another size.
    """
    for part in parts:
        path = directory / part.file
        if not path.is_file() or path.stat().st_size != part.bytes:
            raise PartError(f"{path} is not the file of {part.bytes} bytes that was written")
