"""Corpora that are fetched: a file per URL, beside the vectors that are made of it.

The file stays as long as the output does, so that a run that comes again finds its corpus under the
same name. It asks the server whether there is another one by now.
"""

import fcntl
import filecmp
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urljoin

import httpcore2
import msgspec

from embedfarm.contract.private_directories import make_private
from embedfarm.contract.redaction import name_source
from embedfarm.contract.settings import Settings
from embedfarm.ingest.allow_list import allow_url
from embedfarm.ingest.outbound import RequestFailed, Url, header, send

DIRECTORY: Final = ".corpus"  # in an output directory
FACTS_FILE, LOCK_FILE = ".facts.json", ".lock"
ASIDE_DIRECTORY: Final = ".aside"  # beside a copy, for what a check compares
REDIRECTS_MAX: Final = 5
MOVED: Final = frozenset({301, 302, 303, 307, 308})
OK, UNCHANGED = 200, 304
NAME_CHARACTERS_MAX: Final = 100

_ODD: Final = re.compile(r"[^A-Za-z0-9._-]")


class Validators(msgspec.Struct, frozen=True):
    """What tells one state of a resource from another; "" and -1 where the server does not say."""

    etag: str = ""
    last_modified: str = ""
    size: int = -1


UNKNOWN: Final = Validators()


def places_of(urls: Iterable[Url], out: Path) -> dict[Url, Path]:
    """Return the path of each file of an output's corpus; its name ends as the URL's path does.

    Other signatures of the same URLs give the same paths. Of URLs that differ in nothing but what
    may be a signature, each has a path of its own, by their order.
    """
    places: dict[Url, Path] = {}
    alike: Counter[str] = Counter()
    for url in dict.fromkeys(urls):
        name = _ODD.sub("_", url.path.rpartition("/")[2]).lstrip(".")[-NAME_CHARACTERS_MAX:]
        key = hashlib.sha256(name_source(str(url)).encode()).hexdigest()[:16]
        alike[key] += 1
        directory = key if alike[key] == 1 else f"{key}-{alike[key]}"
        places[url] = out / DIRECTORY / directory / (name or "corpus")
    return places


def fetch(url: Url, path: Path, settings: Settings, watch: Callable[[int], object]) -> Path:
    """Fetch the resource at a URL to `path`, unless an unchanged copy is there already.

    Where the server sends neither ETag nor Last-Modified, it is fetched and compared with that.

    Args:
        url: URL below one of `ingest_urls`.
        path: Path of the file; what its directory has beside it belongs to this module.
        settings: Limits, and the URLs that redirects may lead to.
        watch: Called with the number of bytes that have come, after each piece.

    Returns:
        That path.

    Raises:
        UrlRefused: The address is not public, or a redirect leads to where nothing is allowed.
        RequestFailed: The file cannot be had now, is too large, takes too long, or is being
            fetched already.
    """
    with _locked(url, path):
        return _fetch(url, path, path, settings, watch)


@contextmanager
def fetch_aside(
    url: Url, path: Path, settings: Settings, watch: Callable[[int], object]
) -> Iterator[Path]:
    """Yield the path of what is at a URL now; arguments and errors are those of `fetch`.

    An unchanged copy at `path` is yielded itself. One that has changed since stays, and what the
    URL has now is elsewhere, until the end of the block.
    """
    if not path.exists():
        yield fetch(url, path, settings, watch)
        return
    aside = path.parent / ASIDE_DIRECTORY / path.name
    with _locked(url, aside):
        try:
            yield _fetch(url, path, aside, settings, watch)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def _locked(url: Url, path: Path) -> Iterator[None]:
    """Let nobody else fetch to a path."""
    make_private(path.parent)
    with (path.parent / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RequestFailed(f"{url.place} is being fetched for {path} already") from error
        yield


def _fetch(
    url: Url, path: Path, target: Path, settings: Settings, watch: Callable[[int], object]
) -> Path:
    """Fetch to `target`, and return it; return `path` instead if the copy there is unchanged."""
    known = _read_facts(path.with_name(FACTS_FILE)) if path.exists() else UNKNOWN
    asked = _conditions(known)
    with _follow(url, asked, settings) as response:
        found = Validators(
            header(response, "etag"),
            header(response, "last-modified"),
            _read_size(header(response, "content-length")),
        )
        if asked and (response.status == UNCHANGED or found == known):  # a size alone tells nothing
            return path
        _check(url, response, found.size, settings)
        note = target.with_name(FACTS_FILE)
        note.unlink(missing_ok=True)
        size = _save(response, target, settings.fetch_bytes_max, watch)
    note.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, size=size)))
    return target


def _read_facts(note: Path) -> Validators:
    """Return the facts of the file that is there; none of one not fetched to its end."""
    try:
        return msgspec.json.decode(note.read_bytes(), type=Validators)
    except (FileNotFoundError, msgspec.MsgspecError):
        return UNKNOWN


def _conditions(known: Validators) -> dict[str, str]:
    """Return headers that ask for a body only if it is another than the known one."""
    asked = {"if-none-match": known.etag, "if-modified-since": known.last_modified}
    return {name: value for name, value in asked.items() if value}


@contextmanager
def _follow(
    url: Url, headers: Mapping[str, str], settings: Settings
) -> Iterator[httpcore2.Response]:
    """Yield the answer at the end of all redirects, each of which must be allowed."""
    deadline = time.monotonic() + settings.fetch_seconds_max
    for _ in range(REDIRECTS_MAX + 1):
        with send(url, headers, hosts=settings.outbound_hosts, deadline=deadline) as response:
            if response.status not in MOVED:
                yield response
                return
            target = urljoin(str(url), header(response, "location"))
        url = allow_url(target, settings.ingest_urls)
    raise RequestFailed(f"{url.place}: more than {REDIRECTS_MAX} redirects")


def _read_size(value: str) -> int:
    return int(value) if value.isdecimal() else -1


def _check(url: Url, response: httpcore2.Response, size: int, settings: Settings) -> None:
    """Refuse an answer that is no file, that is packed, or that says that it is too large."""
    if response.status != OK:
        raise RequestFailed(f"{url.place}: the server answers {response.status}")
    packed = header(response, "content-encoding")
    if packed not in {"", "identity"}:
        raise RequestFailed(f"{url.place}: the server packs it ({packed!r}) without being asked")
    if size > settings.fetch_bytes_max:
        raise RequestFailed(f"{url.place}: {size:,} bytes, more than fetch_bytes_max")


def _save(
    response: httpcore2.Response, path: Path, size_max: int, watch: Callable[[int], object]
) -> int:
    """Write the body to its place once it is whole and on the disk; return its size in bytes.

    A file with the same bytes stays, and with it all that goes by the time of its change.
    """
    partial = path.with_name(".partial")
    size = 0
    try:
        with partial.open("wb") as file:
            for piece in response.iter_stream():
                size += len(piece)
                if size > size_max:
                    raise RequestFailed(f"{path.name}: more bytes than fetch_bytes_max")
                file.write(piece)
                watch(size)
            file.flush()
            os.fsync(file.fileno())
        filecmp.clear_cache()  # it knows files by times, which may be those of one moment
        if not path.exists() or not filecmp.cmp(partial, path, shallow=False):
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return size
