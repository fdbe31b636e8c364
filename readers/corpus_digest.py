"""Digests of what stores say about the files of a corpus, by which it is seen to have changed."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fsspec.implementations.local import LocalFileSystem

from embedfarm.readers import lance
from embedfarm.readers.corpus import CorpusOptions
from embedfarm.readers.directory import find, locate
from embedfarm.readers.source import Location

# A file that was changed so short a time ago may be changed again without another time of change.
FRESH_SECONDS: Final = 2.0
# Of what stores say about a file, what changes with its content.
_TELLING: Final = (
    "etag", "ETag", "e_tag", "blob_id", "md5Hash", "content_md5", "generation", "version_id",
    "checksum", "mtime", "LastModified", "last_modified", "updated", "Last-Modified",
)  # fmt: skip


class CorpusDigest(NamedTuple):
    """Digest of what stores say about all files of a corpus.

    Attributes:
        digest: Changes when one of them does, or others are there; "" where no store can tell.
        settled: Whether an equal digest later proves that nothing has changed since.
    """

    digest: str
    settled: bool


def look_at(sources: Sequence[str], options: CorpusOptions) -> CorpusDigest:
    """Return the facts of a corpus as they are now.

    Raises:
        CorpusError: A source is missing.
        OSError: A source cannot be looked at.
    """
    digest = hashlib.sha256()
    changed_ns = 0
    for source in sources:
        for location in locate(source, options.glob):
            for name, facts in _look(location, options):
                if facts is None:
                    return CorpusDigest("", settled=False)
                digest.update(f"{name!r} {facts!r}\n".encode())
                changed_ns = max(changed_ns, facts[-1] if isinstance(facts[-1], int) else 0)
    age_seconds = (time.time_ns() - changed_ns) / 1e9
    return CorpusDigest(digest.hexdigest(), settled=age_seconds > FRESH_SECONDS)


def _look(
    location: Location, options: CorpusOptions
) -> Iterator[tuple[str, tuple[Any, ...] | None]]:
    """Yield each file with what tells whether it has changed; None where nothing does."""
    if location.is_stdin or location.is_database:
        yield location.name, None
    elif location.is_lance:
        yield location.path, lance.facts(location.path, location.name)
    elif location.is_directory:
        for _, entry in find(location, options.glob):
            yield entry["name"], _facts_of(location, entry["name"])
    else:
        yield location.path, _facts_of(location, location.path)


def _facts_of(location: Location, path: str) -> tuple[Any, ...] | None:
    """Return a local file's size, place and times of change; of others what their store says.

    A link that leads nowhere has those of the link.
    """
    if isinstance(location.filesystem, LocalFileSystem):
        file = Path(path)
        status = file.stat(follow_symlinks=file.exists())
        return status.st_size, status.st_ino, status.st_dev, status.st_mtime_ns, status.st_ctime_ns
    info = location.filesystem.info(path)
    telling = {name: str(info[name]) for name in _TELLING if info.get(name)}
    return (info.get("size"), str(sorted(telling.items()))) if telling else None
