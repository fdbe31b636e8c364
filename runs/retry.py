"""A retry of the failed chunks of a finished output: they are embedded again, and it is patched."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embedfarm.collector.column_rows import unify_dictionaries
from embedfarm.collector.column_spool import ColumnSpool
from embedfarm.collector.manifest import (
    STATE_DIRECTORY,
    Manifest,
    OutputError,
    read_failures,
    read_manifest,
)
from embedfarm.collector.output_directory import State, locked, read_state
from embedfarm.collector.patch import patch
from embedfarm.collector.sinks import ColumnSink, open_sink
from embedfarm.collector.sinks.arrow_columns import strings
from embedfarm.collector.source_check import PrefixCheck
from embedfarm.contract.broker import closing_client
from embedfarm.contract.durable_files import replacing
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.private_directories import make_private
from embedfarm.contract.records import text_checksums
from embedfarm.readers import read_corpus
from embedfarm.readers.fields import ColumnQueue
from embedfarm.runs.fingerprint import hold_to
from embedfarm.runs.place import Place
from embedfarm.runs.request import Request, columns_of_output

TEXT: Final = "text"  # the field of a text that is tried again

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
            hold_to(inner, manifest.fingerprint, manifest.canaries)
            again = _write_corpus(state / inner.name, request, place.out, manifest)
            embed(again, replace(place, out=inner, job_id=""))
        manifest = patch(place.out, inner)
        shutil.rmtree(state)
    if place.settings.redis_url:
        with closing_client(place.settings.redis_url) as client:
            FarmClient(client).job(manifest.job).retried(manifest.failed)
    return manifest


def _write_corpus(base: Path, request: Request, out: Path, manifest: Manifest) -> Request:
    """Put the texts that failed into a file, with the columns that are kept beside vectors.

    Args:
        base: Path of the file, without its suffix.
        request: Request that the output belongs to.
        out: The output.
        manifest: Its manifest.

    Returns:
        The request to embed that file.

    Raises:
        SourceChanged: The source has other rows than the output was made from.
    """
    schema = _columns_of(out, manifest)
    if schema is None:
        corpus = base.with_suffix(".jsonl")
        with replacing(corpus) as file:
            for texts, _ in _failed_rows(request, out, manifest, None):
                file.writelines(msgspec.json.encode({TEXT: text}) + b"\n" for text in texts)
        return request.of_texts(corpus, TEXT, ())
    corpus, text = base.with_suffix(".parquet"), TEXT
    while text in schema.names:
        text += "_"
    spool = ColumnSpool(base.with_suffix(".columns"), schema)
    field = pa.field(text, pa.string())
    with (
        replacing(corpus) as file,
        pq.ParquetWriter(file, schema.append(field)) as writer,
    ):
        for texts, table in _failed_rows(request, out, manifest, spool):
            for rows in unify_dictionaries(table.append_column(field, strings(texts))):
                writer.write_table(rows)
    return request.of_texts(corpus, text, schema.names)


def _columns_of(out: Path, manifest: Manifest) -> pa.Schema | None:
    """Return the schema of the columns that an output has beside its vectors; None for none."""
    sink = open_sink(manifest.format, out)
    if not isinstance(sink, ColumnSink):
        return None
    there = sink.read_columns(manifest.parts[0], manifest.layout)
    return None if there is None else there.table.schema


def _failed_rows(
    request: Request, out: Path, manifest: Manifest, spool: ColumnSpool | None
) -> Iterator[tuple[list[str], pa.Table]]:
    """Yield the texts that failed, in their order, and their columns if there is a spool for them.

    Raises:
        SourceChanged: The source has other rows than the output was made from.
    """
    check, columns = PrefixCheck(manifest.parts), columns_of_output(out, manifest)
    held = ColumnQueue()
    failures = read_failures(out)
    first, wanted = 0, next(failures, None)
    if spool is not None:
        spool.begin(0, 0)
    for rows in read_corpus(
        request.sources, request.options, lambda _: None,
        columns=None if spool is None else held,
    ):  # fmt: skip
        check.feed(text_checksums(rows.texts), rows.ids)
        while spool is not None and columns is not None and held:
            spool.put(held[0])
            columns.feed(held.popleft())
        failed = np.zeros(len(rows.texts), np.bool_)
        while wanted is not None and wanted.index < first + len(failed):
            failed[wanted.index - first] = True
            wanted = next(failures, None)
        if failed.any():
            texts = [rows.texts[row] for row in np.flatnonzero(failed).tolist()]
            yield texts, None if spool is None else spool.take(first, failed)
        first += len(failed)
        if spool is not None:
            spool.forget(first)
    check.finish()
