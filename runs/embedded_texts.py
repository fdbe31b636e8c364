"""Texts of an output's chunks, read from its source again, where they are those embedded then."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from embedfarm.collector.manifest import ManifestError, read_manifest
from embedfarm.collector.text_digests import DIGEST_BYTES, DIGESTS_FILE, text_digests
from embedfarm.contract.records import text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.readers.lance import split_version
from embedfarm.runs.request import file_facts, read_again

NOTHING: Final[Mapping[int, bytes]] = MappingProxyType({})


def read_texts(
    out: Path,
    identity: Mapping[str, Any],
    indices: Sequence[int],
    settings: Settings,
    checksums: Mapping[int, bytes] = NOTHING,
) -> dict[int, str]:
    """Return the texts of some chunks by index, as far as the source has them as they were.

    There are none where the corpus is not where it was, and none for a row that has another text
    now. The source is read up to the last of the rows.

    Args:
        out: The output, finished or not, which has the digests of the texts that are on the disk.
        identity: The `Request.identity` that it was made for.
        indices: Indices of the chunks.
        settings: Settings, which say where models are kept.
        checksums: The `text_checksums` of chunks that are not on the disk yet, by index.
    """
    sources = identity["sources"]
    if not all(Path(split_version(source)[0]).exists() for source in sources):
        return {}
    digests = _read_digests(out, indices)
    texts: dict[int, str] = {}
    first = 0
    for rows in read_again(identity, sources, settings):
        end = first + len(rows.texts)
        texts |= {index: rows.texts[index - first] for index in indices if first <= index < end}
        first = end
        if first > max(indices, default=-1):
            break
    unknown = texts.keys() - digests.keys() - checksums.keys()
    unchanged = bool(unknown) and _is_unchanged(out, sources)

    def is_same(index: int, text: str) -> bool:
        """Tell whether a text is the one that was embedded."""
        if index in digests:
            return digests[index] == text_digests([text])
        if index in checksums:
            return checksums[index] == text_checksums([text])
        return unchanged

    return {index: text for index, text in texts.items() if is_same(index, text)}


def _read_digests(out: Path, indices: Iterable[int]) -> dict[int, bytes]:
    """Return the digests of some texts by index, as far as the output has them on the disk."""
    path, digests = out / DIGESTS_FILE, dict[int, bytes]()
    if path.exists():
        with path.open("rb") as file:
            for index in indices:
                file.seek(index * DIGEST_BYTES)
                digests[index] = file.read(DIGEST_BYTES)
    return {index: digest for index, digest in digests.items() if len(digest) == DIGEST_BYTES}


def _is_unchanged(out: Path, sources: Sequence[str]) -> bool:
    """Tell whether all files of a finished output's source are what they were, by size and time."""
    try:
        files = read_manifest(out).source["files"]
    except ManifestError:
        return False
    return bool(files) and files == file_facts(sources)
