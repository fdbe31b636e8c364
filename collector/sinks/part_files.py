"""What the formats share that have one file for each part."""

from collections.abc import Iterable
from pathlib import Path

from collector.files import hashing, replacing, sha256_of, whole
from collector.manifest import Part, Written
from collector.sinks.batch import PartError


def describe_part(path: Path) -> Written:
    """Facts about a file that holds one part."""
    span = whole(path)
    return Written(file=path.name, bytes=span.bytes, sha256=sha256_of([span]))


def write_part(path: Path, data: memoryview) -> Written:
    """Write a file that holds one part."""
    with hashing(data) as sha256:
        with replacing(path) as file:
            file.write(data)
        return Written(file=path.name, bytes=data.nbytes, sha256=sha256())


def check_parts(directory: Path, parts: Iterable[Part]) -> None:
    """Check that each part has its file.

    Raises:
        PartError: One is missing or has another size.
    """
    for part in parts:
        path = directory / part.file
        if not path.is_file() or path.stat().st_size != part.bytes:
            raise PartError(f"{path} is not the file of {part.bytes} bytes that was written")
