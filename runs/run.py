"""`embedfarm embed`: a corpus in, vectors in order out.

The output directory holds all that a resume needs. Whatever is in it, or comes into it, is compared
with the corpus as this run reads it: from its start, or from a mark of an earlier run if the corpus
is seen not to have changed since.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec

from embedfarm.collector.collect import Collector
from embedfarm.collector.column_spool import ColumnsMissing
from embedfarm.collector.known_vectors import KnownVectors
from embedfarm.collector.linked_parts import LinkedParts
from embedfarm.collector.manifest import STATE_DIRECTORY, About, Manifest
from embedfarm.collector.output import Output
from embedfarm.collector.sample_list import write_sample
from embedfarm.collector.source_check import SourceCheck
from embedfarm.collector.text_sample import TextSample
from embedfarm.contract import model_files, tracing
from embedfarm.contract.broker import UNAVAILABLE, closing_client, connect, persist, refuse_eviction
from embedfarm.contract.farm_client import FarmClient, FarmFull
from embedfarm.contract.outlook import OutlookReader
from embedfarm.contract.private_directories import make_private
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.redaction import (
    hide_job_directories,
    hide_secrets,
    name_corpus,
    name_source,
)
from embedfarm.contract.scheduling_terms import USUAL, Terms
from embedfarm.contract.status import EndState, JobGone, JobStatus
from embedfarm.contract.usage import describe
from embedfarm.producer.submitter import Submitter
from embedfarm.runs.budget import check_limits, read_estimate, take_limits
from embedfarm.runs.column_keeping import make_spool
from embedfarm.runs.disk_room import is_full, when_free, with_room
from embedfarm.runs.ending import discard_output, end_job, remove_state
from embedfarm.runs.fingerprint import Fingerprint
from embedfarm.runs.own_job import OwnJob, make_own_job, refuse_copy
from embedfarm.runs.place import Place
from embedfarm.runs.private_farm import LocalFarm, run_local_farm
from embedfarm.runs.reconciler import Reconciler
from embedfarm.runs.request import Request
from embedfarm.runs.reuse import find_reusable, learn, link_parts, list_changes
from embedfarm.runs.run_failures import FOR_GOOD, Interrupted, cause_of, check_refusals, ends_as
from embedfarm.runs.sending import Sending
from embedfarm.runs.size_limits import check_output, corpus_limits
from embedfarm.runs.stored_place import RunStorage, end_storing

STOP_SECONDS_MAX: Final = 10.0
VIEW_SECONDS: Final = 0.5
REFUSAL_SECONDS: Final = 2.0
T = TypeVar("T")
log = logging.getLogger(__name__)


Show: TypeAlias = Callable[[JobStatus, Sequence[Heartbeat], OutlookReader], object]


@dataclass
class Run:
    """One run of a request: a producer thread, a watching thread, and the collector.

    Attributes:
        request: What is to be embedded, and how.
        place: Where and by whom the work is done.
        show: Function that is called about twice a second with the job's status, the workers'
            heartbeats and a reader of the job's outlook, in a thread of its own.
        stop: Event that ends the run, which can be resumed.
        terms: Terms of the job, if it is made here.
        reuse: Outputs whose vectors are taken for the texts that they have; each other text is
            embedded once, wherever it stands. With None all texts are embedded.
    """

    request: Request
    place: Place
    show: Show
    stop: threading.Event
    terms: Terms = USUAL
    reuse: Sequence[Path] | None = None
    _known: KnownVectors | None = None
    _trace: str = ""
    _part_began: float = 0.0
    _sample: TextSample = field(init=False)
    _sending: Sending = field(init=False)
    _storage: RunStorage = field(init=False)
    _ended: bool = False
    _outage: threading.Event = field(default_factory=threading.Event)
    _fingerprint: Fingerprint = field(init=False)
    _failure: BaseException | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fingerprint = Fingerprint(self.place.out)
        settings, out = self.place.settings, self.place.out
        self._storage = RunStorage(out, self.request.spec.stored, self.request.sink)
        self._sample = TextSample(out / STATE_DIRECTORY / "sample.json", settings.sample_texts)
        self._sending = Sending(
            self.request, out, self.stop, corpus_limits(settings), settings.full_disk_seconds,
            SourceCheck(self._sample),
        )  # fmt: skip

    def embed(self) -> Manifest:
        """Embed all chunks that are not on disk yet, and write the manifest.

        Raises:
            Interrupted: `stop` was set; the output can be resumed.
            OutputError: The directory belongs to another request; or an output that is to be
                reused is damaged, or was made in another way.
            SourceChanged: The corpus has changed since its rows were embedded.
            CorpusError: The corpus cannot be read, or has not the columns that are to be kept.
            ModelRefused: No worker can embed the job.
            FarmFull: The farm takes no new job now.
        """
        place = self.place
        reusable = find_reusable(self.request, self.reuse or ())
        source = self._sending.source
        source.columns = make_spool(self.request, place.out)
        with self._output(link_parts(self.request, place, reusable)) as output:
            try:
                if self.reuse is not None:
                    begin = partial(learn, place.out, place.settings, reusable)
                    source.known = self._known = self._with_room(begin)
                if place.embed_changed:
                    self._drop_changed(output)
                with self._farm() as (url, local), tracing.span("embed") as self._trace:
                    manifest = self._drive(output, url, local)
            except (*FOR_GOOD, FarmFull):
                # Nothing is lost, and a corrected command must not be taken for another request.
                if not output.parts:
                    discard_output(place.out)
                raise
        if self._ended:
            remove_state(place.out)
        return manifest

    def _output(self, linked: LinkedParts | None) -> Output:
        place, source = self.place, self._sending.source
        begin = partial(
            Output, place.out, self.request.identity(), sink=self.request.sink,
            part_bytes_max=place.settings.part_bytes_max, mark_before=source.mark_before,
            columns=source.columns, linked=linked,
        )  # fmt: skip
        return self._with_room(lambda: when_free(begin, self.stop))

    def _drop_changed(self, output: Output) -> None:
        """Drop the parts that were made of other rows than there are now, and all behind them."""
        count = self._sending.unchanged(output)
        if count < len(output.parts):
            self._with_room(lambda: output.keep(count))

    def _with_room(self, begin: Callable[[], T]) -> T:
        """Return the answer of `begin`, which is repeated until the disk has room for it."""
        place = self.place
        try:
            return with_room(begin, place.out, place.settings.full_disk_seconds, self.stop)
        except OSError as error:
            if is_full(error):
                raise Interrupted from error
            raise

    @contextlib.contextmanager
    def _farm(self) -> Iterator[tuple[str, LocalFarm | None]]:
        """Yield the URL of the farm that is given, or a private one that runs next to the output.

        Raises:
            ServerError: The server that is given evicts keys.
        """
        place = self.place
        if place.settings.redis_url:
            with closing_client(place.settings.redis_url) as client:
                self._persist(partial(refuse_eviction, client))
            yield place.settings.redis_url, None
            return
        make_private(directory := place.out / STATE_DIRECTORY)
        settings = self._sending.rooted(self._storage.rooted(place.settings))
        with run_local_farm(directory, settings, place.devices, place.workers) as local:
            yield local.url, local

    def _drive(self, output: Output, url: str, local: LocalFarm | None) -> Manifest:
        """Run producer, watcher and collector until the output is complete."""
        own = self._with_room(lambda: make_own_job(self.place.out, self.place.job_id))
        job, farm = own.name, FarmClient(connect(url))
        if local is None:
            self._persist(lambda: refuse_copy(farm, own, self.place.out))
        self._persist(lambda: self._storage.find(farm, own))
        self._with_room(self._storage.make)
        submitter = self._submitter(FarmClient(connect(url)), own, output)
        if self._trace:  # that of the run that made the job, if it was traced
            self._trace = submitter.farm.job(job).noted(tracing.NOTE) or self._trace
        self._persist(lambda: self._fingerprint.recall(farm, own, submitter.attach))
        self._start("producer", lambda: self._sending.send(submitter, output, self._trace))
        readable = self.request.identity() | {"sources": list(self.request.sources)}
        reconciler = Reconciler(
            FarmClient(connect(url)).job(job, own.owner), output, readable,
            self.place.settings, self.stop, self._outage,
        )  # fmt: skip
        self._start("reconciler", reconciler.watch)
        self._start("watcher", lambda: self._watch(FarmClient(connect(url)), own, output, local))
        manifest = None
        try:
            manifest = self._collect(FarmClient(connect(url)), own, output)
        except BaseException as error:  # noqa: BLE001 # raised below, unless a thread failed first
            self._failure = self._failure or error
        self.stop.set()
        for thread in self._threads:
            thread.join(STOP_SECONDS_MAX)  # a producer may hang in its source, such as a pipe
        if manifest is None:
            if (state := ends_as(self._failure)) is not None:
                self._end(state, FarmClient(connect(url)), own, output)
            raise self._failure or Interrupted
        if self._failure is not None:
            log.warning("job %s is whole all the same: %s", job, self._failure)
        # Not sooner: until it has stopped, the producer makes a job again that is not there.
        self._ended = end_job(FarmClient(connect(url)), manifest, own.owner, self.place.settings)
        return manifest

    def _end(self, state: EndState, farm: FarmClient, own: OwnJob, output: Output) -> None:
        """End the job over the run's failure; what has come of it stays, for a run that goes on."""
        reason = "" if state == "cancelled" else hide_secrets(str(self._failure))
        reason = hide_job_directories(reason, self.place.settings.jobs_path)
        with contextlib.suppress(OSError, ColumnsMissing):
            output.flush()
        with contextlib.suppress(JobGone, *UNAVAILABLE):
            farm.end(
                own.name, state, reason, self.place.settings, owner=own.owner,
                cause=cause_of(self._failure), drained_upto=output.next_index,
                rows_skipped=self._sending.skipped, chunks_reused=output.chunks_reused,
            )  # fmt: skip
            end_storing(self.place.out)

    def _submitter(self, farm: FarmClient, own: OwnJob, output: Output) -> Submitter:
        place, start = self.place, output.next_index
        spec = msgspec.structs.replace(self.request.spec, stored=self._storage.directory)
        files = model_files.find_local(spec.model, place.settings.model_cache)
        name = name_corpus(self.request.corpora, place.settings.jobs_path)
        notes = {"out": str(place.out.resolve()), "command": place.command, "corpus": name}
        notes |= read_estimate(place.out, self.request).notes
        notes |= {tracing.NOTE: self._trace} if self._trace else {}
        submitter = Submitter(
            farm, own.name, spec, start, place.settings, self.stop, files, self.terms, notes,
            own.owner, lambda: output.next_index, output.cuts,
        )  # fmt: skip
        if submitter.drained_upto > start:  # the server believes that more is on disk than is
            submitter.start_over(start)
        self._persist(partial(take_limits, submitter))
        return submitter

    def _collect(self, farm: FarmClient, own: OwnJob, output: Output) -> Manifest | None:
        """Collect all results and write the manifest; None when `stop` came first."""

        def on_part() -> None:
            self._trace_part(output)
            self.place.after_part(output, farm.job(own.name, own.owner))
            check_output(output.parts, self.place.settings)

        check_output(output.parts, self.place.settings)
        self._part_began = time.monotonic()
        job = farm.job(own.name, own.owner)
        collector = Collector(
            job, output, self.place.settings, self.stop, on_part,
            self._sending.source, self._known, lambda: self._fingerprint.settle(farm, own),
            self._storage.vectors(job, self.stop),
        )  # fmt: skip
        while (count := collector.collect()) is not None and collector.close_last_part():
            with self._sending.source.held:
                # A server that came back may have had the source read again since.
                if self._sending.source.count == count == output.next_index:
                    return self._finish(collector, farm, own, count)
        return None

    def _trace_part(self, output: Output) -> None:
        """Trace a part that is on the disk, with the time since the one before."""
        if tracing.enabled():
            now = time.monotonic()
            tracing.record(
                "collect part", self._trace, self._part_began, now, upto=output.next_index
            )
            self._part_began = now

    def _persist(self, attempt: Callable[[], T]) -> T:
        """Return the answer of `attempt`, which is repeated over outages of the server."""
        return persist(attempt, self.stop, self.place.settings.reconnect_seconds_max)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread whose failure stops the run."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 # `_drive` raises it
                if not (self.stop.is_set() and (isinstance(error, UNAVAILABLE) or is_full(error))):
                    self._failure = self._failure or error
                self.stop.set()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    # The watcher.

    def _watch(
        self, farm: FarmClient, own: OwnJob, output: Output, local: LocalFarm | None
    ) -> None:
        """Show how the job goes, and stop the run when it cannot go on."""
        handle = farm.job(*own)
        outlook = OutlookReader(farm, own.name)
        look_at = 0.0
        while not self.stop.wait(VIEW_SECONDS):
            if local is not None and local.failed is not None:
                raise local.failed
            try:
                workers = farm.workers()
                status = handle.status()
                self.show(status, workers, outlook)
                if time.monotonic() >= look_at:
                    if not status.ended:
                        handle.list_again()
                        self._sending.note(handle, status, output.chunks_reused)
                    self._fingerprint.learn(farm, own)
                    check_refusals(own.name, farm.reports.refusals(*own), workers)
                    check_limits(handle, status, private=local is not None)
                    look_at = time.monotonic() + REFUSAL_SECONDS
            except (*UNAVAILABLE, JobGone):
                self._outage.set()
                continue  # the producer and the collector wait for the server, and give up in time

    # The end.

    def _finish(
        self, collector: Collector, farm: FarmClient, own: OwnJob, count: int
    ) -> Manifest | None:
        """Write the manifest, while nobody reads the source; None when `stop` came first."""
        self._persist(lambda: self._fingerprint.learn(farm, own))
        status = self._last_status(farm, own)
        accounts = self._persist(lambda: farm.reports.accounts(*own))
        workers = self._persist(farm.workers)
        about = About(
            job=own.name,
            model=self.request.spec.model,
            fingerprint=dict(self._fingerprint.known),
            source={
                "sources": list(map(name_source, self.request.sources)),
                "files": dict(self._sending.files),
                "compared": {"by": "embed", "at": time.time(), "rows": count},
            },
            skipped=self._sending.skipped,
            settings=self.request.identity(),
            load_seconds=max((beat.load_seconds for beat in workers), default=0.0),
            embed_seconds=status.embed_seconds,
            embedded=status.last_commit_ms / 1000,
            accounts={name: describe(each) for name, each in accounts.items()},
            changes=self._with_room(partial(list_changes, collector.output, self._known)),
            estimate=status.estimate.kept,
            canaries=self._fingerprint.canaries,
            sample=self._with_room(partial(write_sample, self.place.out, self._sample)),
        )
        return collector.finish(count, about)

    def _last_status(self, farm: FarmClient, own: OwnJob) -> JobStatus:
        """Return what the server counted; nothing, if it has lost the job now that all is here."""
        try:
            return self._persist(farm.job(*own).status)
        except JobGone:
            return JobStatus()
