"""A request brought to its end: embedded unless it is already, or its failed chunks tried again."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from embedfarm.collector.corpus_neighbours import check_apart, names_of_output
from embedfarm.collector.manifest import Manifest, OutputError
from embedfarm.collector.store_export import ExportReport
from embedfarm.contract.scheduling_terms import USUAL, Terms
from embedfarm.readers.items import CorpusError, is_unicode
from embedfarm.readers.source import printable
from embedfarm.runs.ending import tidy
from embedfarm.runs.fingerprint import check_files
from embedfarm.runs.place import Place
from embedfarm.runs.request import Request, check_finished
from embedfarm.runs.retry import retry_failed
from embedfarm.runs.run import Run, Show
from embedfarm.runs.store_feed import Destination, StoreFeed
from embedfarm.runs.versions import pin_versions


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
        CorpusError: The name of a source, or of the output, is not UTF-8.
        EmbedfarmError: The request cannot be done; see `Run.embed`, `retry_failed` and
            `StoreExport.finish`.
    """
    _check_names(request, place.out)
    names = names_of_output(request.sink)
    check_apart(place.out, names, request.sources, request.options.glob)
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


def _check_names(request: Request, out: Path) -> None:
    """Refuse names that no manifest and no record could hold.

    Raises:
        CorpusError: One is not UTF-8.
    """
    for name in (*request.sources, str(out)):
        if not is_unicode(name):
            raise CorpusError(f"{printable(name)} is not UTF-8: rename it")
