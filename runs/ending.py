"""The end of a job: a record of it on the server, and nothing beside its output."""

import contextlib
import logging
import shutil
import threading
from functools import partial
from pathlib import Path

from embedfarm.collector.manifest import STATE_DIRECTORY, Manifest
from embedfarm.collector.output_directory import (
    JOURNAL_FILE,
    REQUEST_FILE,
    OutputBusy,
    list_output_files,
    locked,
)
from embedfarm.contract.broker import (
    SERVER_DIRECTORY,
    UNAVAILABLE,
    PrivateServer,
    closing_client,
    persist,
)
from embedfarm.contract.durable_files import sync_directory
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import BlocksLost
from embedfarm.contract.settings import Settings
from embedfarm.contract.spending import counters_of
from embedfarm.contract.status import JobGone
from embedfarm.runs.disk_room import with_room
from embedfarm.runs.own_job import JOB_ID_FILE, read_own_job
from embedfarm.runs.stored_place import end_storing

log = logging.getLogger(__name__)


def end_job(farm: FarmClient, manifest: Manifest, owner: str, settings: Settings) -> bool:
    """Leave no more than a record of a finished job on the server; tell whether that is done.

    A server that stays away must not spoil what is on disk; the next run of the command ends it.

    Args:
        farm: Farm that has the job.
        manifest: Manifest of the finished output.
        owner: Owner of the job; a job of the same name with another owner stays as it is.
        settings: The farm's limits.
    """
    job, count = manifest.job, manifest.count

    def end() -> None:
        farm.end(
            job, "finished", "", settings, owner=owner, cause="chunks" if manifest.failed else "",
            first_chunk=0, chunks_in=count, chunks_failed=manifest.failed,
            rows_skipped=manifest.skipped, chunks_reused=sum(manifest.reused.values()),
            ids_repeated=manifest.repeated_ids.count if manifest.repeated_ids else 0,
            real_tokens_done=manifest.tokens, drained_upto=count,
            **counters_of(manifest.spent),
        )  # fmt: skip
        if farm.job(job).noted("state") not in {"finished", ""}:
            raise BlocksLost(f"the server has lost that job {job} is finished")

    try:
        with contextlib.suppress(JobGone):
            persist(end, threading.Event(), settings.reconnect_seconds_max)
    except UNAVAILABLE as error:
        log.warning("the server keeps no record of job %s: %s", manifest.job, error)
        return False
    return True


def tidy(out: Path, manifest: Manifest, settings: Settings, stop: threading.Event) -> None:
    """End the job and remove the state that a run left when it died after writing its manifest.

    A disk that has no room for the lock is waited for, until `stop` is set.
    """
    if (out / JOB_ID_FILE).exists():
        end = partial(_end_and_remove, out, manifest, settings)
        with_room(end, out, settings.full_disk_seconds, stop)


def _end_and_remove(out: Path, manifest: Manifest, settings: Settings) -> None:
    with contextlib.suppress(OutputBusy), locked(out / STATE_DIRECTORY):
        if settings.redis_url:
            with closing_client(settings.redis_url) as client:
                own = read_own_job(out)
                owner = own.owner if own is not None else ""
                if not end_job(FarmClient(client), manifest, owner, settings):
                    return
        remove_state(out)


def discard_output(out: Path) -> None:
    """Remove all files of an output that has no part yet; files that cannot be removed stay.

    The journal goes first and the request last, each after what went before is off the disk: a
    power loss may leave an output without parts, but no part of which nothing knows the output.
    """
    private = out / STATE_DIRECTORY
    files = [out / name for name in list_output_files(out)]
    for folder, paths in (
        (private, [private / JOURNAL_FILE]),
        (out, files),
        (private, [private / REQUEST_FILE]),
    ):
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            sync_directory(folder)
    with contextlib.suppress(OSError):
        remove_state(out)
        sync_directory(out)  # a power loss must not show a corrected command the old request


def remove_state(out: Path) -> None:
    """Remove what only an unfinished output needs; last the job's id, by which `tidy` knows it."""
    sync_directory(out)  # a manifest may be seen whose name never reached the disk
    end_storing(out)
    private = out / STATE_DIRECTORY
    if (private / SERVER_DIRECTORY).exists():
        PrivateServer.at(private / SERVER_DIRECTORY).remove()
    for each in private.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each != out / JOB_ID_FILE:
            each.unlink()
    shutil.rmtree(private)
