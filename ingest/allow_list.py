"""Checks of the paths and URLs that a job from outside names."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.redaction import hide_in_word
from embedfarm.ingest.outbound import Url, UrlRefused, parse_url

# Dots, slashes, backslashes, control characters, and the percent sign that would hide them.
_HIDDEN: Final = re.compile(r"%(2e|2f|5c|25|[01][0-9a-f])", re.IGNORECASE)


class PathRefused(EmbedfarmError, ValueError):
    """Raised when a path is outside the directories that are allowed; the message names both."""

    exit_status = 2


def allow(path: str, roots: Sequence[Path]) -> Path:
    """Return the path, absolute and without symbolic links, if it is below one of the roots.

    Raises:
        PathRefused: The path is not below a root, or there are no roots.
    """
    if not roots:
        raise PathRefused("no path is allowed: ingest_roots is empty")
    found = Path(path).resolve()
    allowed = [root.expanduser().resolve() for root in roots]
    if not any(found.is_relative_to(root) for root in allowed):
        names = ", ".join(map(str, allowed))
        raise PathRefused(f"{hide_in_word(path)!r} is not below one of ingest_roots ({names})")
    return found


def allow_source(path: str, roots: Sequence[Path], barred: Path | None = None) -> Path:
    """Return the resolved path of a corpus that exists, with all its files, below the roots.

    Args:
        path: Path of the corpus.
        roots: Directories that are allowed.
        barred: A directory of which no file may be in the corpus, nor may it be told what is there.

    Raises:
        PathRefused: The corpus is not there, a link in it leads outside, or a file is barred.
    """
    found = allow(path, roots)
    _keep_out(path, found, barred)
    if not found.exists():
        # A name that does not exist may still be a pattern or a URL, which nobody has checked.
        raise PathRefused(
            f"{hide_in_word(path)!r} is no file and no directory; patterns, and URLs but http, are "
            "not allowed"
        )
    for directory, _, files in os.walk(found):
        for file in (Path(directory, name) for name in files):
            if file.is_symlink():
                _keep_out(path, allow(str(file), roots), barred)
    return found


def _keep_out(path: str, found: Path, barred: Path | None) -> None:
    """Refuse a path that lies in the barred directory, or in which that directory lies."""
    if barred and (found.is_relative_to(barred) or barred.is_relative_to(found)):
        raise PathRefused(f"{path!r} has, or is, the inputs and outputs of jobs by HTTP")


def is_url(name: str) -> bool:
    """Tell whether a corpus is meant to be fetched."""
    return name.lower().startswith(("http://", "https://"))


def allow_url(text: str, prefixes: Sequence[str]) -> Url:
    """Return a URL that is one of the prefixes, or below one of them; its query may be any.

    Raises:
        UrlRefused: The URL is not below a prefix, or its path could mean another one.
    """
    url = parse_url(text)
    if not any(_is_below(url, parse_url(prefix)) for prefix in prefixes):
        names = ", ".join(map(hide_in_word, prefixes)) or "empty"
        raise UrlRefused(f"{url.place} is not below one of ingest_urls ({names})")
    steps = {segment.partition(";")[0] for segment in url.path.split("/")}
    if _HIDDEN.search(url.path) or not steps.isdisjoint({".", ".."}):
        raise UrlRefused(f"{url.place} has dots or encoded characters that could lead elsewhere")
    return url


def _is_below(url: Url, prefix: Url) -> bool:
    same_place = url[:3] == prefix[:3]
    return same_place and (url.path + "/").startswith(prefix.path.removesuffix("/") + "/")
