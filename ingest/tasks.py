"""Jobs for RQ: plain functions of JSON values, which `embedfarm ingest` runs.

    Queue("embedfarm", serializer="json", connection=…).enqueue(
        "producer.tasks.embed_corpus", "/data/corpus.jsonl", "/data/vectors", model="…")

Their arguments are paths and options, never texts or vectors. Each may be run again at any time: it
goes on where it was, or finds its work done. Paths must be below the settings `ingest_roots` or
`jobs_directory`, and URLs of corpora below one of `ingest_urls`.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from rq import Queue, get_current_job
from rq.exceptions import NoSuchJobError
from rq.registry import CanceledJobRegistry

from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JOB_FIELDS
from embedfarm.contract.jobs import Job
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone, JobStatus
from embedfarm.contract.stored_results import check_place
from embedfarm.ingest.allow_list import PathRefused, allow, allow_source, allow_url, is_url
from embedfarm.ingest.child_command import CommandFailed, check_stop, run_command
from embedfarm.ingest.downloads import fetch, fetch_aside, places_of
from embedfarm.ingest.job_directories import OUTPUT, directory_of, remove_old
from embedfarm.ingest.job_limits import limit
from embedfarm.ingest.openai_files import BATCH_INPUT, complete_batch
from embedfarm.ingest.outbound import RequestFailed, Url, parse_url
from embedfarm.ingest.rq_jobs import DownloadProgress, begin, farm_jobs, look, note
from embedfarm.ingest.rq_keys import ReadableJob, over_unreadable
from embedfarm.ingest.webhooks import Event, deliver
from embedfarm.producer.feed import is_feed

QUEUE: Final = "embedfarm"
DAY_SECONDS: Final = 86400
CANCELLED: Final = 1  # status of `embedfarm batch`, which then prints its report all the same
FAILED_CHUNKS: Final = 3  # status of `embedfarm embed`: finished, and _errors.jsonl names some
PATH_OPTIONS: Final = frozenset({"ranges", "reuse"})
LIST_OPTIONS: Final = frozenset({"reuse", "keep"})  # one text, or a list of them
EMBED_OPTIONS: Final = JOB_FIELDS.keys() - {"name"} | {
    "text_field", "text", "id_field", "keep", "input_format", "encoding", "glob", "chunk_tokens",
    "chunk_overlap", "on_bad_row", "format", "priority", "tenant", "weight", "deadline", "labels",
    "max_hours", "max_cost",
    "job_id", "embed_changed", "reuse", "by_reference", "deduplicate", "to", "others",
}  # fmt: skip

log = logging.getLogger(__name__)

Scalar = str | int | float | bool
Option = Scalar | list[str]
Report = dict[str, Any]
Fetch = Callable[[Url, Path, Settings, Callable[[int], object]], Path]


class OptionRefused(ValueError):
    """Raised for an option that a task does not have, or with a value that it cannot have."""


def embed_corpus(
    corpus: str | list[str], out: str, *, webhook: str = "", **options: Option
) -> Report:
    """Embed a corpus into an output directory; a run that was cut off goes on there.

    Args:
        corpus: A file, directory or URL, or several; what is fetched is kept below `out`.
        out: The output directory.
        webhook: URL that is told when the job has finished, failed for good or was cancelled.
        options: Options of `embedfarm embed`, those that `EMBED_OPTIONS` names.

    Returns:
        What `embedfarm embed --json` prints; chunks that failed are counted in it.

    Raises:
        PathRefused, ValueError: An argument is not allowed.
        RequestFailed: A corpus cannot be fetched.
        CommandFailed: The corpus, the output or the farm refuses.
        StopRequested: This process was asked to stop.
    """
    _check_webhook(webhook)
    return _embed("embed", corpus, out, options)


def retry_failed(
    corpus: str | list[str], out: str, *, webhook: str = "", **options: Option
) -> Report:
    """Embed again the failed chunks of a finished output; otherwise like `embed_corpus`."""
    _check_webhook(webhook)
    return _embed("retry what failed of", corpus, out, options, "--retry-failed")


def embed_batch(job_id: str, model: str) -> Report:
    """Answer the requests of a batch, and keep the answers and errors as files.

    Args:
        job_id: Name of the batch, and of its job on the farm.
        model: Model that the batch embeds with.

    Returns:
        What `embedfarm batch --json` prints.

    Raises:
        PathRefused: There is no such batch.
        CommandFailed: The batch, the output or the farm refuses, or the batch was cancelled; what
            was done of that is kept nevertheless.
        StopRequested: This process was asked to stop.
    """
    settings = Settings()
    directory = directory_of(settings, job_id)
    if directory is None:
        raise PathRefused(f"{job_id!r} is no batch")
    out = directory / OUTPUT
    begin(f"answer {job_id} with {model}", out / "vectors")
    words = ["batch", f"--out={out}", f"--model={model}", f"--job-id={job_id}", "--json"]
    with closing_client(settings.redis_url) as client:
        see = partial(look, FarmClient(client), out / "vectors", outlives=True)
        corpus = directory / BATCH_INPUT
        report: Report = run_command(
            [*words, "--", str(corpus)], limit(settings, [corpus]), see, {0, CANCELLED}
        )
        if report["failed"] and not report["cancelled"]:
            few = f"{report['failed']:,} of {report['total']:,} requests"
            FarmClient(client).job(job_id).note("reason", f"{few} have no answer, but an error")
        complete_batch(settings, job_id, report, _tenant_of(FarmClient(client).job(job_id)))
        if report["cancelled"]:
            see()
            raise CommandFailed(f"{job_id} is cancelled")
    note(state="finished", done=report["total"], of=report["total"], failed=report["failed"])
    return report


def export(out: str, to: str, format: str = "npy") -> Report:  # noqa: A002 -- as the command says
    """Write a finished output in another format into another directory.

    Raises:
        PathRefused: A path is not allowed.
        CommandFailed: `embedfarm export` fails.
        StopRequested: This process was asked to stop.
    """
    settings = Settings()
    source, target = allow(out, settings.task_roots), allow(to, settings.task_roots)
    begin(f"export {source} into {target} as {format}")
    words = ["export", f"--out={target}", f"--format={format}", "--json", "--", str(source)]
    return _run(words, settings)


def reconcile(out: str, corpus: str | list[str]) -> Report:
    """Compare an output with its corpus: a finished one by its manifest, another one on the farm.

    What the server has lost of an unfinished output is sent again out of the corpus. The copy of a
    corpus that was fetched stays as it is, whatever its URL has now.

    Returns:
        For a finished output "problems": each has a "file", and a sentence as its "problem"; none
        when all is well. For an unfinished one what `embedfarm reconcile --json` prints.

    Raises:
        PathRefused, UrlRefused: A path or URL is not allowed.
        RequestFailed: A corpus cannot be fetched.
        CommandFailed: `embedfarm verify` or `embedfarm reconcile` fails.
        StopRequested: This process was asked to stop.
    """
    settings = Settings()
    directory = allow(out, settings.task_roots)
    if (job := next(farm_jobs(directory), None)) is not None:
        begin(f"look for lost chunks of {directory}")
        return _run(["reconcile", "--json", "--", job], settings, 1)
    sources = _sources(corpus, settings)
    begin(f"compare {directory} with {_names(sources)}")
    with ExitStack() as fetched:
        names = _fetch(
            sources, directory, settings, get=lambda *w: fetched.enter_context(fetch_aside(*w))
        )
        against = [f"--against={name}" for name in names]
        return _run(["verify", *against, "--json", "--", str(directory)], settings, 1)


def cleanup(seconds: float = DAY_SECONDS) -> Report:
    """Delete cancelled and embedded jobs that were not collected for long from the server.

    From the disk go the directories of jobs by HTTP of which the server knows nothing any more,
    once they are older than `jobs_directory_seconds`.

    An output whose job is deleted can still be resumed: what is not on disk is embedded again. The
    texts of a feed are nowhere else: it stays until its results were acknowledged.

    Args:
        seconds: Time that something must have rested to be deleted.

    Returns:
        "jobs": ids of the farm's jobs, "requests": ids of the cancelled RQ jobs that were deleted,
        "directories": ids of jobs by HTTP whose input and output were removed.
    """
    settings = Settings()
    begin(f"delete what has rested for {seconds:,.0f} s")
    with closing_client(settings.redis_url) as client, closing_client(settings.queue_server) as rq:
        whole, microseconds = client.time()
        now = min(time.time(), whole + microseconds / 1e6)  # neither clock alone makes old
        before, farm = now - seconds, FarmClient(client)
        there = farm.statuses().items()
        ended = [job for job, status in there if _is_over(farm.job(job), status, before)]
        for job in ended:
            farm.job(job).delete()
        requests = _delete_cancelled(Queue(QUEUE, rq, serializer="json"), before)
        directories = remove_old(settings, now, lambda job: not farm.exists(job))
    note(state="finished")
    return {"jobs": ended, "requests": requests, "directories": directories}


def notify(url: str, event: Event) -> Report:
    """Tell a URL of an event; `embedfarm.ingest.webhooks.enqueue_notice` asks for it, with retries.

    Args:
        url: URL of the receiver.
        event: Document from `embedfarm.ingest.webhooks.make_event`.

    Returns:
        "status": HTTP status of the answer.

    Raises:
        UrlRefused, ValueError: Nothing may be sent there, or not this; there is no other try.
        RequestFailed: The receiver has not taken it.
    """
    job = get_current_job()
    note(state="running")
    try:
        status = deliver(url, event, Settings())
    except ValueError:
        if job is not None:
            job.retries_left = 0
        raise
    except RequestFailed as error:
        if job is not None and not job.retries_left:
            log.error("given up: %s was not told of %s: %s", job.description, event["id"], error)  # noqa: TRY400 -- RQ logs where
        raise
    note(state="finished")
    return {"status": status}


TASKS: Final[Mapping[str, Callable[..., Report]]] = {
    f"producer.tasks.{task.__name__}": task
    for task in (embed_corpus, embed_batch, retry_failed, export, reconcile, cleanup, notify)
}


def _embed(
    verb: str, corpus: str | list[str], out: str, options: Mapping[str, Option], *flags: str
) -> Report:
    settings = Settings()
    place = allow(out, settings.task_roots)
    sources = _sources(corpus, settings)
    words = ["embed", f"--out={place}", "--json", *flags, *option_words(options, settings)]
    model = f" with {options['model']}" if "model" in options else ""
    begin(f"{verb} {_names(sources)} into {place}{model}", place)
    with closing_client(settings.redis_url) as client:
        watch = partial(look, FarmClient(client), place)
        fetched = _fetch(sources, place, settings, watch)
        try:
            report: Report = run_command(
                [*words, "--", *fetched], limit(settings, sources), watch, {0, FAILED_CHUNKS}
            )
        except CommandFailed:
            watch()  # it may have been cancelled since
            raise
    count = report["count"]
    note(state="finished", done=count, of=count, failed=report["failed"])
    return report


def _tenant_of(job: Job) -> str:
    """Return the tenant of a job, "" if the farm knows nothing of it any more."""
    with suppress(JobGone):
        return job.status().tenant
    return ""


def _run(words: list[str], settings: Settings, *statuses: int) -> Report:
    """Run a command that shows no progress; its end may also have one of these statuses."""
    report: Report = run_command(words, settings, statuses={0, *statuses})
    note(state="finished")
    return report


def _check_webhook(url: str) -> None:
    if url:
        parse_url(url)


def _sources(corpus: str | list[str], settings: Settings) -> list[Path | Url]:
    """Return the paths and URLs of a corpus, after checking that all are allowed."""
    return [
        allow_url(name, settings.ingest_urls)
        if is_url(name)
        else allow_source(name, settings.task_roots)
        for name in ([corpus] if isinstance(corpus, str) else corpus)
    ]


def _names(sources: list[Path | Url]) -> str:
    """Name sources for people, URLs without their query, which may hold a signature."""
    return ", ".join(each.place if isinstance(each, Url) else str(each) for each in sources)


def _fetch(
    sources: list[Path | Url],
    out: Path,
    settings: Settings,
    look: Callable[[], object] = lambda: None,
    get: Fetch = fetch,
) -> list[str]:
    """Return a corpus's files and directories; URLs are first fetched to below `out`, by `get`."""
    places = places_of((each for each in sources if isinstance(each, Url)), out)
    fetched: dict[Path | Url, Path] = {}
    for url, place in places.items():
        path = allow(str(place), settings.task_roots)
        try:
            fetched[url] = get(url, path, settings, DownloadProgress(look))
        except RequestFailed:
            check_stop()  # it was not asked while the server was silent
            raise
    return [str(fetched.get(each, each)) for each in sources]


def option_words(options: Mapping[str, Option], settings: Settings) -> list[str]:
    """Return each option as one word, so that no value can pass for another option.

    Raises:
        PathRefused, OptionRefused, StorageRefused: An option is not allowed.
    """
    words = []
    for name, given in options.items():
        if name not in EMBED_OPTIONS:
            raise OptionRefused(f"no option {name!r}; there are {', '.join(sorted(EMBED_OPTIONS))}")
        if name == "to" and not (isinstance(given, str) and given in settings.stores):
            raise OptionRefused("option 'to' must be a name in the setting stores")
        for value in _values(name, given):
            if name == "stored" and value:
                check_place(str(value), settings.stored_roots)
            flag = f"--{name.replace('_', '-')}"
            if name in PATH_OPTIONS or (name == "model" and _is_path(str(value))):
                words.append(f"{flag}={allow(str(value), settings.task_roots)}")
            elif value is not False:
                words.append(flag if value is True else f"{flag}={value}")
    return words


def _values(name: str, given: Option) -> list[Scalar]:
    """Return the values of an option, one or several.

    Raises:
        OptionRefused: The option cannot have such a value.
    """
    if name in LIST_OPTIONS:
        texts = given if isinstance(given, list) else [given]
        if all(isinstance(text, str) for text in texts):
            return list(texts)
        raise OptionRefused(f"option {name!r} must be a text, or a list of texts")
    if not isinstance(given, Scalar):
        raise OptionRefused(f"option {name!r} must be one text, number, true or false")
    return [given]


def _is_path(model: str) -> bool:
    """Tell whether a model is named by a place on the disk, and not by its name on the hub."""
    return model.startswith(("/", ".", "~")) or Path(model).exists()


def _is_over(job: Job, status: JobStatus, before: float) -> bool:
    """Tell whether nothing is left to do for a job, and it has rested since `before`."""
    if max(status.created_ms, status.last_commit_ms) / 1000 >= before:
        return False
    return status.cancelled or (status.embedded and (status.removable or not is_feed(job)))


def _delete_cancelled(queue: Queue, before: float) -> list[str]:
    """Delete cancelled RQ jobs that were enqueued before a time; ended ones expire."""
    registry = CanceledJobRegistry(queue=queue)
    deleted = []
    for name in over_unreadable(queue, registry.get_job_ids):
        try:
            job = ReadableJob.fetch(name, queue.connection, serializer="json")
        except NoSuchJobError:
            registry.remove(name)
            continue
        if job.enqueued_at is None or job.enqueued_at.timestamp() < before:
            job.forget()
            deleted.append(name)
    return deleted
