"""Texts of a job's chunks, read from its corpus, where that may and can be read here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from embedfarm.contract.settings import Settings
from embedfarm.ingest.allow_list import PathRefused, allow_source
from embedfarm.readers.items import CorpusError
from embedfarm.runs.embedded_texts import NOTHING, read_texts

SHOWN_CHARACTERS_MAX: Final = 2000  # shown of each chunk


def chunk_texts(
    out: Path,
    identity: Mapping[str, Any],
    indices: Sequence[int],
    settings: Settings,
    checksums: Mapping[int, bytes] = NOTHING,
) -> dict[int, str]:
    """Return the beginnings of some chunks' texts by index; this reads the corpus up to them.

    There are none where the corpus lies below no allowed directory, is not there any more, cannot
    be read, or is larger than `http_search_bytes_max`; and none for a row that has another text
    than the one that was embedded.

    Args:
        out: The output.
        identity: The `Request.identity` that the output was made for.
        indices: Indices of the chunks.
        settings: Settings with the allowed directories and the limit.
        checksums: The `text_checksums` of chunks that are not on the disk yet, by index.
    """
    try:
        found = [allow_source(each, settings.task_roots) for each in identity["sources"]]
        if sum(map(_size, found)) > settings.http_search_bytes_max:
            return {}
        texts = read_texts(out, identity, indices, settings, checksums)
    except (PathRefused, CorpusError, OSError):
        return {}
    return {index: text[:SHOWN_CHARACTERS_MAX] for index, text in texts.items()}


def _size(source: Path) -> int:
    """Return the size in bytes of a file, or of all files of a directory."""
    files = source.rglob("*") if source.is_dir() else [source]
    return sum(each.stat().st_size for each in files if each.is_file())
