"""A vector store that is filled while a job runs, from the parts of its output."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, Self, get_args

from embedfarm.collector.manifest import Manifest, OutputError, Part
from embedfarm.collector.output import Output
from embedfarm.collector.output_directory import State, read_request, read_state
from embedfarm.collector.output_reader import OutputReader
from embedfarm.collector.store_export import ExportReport, Others, StoreExport
from embedfarm.collector.store_journal import locked_journal
from embedfarm.collector.store_mark import Origin
from embedfarm.collector.stores.address import parse_address
from embedfarm.collector.stores.patience import ExportStopped, PatientStore
from embedfarm.collector.stores.store import StoreError
from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.jobs import Job
from embedfarm.contract.redaction import hide_secrets
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.runs.fingerprint import Fingerprint
from embedfarm.runs.own_job import read_own_job

LOOK_SECONDS: Final = 0.5
RELAY_SECONDS: Final = 0.2

log = logging.getLogger(__name__)


class Destination(NamedTuple):
    """Where an output goes beside its files.

    Attributes:
        url: URL of the collection.
        others: What becomes of rows in the collection that are not of the output.
    """

    url: str
    others: Others = "refuse"

    @property
    def shown(self) -> str:
        """The URL for people, without its secrets."""
        return parse_address(self.url).shown


def find_destination(to: str, others: Others, settings: Settings) -> Destination:
    """Return where an output goes: to the URL of a collection, or to a store by its name.

    Raises:
        StoreError: The setting `stores` has no such name, or `others` says none of its words.
    """
    if others not in (words := get_args(Others)):
        raise StoreError(f"others cannot be {others!r}, but {', '.join(words)}")
    if "://" in to:
        return Destination(to, others)
    store = settings.stores.get(to)
    if store is None:
        known = ", ".join(sorted(settings.stores)) or "none"
        raise StoreError(f"{to!r} is no URL, and no name in the setting stores, which has {known}")
    return Destination(store.url.get_secret_value(), others)


@contextmanager
def exporting(
    out: Path,
    to: Destination,
    settings: Settings,
    stop: threading.Event,
    show: Callable[[int], object] = lambda _chunks: None,
) -> Iterator[StoreExport]:
    """Yield an export of an output into a collection, which no other process does meanwhile.

    Args:
        out: Directory of the output.
        to: Where it goes.
        settings: The limits of waiting.
        stop: Event that ends the export.
        show: Called with the number of chunks that the store has.

    Raises:
        StoreError: There is no such store, or another process exports.
    """
    address = parse_address(to.url)
    patient = PatientStore(address, settings, stop)
    with locked_journal(out, address) as journal:
        export = StoreExport(out, address, journal, patient, to.others, show)
        try:
            yield export
        finally:
            export.close()


class StoreFeed:
    """Sends the parts of a job's output to a store, in a thread of its own, as they become durable.

    A store that cannot keep up holds the job back: `after_part` waits while the store is more than
    `store_parts_behind_max` parts behind, and the job's `reason` says so. A store that fails does
    not: the job goes on without it, and `finish` tries once more.

    Attributes:
        run_stop: Event for the run, which is set with `stop`; a run sets it at its end, too.

    Args:
        out: Directory of the output.
        to: Where it goes.
        settings: The farm's limits.
        stop: Event that ends the run and the export.
        base: The first output that is reused. Where the collection holds it, what has changed is
            sent when the output is finished, and nothing before.
    """

    def __init__(
        self,
        out: Path,
        to: Destination,
        settings: Settings,
        stop: threading.Event,
        base: Path | None,
    ) -> None:
        self.run_stop = threading.Event()
        self._out, self._to, self._settings, self._stop = out, to, settings, stop
        self._base = base
        self._name = to.shown
        self._parts: Sequence[Part] = ()
        self._confirmed = 0  # chunks that the store has
        self._sent = 0  # rows that were written before the end
        self._export: StoreExport | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._gave_up = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        deferred = read_state(self._out) is State.FINISHED  # then there is nothing beside a job
        if not deferred:
            own = read_own_job(self._out)
            with exporting(self._out, self._to, self._settings, self._stop) as export:
                deferred = export.check(own.name if own else "", self._base)
        threading.Thread(target=self._relay, name="relay", daemon=True).start()
        if not deferred:
            self._thread = threading.Thread(target=self._run, name="store", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._tell()
        if self._thread is not None:
            self._thread.join()

    def _relay(self) -> None:
        """Stop the run when everything is to stop."""
        while not self._ended.wait(RELAY_SECONDS):
            if self._stop.is_set():
                self.run_stop.set()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # The job's side.

    def after_part(self, output: Output, job: Job) -> None:
        """Take note of a durable part, and wait while the store is too far behind."""
        if self._thread is None or output.directory != self._out:  # or it is that of a retry
            return
        self._parts = output.parts
        self._tell()
        said = ""
        while reason := self._behind():
            if reason != said:
                said = reason
                self._note(job, reason)
                log.warning("job %s %s", job.id, reason)
            with self._changed:
                self._changed.wait(LOOK_SECONDS)
            if self._is_cancelled(job):
                break
        if said:
            self._note(job, "")

    def _behind(self) -> str:
        """Return why the job is held back; "" if it is not."""
        behind = sum(part.end > self._confirmed for part in self._parts)
        if self.run_stop.is_set() or self._gave_up:
            return ""
        if behind <= self._settings.store_parts_behind_max:
            return ""
        waits = self._export.patient.waits if self._export is not None else ""
        return waits or f"waits for {self._name}, which has to catch up"

    @staticmethod
    def _note(job: Job, reason: str) -> None:
        """Note with the job what it waits for; do nothing while the server is away."""
        with suppress(*UNAVAILABLE):
            job.note("reason", reason)

    @staticmethod
    def _is_cancelled(job: Job) -> bool:
        """Tell whether nobody wants the job to go on."""
        try:
            return job.status().cancelled
        except (JobGone, *UNAVAILABLE):
            return False

    # The store's side.

    def _run(self) -> None:
        """Send parts until the run has ended, or the store fails."""
        try:
            with exporting(self._out, self._to, self._settings, self._ended) as export:
                self._export = export
                while not self._ended.is_set():
                    parts = list(self._parts)
                    if parts and parts[-1].end > self._confirmed:
                        self._send(export, parts)
                    else:
                        with self._changed:
                            self._changed.wait(LOOK_SECONDS)
        except ExportStopped:
            pass
        except (OutputError, OSError) as error:
            log.warning("the job goes on without the store: %s", hide_secrets(str(error)))
        finally:
            self._sent = self._export.report.sent if self._export is not None else 0
            self._gave_up = True
            self._tell()

    def _send(self, export: StoreExport, parts: Sequence[Part]) -> None:
        """Send the parts that are new, one by one, until the run has ended."""
        if not self._confirmed:
            with OutputReader(self._out) as reader:
                export.begin(self._origin(), reader.read_part(0))
        for part in parts:
            if part.end > self._confirmed and not self._ended.is_set():
                export.send([part])
                self._confirmed = part.end
                self._tell()

    def _origin(self) -> Origin:
        """Return what an export must know of the output, whose first part is on the disk."""
        own = read_own_job(self._out)
        return Origin(
            job=own.name if own else "",
            settings=read_request(self._out),
            fingerprint=Fingerprint(self._out).read(),
        )

    def finish(self, manifest: Manifest) -> ExportReport:
        """Send what the store does not have of the finished output; see `StoreExport.finish`."""
        with exporting(self._out, self._to, self._settings, self._stop) as export:
            export.report.sent = self._sent
            return export.finish(manifest)
