"""Which paths a job from outside may name."""

import os
from collections.abc import Sequence
from pathlib import Path


class PathRefused(ValueError):
    """A path outside the directories that are allowed; the message names both."""


def allow(path: str, roots: Sequence[Path]) -> Path:
    """The path itself, absolute and without symbolic links, if it is below one of the roots.

    Raises:
        PathRefused: It is not, or there are no roots.
    """
    if not roots:
        raise PathRefused("no path is allowed: ingest_roots is empty")
    found = Path(path).resolve()
    allowed = [root.expanduser().resolve() for root in roots]
    if not any(found.is_relative_to(root) for root in allowed):
        names = ", ".join(map(str, allowed))
        raise PathRefused(f"{path!r} is not below one of ingest_roots ({names})")
    return found


def allow_source(path: str, roots: Sequence[Path]) -> Path:
    """A corpus that exists below one of the roots, with every file in it if it is a directory.

    Raises:
        PathRefused: It is not, or a link in it leads outside.
    """
    found = allow(path, roots)
    if not found.exists():
        # A name that does not exist may still be a pattern or a URL, which nobody has checked.
        raise PathRefused(
            f"{path!r} is no file and no directory; URLs and patterns are not allowed"
        )
    for directory, _, files in os.walk(found):
        for file in (Path(directory, name) for name in files):
            if file.is_symlink():
                allow(str(file), roots)
    return found
