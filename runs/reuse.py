"""Finished outputs whose vectors a run takes for the texts that they have."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from embedfarm.collector.changes import write_changes
from embedfarm.collector.known_vectors import Known, KnownVectors
from embedfarm.collector.linked_parts import LinkedParts
from embedfarm.collector.manifest import (
    STATE_DIRECTORY,
    Changes,
    Manifest,
    OutputError,
    read_manifest,
)
from embedfarm.collector.output import Output
from embedfarm.collector.request_comparison import describe_differences
from embedfarm.collector.text_digests import DIGESTS_FILE
from embedfarm.contract.canaries import Canaries, disagreement
from embedfarm.contract.job_spec import JOB_FIELDS, Decides
from embedfarm.contract.private_directories import make_private
from embedfarm.contract.settings import Settings
from embedfarm.runs.fingerprint import Fingerprint, hold_to
from embedfarm.runs.place import Place
from embedfarm.runs.request import Request

# What an output's manifest has that decides about the bits of a vector, beside the fingerprint.
DECIDING: Final = [name for name, each in JOB_FIELDS.items() if each.decides >= Decides.STORAGE]


def find_reusable(request: Request, directories: Iterable[Path]) -> list[Known]:
    """Return outputs whose vectors are those that a request asks for.

    Raises:
        OutputError: One is not finished, has no digests of its texts, does not say which model made
            it, or was made in another way than the request asks for, or with another model than
            the one before.
    """
    found: list[Known] = []
    asked = request.identity()
    for directory in directories:
        manifest = read_manifest(directory)
        words = describe_differences(
            {name: manifest.settings.get(name) for name in DECIDING},
            {name: asked.get(name) for name in DECIDING},
        )
        if words:
            raise OutputError(f"{directory} cannot be reused: {words}")
        if not manifest.digests_sha256:
            raise OutputError(
                f"{directory} has no {DIGESTS_FILE}, by which its texts are known again: an "
                "earlier version made it, or its texts were not compared with their source"
            )
        if not manifest.fingerprint:
            raise OutputError(f"{directory} does not say which model made it")
        if found:
            _compare(found[0], directory, manifest)
        found.append(Known(directory, manifest))
    return found


def _compare(first: Known, directory: Path, manifest: Manifest) -> None:
    """Refuse an output that was made with another model than the first one, or stored otherwise."""
    words = describe_differences(first.manifest.fingerprint, manifest.fingerprint)
    if words:
        raise OutputError(f"{directory} and {first.directory} are of two models: {words}")
    _compare_canaries(first.directory, first.manifest, directory, manifest.canaries)
    layouts = {(each.dimensions, each.dtype) for each in (first.manifest, manifest)}
    if len(layouts) > 1:
        has = " and ".join(f"{count} {dtype}" for count, dtype in sorted(layouts))
        raise OutputError(f"{directory} has vectors of another kind than those before: {has}")


def _compare_canaries(
    directory: Path, manifest: Manifest, other: Path, canaries: Canaries | None
) -> None:
    """Refuse an output whose model has the same files as another one's and makes other vectors."""
    known = manifest.canaries
    if known is not None and canaries is not None:
        words = disagreement(known, canaries, manifest.fingerprint.get("dtype", ""))
        if words:
            raise OutputError(f"{other} has other vectors than {directory} for one model: {words}")


def link_parts(request: Request, place: Place, outputs: Sequence[Known]) -> LinkedParts | None:
    """Return the parts whose files the output of a request may take; None where it takes none.

    Raises:
        OutputError: One of the two formats has no file for each part, or they are not the same.
    """
    if not (place.by_reference and outputs):  # a retry reuses none
        return None
    return LinkedParts(*outputs[0], request.sink)


def learn(out: Path, settings: Settings, outputs: Sequence[Known]) -> KnownVectors:
    """Learn which texts other outputs have, and hold an output's workers to their model.

    Args:
        out: The output that is filled.
        settings: The farm's limits.
        outputs: The others, by `find_reusable`.

    Raises:
        OutputError: The output was begun with another model, or another one is damaged.
        OSError: The disk refused; this may be called again.
    """
    make_private(private := out / STATE_DIRECTORY)
    if outputs:
        directory, manifest = outputs[0]
        begun = Fingerprint(out).read()
        words = describe_differences(manifest.fingerprint, begun) if begun else ""
        if words:
            raise OutputError(f"{directory} and what was begun in {out} are of two models: {words}")
        _compare_canaries(directory, manifest, out, Fingerprint(out).read_canaries())
        if not begun:
            hold_to(out, manifest.fingerprint, manifest.canaries)
    return KnownVectors(private / "known", settings.reuse_bytes_max, out, outputs)


def list_changes(output: Output, known: KnownVectors | None) -> Changes | None:
    """List how the chunks of an output differ from those of the first one that it reuses.

    Args:
        output: The output, all of whose parts are on the disk.
        known: The vectors that were reused, if any were.

    Returns:
        What is in the list; None where no output is reused, or one of the two has no ids.

    Raises:
        OutputError: A part is damaged, or gone.
        OSError: The disk refused; this may be called again.
    """
    if known is None or not known.outputs:
        return None
    directory, manifest = known.outputs[0]
    if not (output.comparable and manifest.ids):
        return None
    index = output.directory / STATE_DIRECTORY / "ids-before"
    shutil.rmtree(index, ignore_errors=True)
    index.mkdir()
    return write_changes(output.directory, directory, manifest, index)
