"""Files of the engine cache, which saves time: what cannot be kept is found out again."""

import os
from pathlib import Path

from embedfarm.contract.unreadable_records import name_once


def keep(path: Path, data: bytes) -> None:
    """Keep a file, whole, if it can be written; of several that do so at once one wins."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        leave_out(path, error)


def leave_out(path: Path, error: OSError) -> None:
    """Log why a file or directory is not kept: once for each reason."""
    name_once(str(path), f"it cannot be kept: {error.strerror or error}")
