"""`embedfarm embed`: a corpus in, vectors in order out.

The output directory holds all that a resume needs. The corpus is read again from its start, so that
it can be told whether it still is the corpus that the finished parts were made from.
"""

import contextlib
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from collector.collect import Collector
from collector.manifest import About, Manifest, PrefixCheck, SourceChanged, read_manifest
from collector.output import STATE_DIRECTORY, Output, State, compare_requests, read_state
from embedfarm import model_files
from embedfarm.broker import UNAVAILABLE, PrivateServer, connect
from embedfarm.cli.local import SERVER_DIRECTORY, LocalFarm, run_local_farm
from embedfarm.cli.progress import View
from embedfarm.farm import Farm, ModelRefused
from embedfarm.jobs import JobGone, JobStatus
from embedfarm.records import JobSpec, Rows, text_checksums
from embedfarm.settings import Settings
from producer.readers import BadRow, CorpusOptions, fail_on_bad_row, read_corpus
from producer.submit import Rewind, Submitter

VIEW_SECONDS: Final = 0.5
REFUSAL_SECONDS: Final = 2.0
SKIPPED_FILE: Final = "skipped.jsonl"


class Interrupted(RuntimeError):
    """Somebody stopped the command; the output can be resumed."""


@dataclass(frozen=True)
class Request:
    """What to embed and how; an output directory belongs to one of these.

    Attributes:
        sources: Files, directories, URLs, or "-".
        options: How they are read.
        skip_bad_rows: Whether a bad row is listed and left out, instead of ending the run.
        spec: What the job asks for.
        sink: "parquet", "npy" or "jsonl".
    """

    sources: tuple[str, ...]
    options: CorpusOptions
    skip_bad_rows: bool
    spec: JobSpec
    sink: str

    def identity(self) -> dict[str, Any]:
        """Everything that decides about the output, for comparison with another run."""
        spec = self.spec
        return {
            "sources": [_absolute(source) for source in self.sources],
            **{f"read_{name}": value for name, value in self._reading().items()},
            "skip_bad_rows": self.skip_bad_rows,
            "model": spec.model,
            "dtype": spec.dtype,
            "vector_dtype": spec.vector_dtype,
            "prompt": spec.prompt,
            "max_length": spec.max_length,
            "normalize": spec.normalize,
            "dimensions": spec.dimensions,
            "format": self.sink,
        }

    def _reading(self) -> dict[str, Any]:
        """Options that decide what is read; the tokenizer's place follows from the model."""
        return {k: v for k, v in asdict(self.options).items() if k != "tokenizer_file"}


@dataclass(frozen=True)
class Place:
    """Where and by whom the work is done.

    Attributes:
        out: The output directory.
        settings: The farm's limits; an empty `redis_url` means a private farm.
        devices: As for `--devices`, of a private farm.
        workers: CPU workers of a private farm, 0 for the default.
    """

    out: Path
    settings: Settings
    devices: str
    workers: int


@dataclass
class Run:
    """One run of the command: a producer thread, a watching thread, and the collector."""

    request: Request
    place: Place
    view: View
    stop: threading.Event
    _skipped: int = 0
    _source_sha256: str = ""
    _source_read: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def embed(self) -> Manifest:
        """Embed what is not embedded yet, and write the manifest.

        Raises:
            Interrupted: `stop` was set; the output can be resumed.
            OutputError: The directory belongs to another request, or the corpus has changed.
            CorpusError: The corpus cannot be read.
            ModelRefused: No worker can embed the job.
        """
        place = self.place
        with (
            Output(
                place.out,
                self.request.identity(),
                sink=self.request.sink,
                part_bytes_max=place.settings.part_bytes_max,
            ) as output,
            self._farm() as (url, local),
        ):
            manifest = self._drive(output, url, local)
        _remove_state(place.out)
        return manifest

    @contextlib.contextmanager
    def _farm(self) -> Iterator[tuple[str, LocalFarm | None]]:
        """The farm that is given, or a private one next to the output."""
        place = self.place
        if place.settings.redis_url:
            yield place.settings.redis_url, None
            return
        directory = place.out / STATE_DIRECTORY
        with run_local_farm(directory, place.settings, place.devices, place.workers) as local:
            yield local.url, local

    def _drive(self, output: Output, url: str, local: LocalFarm | None) -> Manifest:
        """Run producer, watcher and collector until the output is complete."""
        job = _job_id(self.place.out)
        spec, settings = self.request.spec, self.place.settings
        submitter = Submitter(Farm(connect(url)), job, spec, output.next_index, settings, self.stop)
        self._agree(Farm(connect(url)), job)
        self._start("producer", lambda: self._produce(submitter, output))
        self._start("watcher", lambda: self._watch(Farm(connect(url)), job, local))
        manifest = None
        try:
            manifest = self._collect(Farm(connect(url)), job, output)
        except BaseException as error:  # noqa: BLE001 # raised below, unless a thread failed first
            self._failure = self._failure or error
        self.stop.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        if manifest is None:
            raise Interrupted
        return manifest

    def _collect(self, farm: Farm, job: str, output: Output) -> Manifest | None:
        """Collect all results and write the manifest; None when `stop` came first."""
        collector = Collector(
            farm.job(job), output, self.place.settings, self.stop, lambda: self._note(farm, job)
        )
        count = collector.collect()
        if count is None or not self._source_read.wait(self.place.settings.drain_seconds):
            return None
        return self._finish(output, farm, job, count)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        """A thread whose failure stops the run."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 # `_drive` raises it
                if not (self.stop.is_set() and isinstance(error, UNAVAILABLE)):
                    self._failure = self._failure or error
                self.stop.set()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    # The producer.

    def _produce(self, submitter: Submitter, output: Output) -> None:
        """Send the corpus; once more from where the server lost it, should that happen."""
        while not self.stop.is_set():
            try:
                submitter.watch(self._send(submitter, output))
            except Rewind:
                if "-" in self.request.sources:
                    raise
                submitter.attach()

    def _send(self, submitter: Submitter, output: Output) -> int:
        """Read the corpus, check the part of it that is done, and send the rest."""
        with _skipped_file(self.place.out) as record:
            check = PrefixCheck(list(output.parts))
            rows = _rest(self._rows(record), submitter.start, check, self.stop)
            count = submitter.submit(rows)
            if not self.stop.is_set():
                self._source_sha256 = check.finish()
                self._source_read.set()
            return count

    def _rows(self, record: "SkippedFile") -> Iterator[Rows]:
        request = self.request
        on_bad_row = record.add if request.skip_bad_rows else fail_on_bad_row
        for rows in read_corpus(request.sources, request.options, on_bad_row):
            self._skipped = record.count
            yield rows
        self._skipped = record.count

    # The watcher.

    def _watch(self, farm: Farm, job: str, local: LocalFarm | None) -> None:
        """Show how it goes, and stop when it cannot go on."""
        handle = farm.job(job)
        look_at = 0.0
        while not self.stop.wait(VIEW_SECONDS):
            if local is not None and local.failed is not None:
                raise local.failed
            try:
                workers = farm.workers()
                self.view.show(handle.status(), workers)
                if time.monotonic() >= look_at:
                    _check_refusals(farm.refusals(job), [beat.worker for beat in workers])
                    look_at = time.monotonic() + REFUSAL_SECONDS
            except (*UNAVAILABLE, JobGone):
                continue  # the producer and the collector wait for the server, and give up in time

    # The end, and what the next run must know.

    def _agree(self, farm: Farm, job: str) -> None:
        """Hold the workers to the model that earlier runs of this output used."""
        path = self._fingerprint_file()
        if path.exists():
            farm.agree(job, json.loads(path.read_text(encoding="utf-8")))

    def _note(self, farm: Farm, job: str) -> None:
        """Keep the model's fingerprint with the first part, for runs that find another server."""
        path = self._fingerprint_file()
        if not path.exists():
            path.write_text(json.dumps(farm.fingerprint(job)), encoding="utf-8")

    def _fingerprint_file(self) -> Path:
        return self.place.out / STATE_DIRECTORY / "fingerprint.json"

    def _finish(self, output: Output, farm: Farm, job: str, count: int) -> Manifest:
        handle = farm.job(job)
        status = handle.status()
        fingerprint = farm.fingerprint(job)
        about = About(
            job=job,
            model=self.request.spec.model,
            fingerprint=fingerprint,
            source={
                "sources": list(self.request.sources),
                "files": _file_facts(self.request.sources),
                "texts_sha256": self._source_sha256,
            },
            skipped=self._skipped,
            settings=self.request.identity(),
            load_seconds=max((beat.load_seconds for beat in farm.workers()), default=0.0),
            embed_seconds=_embed_seconds(status),
        )
        manifest = output.finish(count, about)
        handle.delete()
        return manifest


def read_again(manifest: Manifest, sources: Sequence[str], settings: Settings) -> Iterator[Rows]:
    """The rows of a corpus, read as they were for a finished output."""
    reading = {
        name.removeprefix("read_"): value
        for name, value in manifest.settings.items()
        if name.startswith("read_")
    }
    tokenizer = tokenizer_file(sources, manifest.model, settings)
    options = CorpusOptions(**reading, tokenizer_file=tokenizer)
    skip = manifest.settings["skip_bad_rows"]
    return read_corpus(sources, options, (lambda _: None) if skip else fail_on_bad_row)


def read_texts(manifest: Manifest, indices: Sequence[int], settings: Settings) -> dict[int, str]:
    """Texts of some chunks by index, as far as the corpus is still where it was."""
    sources = manifest.settings["sources"]
    if not all(Path(source).exists() for source in sources):
        return {}
    texts: dict[int, str] = {}
    first = 0
    for rows in read_again(manifest, sources, settings):
        end = first + len(rows.texts)
        texts |= {index: rows.texts[index - first] for index in indices if first <= index < end}
        first = end
        if first > max(indices, default=-1):
            break
    return texts


def tokenizer_file(sources: Sequence[str], model: str, settings: Settings) -> str | None:
    """The model's tokenizer.json, which only a directory needs, to cut its files by.

    Raises:
        ModelError: The model has none.
    """
    if not any(Path(source).is_dir() for source in sources):
        return None
    if model_files.is_null(model):
        raise model_files.ModelError("a null model has no tokenizer to cut a directory's files by")
    path = model_files.resolve(model, settings.model_cache) / "tokenizer.json"
    if not path.exists():
        raise model_files.ModelError(f"{path}, by which a directory's files are cut, is missing")
    return str(path)


def check_finished(request: Request, out: Path) -> Manifest | None:
    """The manifest of an output that is finished already, None when there is work to do.

    Raises:
        OutputError: It is the output of another request, or its source has changed since.
    """
    if read_state(out) is not State.FINISHED:
        return None
    manifest = read_manifest(out)
    compare_requests(out, manifest.settings, request.identity())
    if manifest.source["files"] != _file_facts(request.sources) or not manifest.source["files"]:
        check = PrefixCheck(manifest.parts)
        for rows in read_corpus(request.sources, request.options, lambda _: None):
            check.feed(text_checksums(rows.texts))
        if check.finish() != manifest.source["texts_sha256"]:
            raise SourceChanged(f"the source has more rows now than {out} was made from")
    return manifest


class SkippedFile:
    """skipped.jsonl: the rows that became no chunk, in the order they were met."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._path = path
        self._file = path.with_suffix(".partial").open("w", encoding="utf-8")

    def add(self, bad_row: BadRow) -> None:
        """List a row."""
        self.count += 1
        self._file.write(json.dumps(asdict(bad_row)) + "\n")

    def close(self) -> None:
        """Put the file in its place, if there is anything in it."""
        self._file.close()
        partial = self._path.with_suffix(".partial")
        if self.count:
            partial.replace(self._path)
        else:
            partial.unlink()


def _skipped_file(out: Path) -> contextlib.closing[SkippedFile]:
    return contextlib.closing(SkippedFile(out / SKIPPED_FILE))


def _rest(
    source: Iterator[Rows], start: int, check: PrefixCheck, stop: threading.Event
) -> Iterator[Rows]:
    """The rows from `start` on; all of them go through the check."""
    index = 0
    for rows in source:
        if stop.is_set():
            return
        check.feed(text_checksums(rows.texts))
        skip = max(0, start - index)
        index += len(rows.texts)
        if skip < len(rows.texts):
            yield Rows(rows.texts[skip:], None if rows.ids is None else rows.ids[skip:])
    if index < start:
        raise SourceChanged(f"the source has {index} rows now; an earlier run had sent {start}")


def _check_refusals(refusals: dict[str, str], workers: Sequence[str]) -> None:
    """Give up when every live worker has refused the job."""
    if workers and set(workers) <= set(refusals):
        reasons = "; ".join(sorted({refusals[name] for name in workers}))
        raise ModelRefused(reasons)


def _job_id(out: Path) -> str:
    """Name of the job that fills this output, the same in every run."""
    path = out / STATE_DIRECTORY / "job-id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _embed_seconds(status: JobStatus) -> float:
    """From the first block read to the last commit."""
    return max(0, status.last_commit_ms - status.first_read_ms) / 1000


def _absolute(source: str) -> str:
    return str(Path(source).resolve()) if Path(source).exists() else source


def _file_facts(sources: Sequence[str]) -> dict[str, list[int]]:
    """Size in bytes and time of change in ns of the sources that are local files."""
    files = [Path(source) for source in sources if Path(source).is_file()]
    return {str(f.resolve()): [f.stat().st_size, f.stat().st_mtime_ns] for f in files}


def _remove_state(out: Path) -> None:
    """Remove what only an unfinished output needs."""
    private = out / STATE_DIRECTORY
    if (private / SERVER_DIRECTORY).exists():
        PrivateServer.at(private / SERVER_DIRECTORY).remove()
    shutil.rmtree(private)
