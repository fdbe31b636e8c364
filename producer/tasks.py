"""Jobs for RQ: plain functions of JSON values, which `embedfarm ingest` runs.

    Queue("embedfarm", serializer="json", connection=…).enqueue(
        "producer.tasks.embed_corpus", "/data/corpus.jsonl", "/data/vectors", model="…")

Their arguments are paths and options, never texts or vectors. Each may be run again at any time: it
goes on where it was, or finds its work done. Paths must be below the setting `ingest_roots`.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.registry import CanceledJobRegistry

from embedfarm.broker import closing_client
from embedfarm.farm import Farm
from embedfarm.settings import Settings
from embedfarm.status import JobStatus
from producer.command import run_command
from producer.requests import ReadableJob, begin, look, note
from producer.roots import allow, allow_source

QUEUE: Final = "embedfarm"
DAY_SECONDS: Final = 86400
FAILED_CHUNKS: Final = 3  # status of `embedfarm embed`: finished, and errors.jsonl names some
PATH_OPTIONS: Final = frozenset({"ranges"})
EMBED_OPTIONS: Final = PATH_OPTIONS | {
    "model", "text_field", "id_field", "input_format", "glob", "chunk_tokens", "chunk_overlap",
    "on_bad_row", "dtype", "engine", "vector_dtype", "lsh_bits", "format", "prompt", "max_length",
    "long", "long_overlap", "dimensions", "normalize", "priority", "tenant", "weight", "deadline",
    "job_id",
}  # fmt: skip

Option = str | int | float | bool
Report = dict[str, Any]


def embed_corpus(corpus: str | list[str], out: str, **options: Option) -> Report:
    """Embed a corpus into an output directory; a run that was cut off goes on there.

    Args:
        corpus: A file or directory, or several.
        out: The output directory.
        options: Those of `embedfarm embed` in `EMBED_OPTIONS`.

    Returns:
        What `embedfarm embed --json` prints; chunks that failed are counted in it.

    Raises:
        PathRefused, ValueError: An argument is not allowed.
        CommandFailed: The corpus, the output or the farm refuses.
        Interrupted: This process was asked to stop.
    """
    return _embed("embed", corpus, out, options)


def retry_failed(corpus: str | list[str], out: str, **options: Option) -> Report:
    """Embed the chunks of a finished output that failed once more; otherwise as `embed_corpus`."""
    return _embed("retry what failed of", corpus, out, options, "--retry-failed")


def export(out: str, to: str, format: str = "npy") -> Report:  # noqa: A002 -- as the command says
    """Write a finished output in another format into another directory.

    Raises:
        As `embed_corpus`.
    """
    settings = Settings()
    source, target = allow(out, settings.ingest_roots), allow(to, settings.ingest_roots)
    begin(f"export {source} into {target} as {format}")
    words = ["export", f"--out={target}", f"--format={format}", "--json", "--", str(source)]
    return _run(words, settings)


def reconcile(out: str, corpus: str | list[str]) -> Report:
    """Compare a finished output with its manifest and its corpus.

    Returns:
        "problems": of each the "file" and a sentence, the "problem"; none when all is well.

    Raises:
        As `embed_corpus`.
    """
    settings = Settings()
    directory = allow(out, settings.ingest_roots)
    sources = _sources(corpus, settings)
    begin(f"compare {directory} with {', '.join(sources)}")
    against = [f"--against={source}" for source in sources]
    return _run(["verify", *against, "--json", "--", str(directory)], settings, 1)


def cleanup(seconds: float = DAY_SECONDS) -> Report:
    """Delete from the server what nobody comes back for: cancelled jobs, and embedded ones.

    An output whose job is deleted can still be resumed: what is not on disk is embedded again.

    Args:
        seconds: Only what has rested for so long.

    Returns:
        "jobs": ids of the farm's jobs, "requests": ids of the cancelled RQ jobs that were deleted.
    """
    settings = Settings()
    begin(f"delete what has rested for {seconds:,.0f} s")
    before = time.time() - seconds
    with closing_client(settings.redis_url) as client:
        farm = Farm(client)
        ended = [job for job, status in farm.statuses().items() if _is_over(status, before)]
        for job in ended:
            farm.job(job).delete()
        requests = _delete_cancelled(Queue(QUEUE, client, serializer="json"), before)
    note(state="finished")
    return {"jobs": ended, "requests": requests}


TASKS: Final[Mapping[str, Callable[..., Report]]] = {
    f"producer.tasks.{task.__name__}": task
    for task in (embed_corpus, retry_failed, export, reconcile, cleanup)
}


def _embed(
    verb: str, corpus: str | list[str], out: str, options: Mapping[str, Option], *flags: str
) -> Report:
    settings = Settings()
    place = allow(out, settings.ingest_roots)
    sources = _sources(corpus, settings)
    words = ["embed", f"--out={place}", "--json", *flags, *_flags(options, settings)]
    model = f" with {options['model']}" if "model" in options else ""
    begin(f"{verb} {', '.join(sources)} into {place}{model}", place)
    with closing_client(settings.redis_url) as client:
        report: Report = run_command(
            [*words, "--", *sources],
            settings,
            partial(look, Farm(client), place),
            {0, FAILED_CHUNKS},
        )
    count = report["count"]
    note(state="finished", done=count, of=count, failed=report["failed"])
    return report


def _run(words: list[str], settings: Settings, *statuses: int) -> Report:
    """A command without progress, whose end may also have one of these statuses."""
    report: Report = run_command(words, settings, statuses={0, *statuses})
    note(state="finished")
    return report


def _sources(corpus: str | list[str], settings: Settings) -> list[str]:
    names = [corpus] if isinstance(corpus, str) else corpus
    return [str(allow_source(name, settings.ingest_roots)) for name in names]


def _flags(options: Mapping[str, Option], settings: Settings) -> list[str]:
    """Options as one word each, so that no value can pass for another option."""
    words = []
    for name, value in options.items():
        if name not in EMBED_OPTIONS:
            raise ValueError(f"no option {name!r}; there are {', '.join(sorted(EMBED_OPTIONS))}")
        if not isinstance(value, Option):
            raise ValueError(f"option {name!r} must be one text, number, true or false")  # noqa: TRY004 -- callers catch one kind
        if name in PATH_OPTIONS or (name == "model" and _is_path(str(value))):
            value = str(allow(str(value), settings.ingest_roots))  # noqa: PLW2901 -- resolved
        flag = f"--{name.replace('_', '-')}"
        if value is not False:
            words.append(flag if value is True else f"{flag}={value}")
    return words


def _is_path(model: str) -> bool:
    """Whether a model is named by a place on the disk, and not by its name on the hub."""
    return model.startswith(("/", ".", "~")) or Path(model).exists()


def _is_over(status: JobStatus, before: float) -> bool:
    """Whether nothing is left to do for a job, and it has rested since `before`."""
    rested = max(status.created_ms, status.last_commit_ms) / 1000 < before
    return rested and (status.state == "cancelled" or status.embedded)


def _delete_cancelled(queue: Queue, before: float) -> list[str]:
    """Delete cancelled RQ jobs that were enqueued before a time; those that ended go by TTL."""
    registry = CanceledJobRegistry(queue=queue)
    deleted = []
    for name in registry.get_job_ids():
        try:
            job = ReadableJob.fetch(name, queue.connection, serializer="json")
        except NoSuchJobError:
            registry.remove(name)
            continue
        if job.enqueued_at is None or job.enqueued_at.timestamp() < before:
            job.delete()
            deleted.append(name)
    return deleted
