"""Which paths and which URLs a job from outside may name."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from producer.outbound import Url, UrlRefused, parse_url

# Dots, slashes, backslashes, control characters, and the percent sign that would hide them.
_HIDDEN: Final = re.compile(r"%(2e|2f|5c|25|[01][0-9a-f])", re.IGNORECASE)


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
            f"{path!r} is no file and no directory; patterns, and URLs but http, are not allowed"
        )
    for directory, _, files in os.walk(found):
        for file in (Path(directory, name) for name in files):
            if file.is_symlink():
                allow(str(file), roots)
    return found


def is_url(name: str) -> bool:
    """Whether a corpus is meant to be fetched."""
    return name.lower().startswith(("http://", "https://"))


def allow_url(text: str, prefixes: Sequence[str]) -> Url:
    """A URL that is one of the prefixes, or below one of them; its query may be any.

    Raises:
        UrlRefused: It is not, or its path could mean another one.
    """
    url = parse_url(text)
    if not any(_is_below(url, parse_url(prefix)) for prefix in prefixes):
        names = ", ".join(prefixes) or "empty"
        raise UrlRefused(f"{url.place} is not below one of ingest_urls ({names})")
    steps = {segment.partition(";")[0] for segment in url.path.split("/")}
    if _HIDDEN.search(url.path) or not steps.isdisjoint({".", ".."}):
        raise UrlRefused(f"{url.place} has dots or encoded characters that could lead elsewhere")
    return url


def _is_below(url: Url, prefix: Url) -> bool:
    same_place = url[:3] == prefix[:3]
    return same_place and (url.path + "/").startswith(prefix.path.removesuffix("/") + "/")
