"""Functions that all formats with one file for each part share."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from embedfarm.collector.manifest import Part, Written
from embedfarm.collector.sinks.part_rows import PartError
from embedfarm.contract.durable_files import HashingFile, replacing


def write_part(path: Path, write: Callable[[HashingFile], object]) -> Written:
    """Let `write` write a file that holds one part; it takes its place when it is whole."""
    with replacing(path) as file:
        hashing = HashingFile(file, digest := hashlib.sha256())
        write(hashing)
    return Written(file=path.name, bytes=hashing.bytes, sha256=digest.hexdigest())


def keep_parts(directory: Path, parts: Iterable[Part], suffix: str) -> int:
    """Check that each part has its file, and remove other files of parts.

    Such files were written and not journalled when a crash came, or their parts were dropped since.

    Returns:
        Number of files that were removed.

    Raises:
        PartError: The file of a part is missing or has another size.
    """
    known = set()
    for part in parts:
        path = directory / part.file
        known.add(path)
        if not path.is_file() or path.stat().st_size != part.bytes:
            raise PartError(f"{path} is not the file of {part.bytes} bytes that was written")
    others = [p for p in directory.glob(f"part-{'[0-9]' * 12}.{suffix}") if p not in known]
    for path in others:
        path.unlink()
    return len(others)
