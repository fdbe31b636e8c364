"""Export of a finished output into another format."""

import shutil
from itertools import islice
from pathlib import Path

import msgspec

from embedfarm.collector.corpus_neighbours import check_apart, names_of_output
from embedfarm.collector.manifest import (
    ERRORS_FILE,
    SKIPPED_FILE,
    STATE_DIRECTORY,
    Manifest,
    OutputError,
    check_bytes,
    find_listing,
    read_failures,
    read_manifest,
    write_manifest,
)
from embedfarm.collector.output_directory import (
    State,
    check_sizes,
    list_output_files,
    locked,
    read_state,
)
from embedfarm.collector.sinks import ColumnSink, keeps_columns, lists_stored, open_sink
from embedfarm.collector.sinks.part_rows import spread
from embedfarm.contract.durable_files import remove_temporaries, replacing, sync_directory
from embedfarm.readers.corpus import CorpusOptions

ORIGIN_FILE = "export.json"


def export(directory: Path, target: Path, sink: str) -> Manifest:
    """Write the vectors of a finished output into another directory, and return its manifest.

    The parts are the same chunks, so that what ties them to their texts stays true, and the command
    that made the one output finds the other one finished, if it names its format. An interrupted
    export begins again; one that is done stays as it is. Memory holds one part. Columns of the
    corpus go along into a format that has a place for them.

    Raises:
        OutputError: There is no finished output, `target` holds another one or would be read with
            the corpus, or the format does not hold vectors itself.
        OSError: The disk refuses.
    """
    if lists_stored(sink):
        raise OutputError(f"{sink} lists what workers have stored, and takes no other vectors")
    manifest = read_manifest(directory)
    said = manifest.settings
    glob = said.get("read_glob", CorpusOptions.glob)
    check_apart(target, names_of_output(sink), said.get("sources", ()), glob)
    private = target / STATE_DIRECTORY
    if read_state(target) is State.FINISHED:
        return _check_same(manifest, target, sink)
    with locked(private):
        origin = private / ORIGIN_FILE
        if not origin.exists() and list_output_files(target):
            raise OutputError(f"{target} holds files of another output")
        if read_state(target) is State.UNFINISHED:
            raise OutputError(f"{target} is another output, which is not finished")
        origin.touch()
        remove_temporaries(target)
        for name in list_output_files(target):  # of an export that was cut off
            (target / name).unlink()
        exported = write_manifest(target, _write(directory, manifest, target, sink))
        sync_directory(target)
        shutil.rmtree(private)
    return exported


def _check_same(manifest: Manifest, target: Path, sink: str) -> Manifest:
    """Return the manifest of `target`, if it is an export of this output in this format."""
    there = read_manifest(target)
    if (there.job, there.created, there.format) != (manifest.job, manifest.created, sink):
        raise OutputError(f"{target} is finished, and not an export of this output as {sink}")
    check_sizes(target, (span for part in there.parts for span in part.spans(target)))
    return there


def _write(directory: Path, manifest: Manifest, target: Path, sink: str) -> Manifest:
    """Write all parts, and return the manifest that lists them."""
    source, destination = open_sink(manifest.format, directory), open_sink(sink, target)
    failures, kept = read_failures(directory), keeps_columns(sink)
    destination.resume([])
    parts = []
    for part in manifest.parts:
        check_bytes(directory, part)
        vectors = source.read(part, manifest.layout)
        batch = spread(vectors, part, list(islice(failures, part.errors)))
        if kept and isinstance(source, ColumnSink):
            columns = source.read_columns(part, manifest.layout)
            batch = batch._replace(columns=None if columns is None else columns.table)
        written = msgspec.structs.asdict(destination.write(batch))
        parts.append(msgspec.structs.replace(part, **written))
    destination.finish(manifest.count, manifest.layout)
    skipped = [SKIPPED_FILE] * find_listing(directory, SKIPPED_FILE).exists()
    for name in [ERRORS_FILE] * bool(manifest.failed) + skipped + list(manifest.lists):
        with find_listing(directory, name).open("rb") as file, replacing(target / name) as copy:
            shutil.copyfileobj(file, copy)
    settings = manifest.settings | {"format": sink}
    if not kept:  # so it is the output of the command without --keep
        settings.pop("read_keep", None)
    return msgspec.structs.replace(manifest, format=sink, settings=settings, parts=parts)
