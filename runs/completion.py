"""A request brought to its end: embedded unless it is already, or its failed chunks tried again."""

import re
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from embedfarm.collector.manifest import (
    CHANGES_FILE,
    ERRORS_FILE,
    IDS_FILE,
    MANIFEST_FILE,
    SAMPLE_FILE,
    SKIPPED_FILE,
    Manifest,
    OutputError,
)
from embedfarm.collector.sinks import sink_kind
from embedfarm.collector.store_export import ExportReport
from embedfarm.contract.scheduling_terms import USUAL, Terms
from embedfarm.readers.directory import would_take
from embedfarm.runs.ending import tidy
from embedfarm.runs.fingerprint import check_files
from embedfarm.runs.place import Place
from embedfarm.runs.request import Request, check_finished
from embedfarm.runs.retry import retry_failed
from embedfarm.runs.run import Run, Show
from embedfarm.runs.store_feed import Destination, StoreFeed
from embedfarm.runs.versions import pin_versions

LISTS: Final = (MANIFEST_FILE, ERRORS_FILE, SKIPPED_FILE, CHANGES_FILE, SAMPLE_FILE)
"""Files of outputs that hold no vectors, and that somebody may take for rows or documents."""


class CompletedOutput(NamedTuple):
    """A finished output.

    Attributes:
        manifest: Its manifest.
        before: The manifest that it had when it was asked for, if any.
        exported: What its export into a vector store did, if there was one.
    """

    manifest: Manifest
    before: Manifest | None
    exported: ExportReport | None = None


def complete(  # noqa: PLR0913 # the last two are for those who need them
    request: Request,
    place: Place,
    stop: threading.Event,
    view: AbstractContextManager[Show],
    terms: Terms = USUAL,
    *,
    retry: bool = False,
    reuse: Sequence[Path] = (),
    deduplicate: bool = False,
    to: Destination | None = None,
) -> CompletedOutput:
    """Embed what a request asks for, unless its output is finished.

    Args:
        request: What is to be embedded, and how.
        place: Where and by whom the work is done.
        stop: Event that ends the run, which can be resumed.
        view: Entered while there is work; gives the function that is told how it goes.
        terms: Terms of the job, if it is made here.
        retry: Whether the failed chunks of a finished output are embedded again.
        reuse: Finished outputs whose vectors are taken for the texts that they have.
        deduplicate: Whether each distinct text is embedded once, wherever it stands in the corpus.
        to: A vector store that gets the vectors as well.

    Raises:
        OutputError: Parts are to be taken by reference, and nothing is reused; the output would be
            in its own corpus; or it is finished, and the model's files have changed since.
        Interrupted: `stop` was set; the same call goes on from there.
        EmbedfarmError: The request cannot be done; see `Run.embed`, `retry_failed` and
            `StoreExport.finish`.
    """
    check_apart(request, place.out)
    if place.by_reference and not reuse:
        raise OutputError("--by-reference takes parts of an output that --reuse names")
    if to is not None:
        base = reuse[0] if reuse else None
        with StoreFeed(place.out, to, place.settings, stop, base) as feed:
            fed = replace(place, after_part=feed.after_part)
            done = complete(
                request, fed, feed.run_stop, view, terms, retry=retry, reuse=reuse,
                deduplicate=deduplicate,
            )  # fmt: skip
        return done._replace(exported=feed.finish(done.manifest))
    request = pin_versions(request, place.out)
    before = check_finished(request, place.out)
    if before is not None:
        check_files(place.out, before, request.spec, place.settings)
        tidy(place.out, before, place.settings, stop)
        if not (before.failed and retry):
            return CompletedOutput(before, before)
    with view as show:

        def embed(request: Request, place: Place) -> Manifest:
            return Run(request, place, show, stop, terms).embed()

        if before is not None:
            return CompletedOutput(retry_failed(request, place, embed), before)
        known = reuse if reuse or deduplicate else None
        return CompletedOutput(Run(request, place, show, stop, terms, known).embed(), before)


def check_apart(request: Request, out: Path) -> None:
    """Refuse an output whose files would be of its own corpus when that is read once more.

    Raises:
        OutputError: They would.
    """
    ids = [IDS_FILE] if re.fullmatch(sink_kind(request.sink).files, IDS_FILE) else []
    files = [out / name for name in (f"part-{0:012}.{request.sink}", *ids, *LISTS)]
    for source in request.sources:
        if any(would_take(source, request.options.glob, file) for file in files):
            raise OutputError(
                f"{out} would be in its own corpus, {source}, and be read with it: choose an --out "
                "elsewhere; an output that is begun already can be moved there"
            )
