"""A retry of the failed chunks of a finished output: they are embedded again, and it is patched."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from embedfarm.collector.durable_files import replacing
from embedfarm.collector.manifest import (
    STATE_DIRECTORY,
    Failure,
    Manifest,
    OutputError,
    read_failures,
    read_manifest,
)
from embedfarm.collector.output import State, locked, read_state
from embedfarm.collector.patch import patch
from embedfarm.collector.source_check import PrefixCheck
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.private_directories import make_private
from embedfarm.contract.records import text_checksums
from embedfarm.producer.readers import read_corpus
from embedfarm.runs.fingerprint import hold_to
from embedfarm.runs.place import Place
from embedfarm.runs.request import Request

Embed = Callable[[Request, Place], Manifest]


def retry_failed(request: Request, place: Place, embed: Embed) -> Manifest:
    """Embed the failed chunks of a finished output again, patch it, and return its manifest.

    These chunks are a corpus and an output of their own inside the output's state directory, where
    an interrupted retry goes on. The workers are held to the model that the output was made with.

    Args:
        request: Request that the output belongs to.
        place: Place of the finished output.
        embed: Function that embeds a request at a place, to its end.

    Raises:
        OutputError: The source has changed, or cannot be read again; another process retries.
        ModelRefused: The model's files are others now.
    """
    if "-" in request.sources:
        raise OutputError("standard input cannot be read again for the chunks that failed")
    state = place.out / STATE_DIRECTORY
    make_private(state)  # there are texts in it
    with locked(state):
        manifest = read_manifest(place.out)
        # A retry that was done when a crash came belongs to the error list of its time alone.
        inner = state / f"retry-{manifest.errors_sha256[:16]}"
        if read_state(inner) is not State.FINISHED:
            hold_to(inner, manifest.fingerprint)
            corpus = state / f"{inner.name}.jsonl"
            _write_corpus(corpus, request, manifest, read_failures(place.out))
            embed(request.of_texts(corpus), replace(place, out=inner, job_id=""))
        manifest = patch(place.out, inner)
        shutil.rmtree(state)
    if place.settings.redis_url:
        with closing_client(place.settings.redis_url) as client:
            FarmClient(client).job(manifest.job).retried(manifest.failed)
    return manifest


def _write_corpus(
    path: Path, request: Request, manifest: Manifest, failures: Iterator[Failure]
) -> None:
    """Put the texts that failed, in their order, into a file.

    Raises:
        SourceChanged: The source has other texts than the output was made from.
    """
    check = PrefixCheck(manifest.parts)
    first = 0
    wanted = next(failures, None)
    with replacing(path) as file:
        for rows in read_corpus(request.sources, request.options, lambda _: None):
            check.feed(text_checksums(rows.texts), rows.ids)
            while wanted is not None and wanted.index < first + len(rows.texts):
                row = {"text": rows.texts[wanted.index - first]}
                file.write(msgspec.json.encode(row) + b"\n")
                wanted = next(failures, None)
            first += len(rows.texts)
    check.finish()
