"""`embedfarm embed`: a corpus in, vectors in order out.

The output directory holds all that a resume needs. The corpus is read again from its start, so that
it can be told whether it still is the corpus that the finished parts were made from.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from collector.collect import NO_ROOM, Collector
from collector.manifest import (
    STATE_DIRECTORY,
    About,
    Manifest,
    OutputError,
    PrefixCheck,
    SourceChanged,
)
from collector.output import Output
from embedfarm import model_files, tracing
from embedfarm.accounts import describe
from embedfarm.broker import UNAVAILABLE, connect, persist
from embedfarm.cli.ending import end_job, remove_state
from embedfarm.cli.fingerprint import Fingerprint
from embedfarm.cli.holes import Reconciler
from embedfarm.cli.local import LocalFarm, run_local_farm
from embedfarm.cli.progress import View
from embedfarm.cli.request import Request, file_facts
from embedfarm.cli.skipped import SKIPPED_FILE, SkippedFile
from embedfarm.farm import Farm, FarmFull, ModelRefused
from embedfarm.records import Rows, text_checksums
from embedfarm.settings import Settings
from embedfarm.status import JobGone, JobStatus
from embedfarm.terms import USUAL, Terms
from producer.readers import (
    CorpusError,
    fail_on_bad_row,
    read_corpus,
)
from producer.requests import JOB_ID_FILE
from producer.submit import Rewind, Submitter
from workers.devices import DeviceError

STOP_SECONDS_MAX: Final = 10.0
VIEW_SECONDS: Final = 0.5
REFUSAL_SECONDS: Final = 2.0
T = TypeVar("T")

FOR_GOOD: Final = (CorpusError, DeviceError, ModelRefused)  # the same command would fail again

log = logging.getLogger(__name__)


class Interrupted(RuntimeError):
    """Somebody stopped the command; the output can be resumed."""


@dataclass(frozen=True)
class Place:
    """Where and by whom the work is done.

    Attributes:
        out: The output directory.
        settings: The farm's limits; an empty `redis_url` means a private farm.
        devices: As for `--devices`, of a private farm.
        workers: CPU workers of a private farm, 0 for the default.
        job_id: Of the job on the farm; "" for a new one.
        command: The command line, for people who want to do the same.
    """

    out: Path
    settings: Settings
    devices: str
    workers: int
    job_id: str = ""
    command: str = ""


@dataclass
class Run:
    """One run of the command: a producer thread, a watching thread, and the collector."""

    request: Request
    place: Place
    view: View
    stop: threading.Event
    terms: Terms = USUAL
    _trace: str = ""
    _part_began: float = 0.0
    _skipped: int = 0
    _source_sha256: str = ""
    _source_read: threading.Event = field(default_factory=threading.Event)
    _ended: bool = False
    _outage: threading.Event = field(default_factory=threading.Event)
    _fingerprint: Fingerprint = field(init=False)
    _failure: BaseException | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fingerprint = Fingerprint(self.place.out)

    def embed(self) -> Manifest:
        """Embed what is not embedded yet, and write the manifest.

        Raises:
            Interrupted: `stop` was set; the output can be resumed.
            OutputError: The directory belongs to another request, or the corpus has changed.
            CorpusError: The corpus cannot be read.
            ModelRefused: No worker can embed the job.
            FarmFull: The farm takes no new job now.
        """
        place = self.place
        begun = True
        try:
            with self._output() as output:
                begun = bool(output.parts)
                with self._farm() as (url, local), tracing.span("embed") as self._trace:
                    manifest = self._drive(output, url, local)
        except (*FOR_GOOD, FarmFull):
            # Nothing is lost, and a corrected command must not be taken for another request.
            if not begun:
                remove_state(place.out)
            raise
        if self._ended:
            remove_state(place.out)
        return manifest

    def _output(self) -> Output:
        """The output; a disk without room to begin one is waited for, as one that fills up."""
        place, said = self.place, False
        while True:
            try:
                return Output(
                    place.out,
                    self.request.identity(),
                    sink=self.request.sink,
                    part_bytes_max=place.settings.part_bytes_max,
                )
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                if not said:
                    log.warning("waits for room below %s: %s", place.out, error.strerror)
                    said = True
                if self.stop.wait(place.settings.full_disk_seconds):
                    raise Interrupted from error

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
        job = _job_id(self.place)
        submitter = self._submitter(Farm(connect(url)), job, output.next_index)
        if self._trace:  # that of the run that made the job, if it was traced
            self._trace = submitter.farm.job(job).noted(tracing.NOTE) or self._trace
        farm = Farm(connect(url))
        self._persist(lambda: self._fingerprint.recall(farm, job, submitter.attach))
        self._start("producer", lambda: self._produce(submitter, output))
        reconciler = Reconciler(
            Farm(connect(url)).job(job), output, self.request.identity(), self.place.settings,
            self.stop, self._outage,
        )  # fmt: skip
        self._start("reconciler", reconciler.watch)
        self._start("watcher", lambda: self._watch(Farm(connect(url)), job, local))
        manifest = None
        try:
            manifest = self._collect(Farm(connect(url)), job, output)
        except BaseException as error:  # noqa: BLE001 # raised below, unless a thread failed first
            self._failure = self._failure or error
        self.stop.set()
        for thread in self._threads:
            thread.join(STOP_SECONDS_MAX)  # a producer may hang in its source, such as a pipe
        if self._failure is not None:
            if isinstance(self._failure, (*FOR_GOOD, OutputError)):
                reason = str(self._failure)
                with contextlib.suppress(JobGone, *UNAVAILABLE):
                    Farm(connect(url)).end(job, "failed", reason, self.place.settings)
            raise self._failure
        if manifest is None:
            raise Interrupted
        # Not sooner: until it has stopped, the producer makes a job again that is not there.
        self._ended = end_job(Farm(connect(url)), manifest, self.place.settings)
        return manifest

    def _submitter(self, farm: Farm, job: str, start: int) -> Submitter:
        place, spec = self.place, self.request.spec
        files = model_files.find_local(spec.model, place.settings.model_cache)
        notes = {"out": str(place.out.resolve()), "command": place.command}
        if self._trace:
            notes[tracing.NOTE] = self._trace
        return Submitter(
            farm, job, spec, start, place.settings, self.stop, files, self.terms, notes
        )

    def _collect(self, farm: Farm, job: str, output: Output) -> Manifest | None:
        """Collect all results and write the manifest; None when `stop` came first."""

        def on_part() -> None:
            self._persist(lambda: self._note(farm, job))
            self._trace_part(output)

        self._part_began = time.monotonic()
        collector = Collector(farm.job(job), output, self.place.settings, self.stop, on_part)
        count = collector.collect()
        if count is None or not self._source_read.wait(self.place.settings.drain_seconds):
            return None
        return self._finish(collector, farm, job, count)

    def _trace_part(self, output: Output) -> None:
        """Tell of a part that is on the disk, with the time since the one before."""
        if tracing.enabled():
            now = time.monotonic()
            tracing.record(
                "collect part", self._trace, self._part_began, now, upto=output.next_index
            )
            self._part_began = now

    def _persist(self, attempt: Callable[[], T]) -> T:
        """`attempt`, over outages of the server."""
        return persist(attempt, self.stop, self.place.settings.reconnect_seconds_max)

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
        with contextlib.closing(SkippedFile(self.place.out / SKIPPED_FILE)) as record:
            check = PrefixCheck(list(output.parts))
            rows = _rest(self._rows(record), submitter.start, check, self.stop)
            with tracing.span("submit", self._trace, first_chunk=submitter.start):
                count = submitter.submit(rows)
            if not self.stop.is_set():
                self._source_sha256 = check.finish()
                self._source_read.set()
            return count

    def _rows(self, record: SkippedFile) -> Iterator[Rows]:
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
                    self._fingerprint.learn(farm, job)
                    _check_refusals(farm.refusals(job), [beat.worker for beat in workers])
                    look_at = time.monotonic() + REFUSAL_SECONDS
            except (*UNAVAILABLE, JobGone):
                self._outage.set()
                continue  # the producer and the collector wait for the server, and give up in time

    # The end, and what the next run must know.

    def _note(self, farm: Farm, job: str) -> None:
        """Keep the model's fingerprint with the first part."""
        if not self._fingerprint.known:
            self._persist(lambda: self._fingerprint.learn(farm, job))
        self._fingerprint.keep()

    def _finish(self, collector: Collector, farm: Farm, job: str, count: int) -> Manifest | None:
        """Write the manifest; None when `stop` came first."""
        self._persist(lambda: self._fingerprint.learn(farm, job))
        status = self._last_status(farm, job)
        accounts = self._persist(lambda: farm.accounts(job))
        workers = self._persist(farm.workers)
        about = About(
            job=job,
            model=self.request.spec.model,
            fingerprint=dict(self._fingerprint.known),
            source={
                "sources": list(self.request.sources),
                "files": file_facts(self.request.sources),
                "texts_sha256": self._source_sha256,
            },
            skipped=self._skipped,
            settings=self.request.identity(),
            load_seconds=max((beat.load_seconds for beat in workers), default=0.0),
            embed_seconds=_embed_seconds(status),
            embedded=status.last_commit_ms / 1000,
            accounts={name: describe(each) for name, each in accounts.items()},
        )
        manifest = collector.finish(count, about)
        self._trace_part(collector.output)
        return manifest

    def _last_status(self, farm: Farm, job: str) -> JobStatus:
        """What the server has counted; nothing, if it has lost the job now that all is here."""
        try:
            return self._persist(farm.job(job).status)
        except JobGone:
            return JobStatus()


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


def _job_id(place: Place) -> str:
    """Name of the job that fills this output, the same in every run."""
    path = place.out / JOB_ID_FILE
    if not path.exists():
        path.write_text(place.job_id or uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _embed_seconds(status: JobStatus) -> float:
    """From the first block read to the last commit."""
    return max(0, status.last_commit_ms - status.first_read_ms) / 1000
