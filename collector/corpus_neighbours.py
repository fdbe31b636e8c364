"""Outputs and copies beside their corpus, and not in it, where they would be read with it."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from embedfarm.collector.manifest import (
    CHANGES_FILE,
    ERRORS_FILE,
    IDS_FILE,
    MANIFEST_FILE,
    SAMPLE_FILE,
    SKIPPED_FILE,
    OutputError,
)
from embedfarm.collector.sinks import sink_kind
from embedfarm.readers.directory import would_take

LISTS: Final = (MANIFEST_FILE, ERRORS_FILE, SKIPPED_FILE, CHANGES_FILE, SAMPLE_FILE)
"""Files of outputs that hold no vectors, and that somebody may take for rows or documents."""


def names_of_output(sink: str) -> list[str]:
    """Return names of files such as an output in a format has."""
    ids = [IDS_FILE] if re.fullmatch(sink_kind(sink).files, IDS_FILE) else []
    return [f"part-{0:012}.{sink}", *ids, *LISTS]


def check_apart(target: Path, names: Iterable[str], sources: Sequence[str], glob: str) -> None:
    """Refuse a directory whose files would be of a corpus when that is read once more.

    Args:
        target: The directory.
        names: Paths of its files below it.
        sources: The corpus.
        glob: What files of its directories match.

    Raises:
        OutputError: They would.
    """
    files = [target / name for name in names]
    for source in sources:
        if any(would_take(source, glob, file) for file in files):
            raise OutputError(
                f"{target} would be in its own corpus, {source}, and be read with it: choose an "
                "--out elsewhere; an output that is begun already can be moved there"
            )
