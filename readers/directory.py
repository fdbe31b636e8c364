"""A directory: files of rows, or documents that are cut into chunks."""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Final

from fsspec import AbstractFileSystem
from fsspec.utils import glob_translate

from embedfarm.readers.items import BadRow, Item, is_unicode
from embedfarm.readers.source import (
    TABLES,
    Cursor,
    Location,
    find_locations,
    open_binary,
    printable,
    split_compression,
)

DOCUMENT_BYTES_MAX: Final = 256 << 20
"""A larger file is refused: a document is decoded whole before it is cut."""


def locate(source: str, glob: str) -> list[Location]:
    """Find what a source names; in place of a directory of files of rows those files, by path.

    Such a directory has, of the files that match `glob`, only ones of the same format, beside those
    whose names begin with `_`, which say something about the others. A file comes once though a
    source that is a glob matches both it and a directory that it is in.

    Raises:
        CorpusError: The source names nothing that exists.
    """
    opened = (each for location in find_locations(source) for each in _open_up(location, glob))
    return list({each.path: each for each in opened}.values())


def would_take(source: str, glob: str, path: Path) -> bool:
    """Tell whether a file would be one of a source's, in a place where there may be none yet.

    Args:
        source: The source: of paths on this machine directories and globs can have such files.
        glob: What files of a directory have to match.
        path: Path of the file.
    """
    source = source.removeprefix("file://")
    if not source or "://" in source or Path(source).is_file():
        return False
    place, path = Path(source).resolve(), path.resolve()
    if place.is_dir():
        return path.is_relative_to(place) and _would_find(place, glob, path)
    is_match = re.compile(glob_translate(str(place))).match
    return bool(is_match(str(path))) or any(
        _would_find(each, glob, path) for each in path.parents if is_match(str(each))
    )


def _would_find(directory: Path, glob: str, path: Path) -> bool:
    """Tell whether a file would be found in a directory that is above it."""
    relative = path.relative_to(directory)
    is_hidden = any(part.startswith(".") for part in relative.parts)
    if is_hidden > _sees_hidden(glob) or not re.match(glob_translate(glob), str(relative)):
        return False
    if not path.name.startswith("_") or not directory.is_dir():
        return True
    return any(each.is_directory for each in locate(str(directory), glob))


def _open_up(location: Location, glob: str) -> list[Location]:
    """Return the files of a directory of rows, and any other location itself."""
    if not location.is_directory:
        return [location]
    found = (PurePosixPath(path) for path, _ in find(location, glob))
    paths = [path for path in found if not path.name.startswith("_")]
    formats = {_format_of(path) for path in paths}
    if len(formats) != 1 or None in formats:
        return [location]
    name, place = location.name.rstrip("/"), location.path.rstrip("/")
    return [
        location._replace(
            name=printable(f"{name}/{path}"), path=f"{place}/{path}", is_directory=False
        )
        for path in paths
    ]


def _format_of(path: PurePosixPath) -> str | None:
    """Return the format of a file of rows by its name; None for any other file."""
    return TABLES.get(PurePosixPath(split_compression(path.name)[0]).suffix.lower())


def read(
    directory: Location,
    glob: str,
    encoding: str,
    cut: Callable[[str], Iterator[str]],
    cursor: Cursor,
) -> Iterator[Item]:
    """Yield the chunks of all files whose paths below the directory match `glob`, by path.

    The id of a chunk is "path/below/the/directory#n", n from 0 in each file. A file that cannot be
    read or is not text is one bad row. Links to directories are not followed: they can form a ring.
    """
    for relative, entry in find(directory, glob)[cursor.offset :]:
        try:
            text = _read_document(directory.filesystem, entry, relative, encoding)
        except (OSError, UnicodeError) as error:
            name = printable(f"{directory.name.rstrip('/')}/{relative}")
            yield BadRow(name, None, None, f"not a readable UTF-8 text: {error}")
        else:
            for number, chunk in islice(enumerate(cut(text)), cursor.line, None):
                cursor.line = number + 1
                yield chunk, f"{relative}#{number}"
        cursor.offset, cursor.line = cursor.offset + 1, 0


def find(directory: Location, glob: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the matching paths below the directory, sorted, with the file system's entries.

    As in a shell, files and directories whose name begins with a dot are left out, unless the glob
    names such ones: there are keys in `.env`, and nobody wants the objects of `.git`.
    """
    # `walk` can be told to raise at a directory it may not list; `find` would pass over it.
    walk = directory.filesystem.walk(directory.path, detail=True, on_error="raise")
    entries = (entry for files in _see(walk, hidden=_sees_hidden(glob)) for entry in files.values())
    above = len(directory.path.rstrip("/")) + 1
    paths = ((entry["name"][above:], entry) for entry in entries)
    matches = re.compile(glob_translate(glob)).match
    return sorted((item for item in paths if matches(item[0])), key=lambda item: item[0])


def _sees_hidden(glob: str) -> bool:
    """Tell whether a glob names files or directories that begin with a dot."""
    return any(part.startswith(".") for part in glob.split("/"))


def _see(walk: Iterator[Any], *, hidden: bool) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the files of each directory; of those with a dot none, unless they are asked for."""
    for _, directories, files in walk:
        if not hidden:
            for entries in (directories, files):
                for name in [name for name in entries if name.startswith(".")]:
                    del entries[name]  # a directory that is taken away is not walked through
        yield files


def _read_document(
    filesystem: AbstractFileSystem, entry: dict[str, Any], relative: str, encoding: str
) -> str:
    """Return a file's text without byte order mark, or raise `OSError` or `UnicodeError`."""
    if not is_unicode(relative):
        raise OSError("its name is not UTF-8, so its chunks could have no ids")
    if entry["type"] != "file" and not filesystem.isfile(entry["name"]):
        raise OSError("neither a file nor a link to one")
    with open_binary(filesystem, entry["name"]) as file:
        content = file.read(DOCUMENT_BYTES_MAX + 1)
    if len(content) > DOCUMENT_BYTES_MAX:
        raise OSError(f"larger than {DOCUMENT_BYTES_MAX >> 20} MiB")
    return content.decode(encoding).removeprefix("\ufeff")
