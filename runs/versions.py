"""Corpora that have versions: an output is of one of them, however often its command is run."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from embedfarm.collector.manifest import read_manifest
from embedfarm.collector.output_directory import State, read_request, read_state
from embedfarm.contract.redaction import name_source
from embedfarm.readers.lance import facts, split_version
from embedfarm.readers.source import is_lance
from embedfarm.runs.request import Request, same_version

log = logging.getLogger(__name__)


def pin_versions(request: Request, out: Path) -> Request:
    """Return a request in which each Lance dataset is of one version.

    Where none is named, it is the one that the output was begun with, and else the newest.

    Raises:
        CorpusError: A dataset cannot be opened.
        OutputError: The output's request cannot be read.
    """
    if not any(map(is_lance, request.sources)):
        return request
    before = _sources_of(out)
    sources = tuple(_pin(source, before) for source in request.sources)
    return replace(request, sources=sources)


def _sources_of(out: Path) -> Sequence[str]:
    """Return the sources that an output was begun with; none if it was not begun."""
    state = read_state(out)
    if state is State.NEW:
        return ()
    said = read_manifest(out).settings if state is State.FINISHED else read_request(out)
    sources: Sequence[str] = said["sources"]
    return sources


def _pin(source: str, before: Sequence[str]) -> str:
    """Return a source with its version: that of an earlier run, or the newest.

    Args:
        source: The source.
        before: Sources that an earlier run has, by their names in records.
    """
    if not is_lance(source) or split_version(source)[1] is not None:
        return source
    newest = facts(source, name_source(source))[0]
    said = same_version(source, before)
    version = split_version(said)[1]
    if version is None:
        return f"{source.rstrip('/')}@v{newest}"
    if version != newest:
        log.warning(
            "%s has version %d now; this output is of version %d: another --out is of the newest, "
            "and with --reuse it embeds what is new only", name_source(source), newest, version,
        )  # fmt: skip
    return said
