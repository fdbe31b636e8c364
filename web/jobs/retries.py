"""Retries of jobs: of those that failed, and of the failed chunks of those that finished."""

import contextlib
import logging
from typing import Any, Final

from fastapi import APIRouter, HTTPException
from rq.exceptions import DuplicateJobError

from embedfarm.collector.manifest import Manifest, OutputError, read_manifest
from embedfarm.contract.job_spec import JOB_DEFAULTS, Decides, decided_by
from embedfarm.contract.scheduling_terms import term_options
from embedfarm.contract.settings import Settings
from embedfarm.ingest.allow_list import PathRefused, allow, allow_source
from embedfarm.ingest.job_directories import Call, directory_of, is_submitted, read_call
from embedfarm.runs.request import spec_of
from embedfarm.watch.overview import JobFacts, read_job
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.services import Caller, Service, Services, need

LOGGER: Final = logging.getLogger(__name__)
STORE: Final = ("to", "others")
READING: Final = {
    "text_field": "text_field", "id_field": "id_field", "format": "input_format", "glob": "glob",
    "encoding": "encoding", "chunk_tokens": "chunk_tokens", "chunk_overlap": "chunk_overlap",
    "template": "text", "keep": "keep",
}  # fmt: skip

router: Final = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.post(
    "/{job}/retry",
    status_code=202,
    responses=problems(404, 409),
    dependencies=need(Scope.SUBMIT),
)
def retry_job(services: Service, who: Caller, job: JobId) -> JobFacts:
    """Embed a failed job's corpus again, or the chunks of a finished job that failed."""
    facts = read_job(services.farm, job)
    if facts.state in {"failed", "finished"} and not services.submissions.await_end(job):
        raise HTTPException(409, f"something is yet to be done for job {job}: ask again later")
    call = prepare_retry(services, facts)
    try:
        if facts.state == "failed":
            _begin_anew(services, facts, call)
        else:
            services.submissions.embed(job, call, "retry_failed")
    except (DuplicateJobError, OSError, ValueError) as error:
        raise HTTPException(409, f"job {job} cannot be tried again: {error}") from error
    LOGGER.info("%s retries job %r", who.name, job)
    return read_job(services.farm, job)


def prepare_retry(services: Services, facts: JobFacts) -> Call:
    """Return the call that tries a job again, without doing anything.

    Raises:
        HTTPException: The job cannot be tried again from here; the detail says why.
    """
    job = facts.job
    try:
        if facts.state == "failed":
            return _first_call(services.settings, job)
        if facts.state == "finished":
            return _call_for(services.settings, facts)
    except (OSError, OutputError, PathRefused, ValueError) as error:
        raise HTTPException(409, f"job {job} cannot be tried again: {error}") from error
    raise HTTPException(409, f"job {job} is {facts.state}: there is nothing to retry yet")


def _first_call(settings: Settings, job: str) -> Call:
    """Return the call that made a job.

    Raises:
        HTTPException: The job did not come by HTTP, so that its task is not known here, or its
            task cannot be read.
    """
    directory = directory_of(settings, job)
    if directory is None:
        raise HTTPException(409, f"job {job} was not submitted by HTTP: run it again")
    call = read_call(directory)
    if call is None:
        raise HTTPException(409, f"what job {job} was to do cannot be read: submit it again")
    return call


def _begin_anew(services: Services, facts: JobFacts, call: Call) -> None:
    """Run a failed job again, from where it had stopped."""
    handle = services.farm.job(facts.job)
    notes = {"out": facts.out, "command": handle.noted("command"), "corpus": facts.corpus}
    services.farm.admit(facts.job, services.settings.jobs_max)
    handle.create(handle.spec(), 0, facts.terms, notes)
    with contextlib.suppress(DuplicateJobError):  # who asked at the same time has it done
        services.submissions.embed(facts.job, call)


def _call_for(settings: Settings, facts: JobFacts) -> Call:
    """Make the call that embeds again the chunks that failed of a finished output.

    The terms are the job's, and the store that it has filled gets them, too.

    Raises:
        HTTPException: No chunk failed, or the options cannot be given again.
        OutputError, OSError: There is no finished output.
        PathRefused: The output or its corpus lies below no allowed directory.
    """
    manifest = read_manifest(allow(facts.out, settings.task_roots))
    if not manifest.failed:
        raise HTTPException(409, "no chunk of it failed")
    sources = [
        str(allow_source(each, settings.task_roots)) for each in manifest.settings["sources"]
    ]
    directory = directory_of(settings, facts.job)
    before = read_call(directory) if directory is not None else None
    store = {} if before is None else {k: v for k, v in before.options.items() if k in STORE}
    own = {"job_id": facts.job} if is_submitted(facts.job) else {}  # which is told of a failure
    options = options_of(manifest) | term_options(facts.terms) | store | own
    return Call(sources, facts.out, options, facts.tenant)


def options_of(manifest: Manifest) -> dict[str, Any]:
    """Return the options of `embedfarm embed` that made an output.

    Raises:
        HTTPException: The output has int8 vectors, whose ranges came from elsewhere.
    """
    said = manifest.settings
    if said["vector_dtype"] == "int8":
        raise HTTPException(409, "an output of int8 is retried where its ranges are")
    options = {"format": said["format"]} | {
        name: value
        for name, value in decided_by(spec_of(manifest), Decides.STORAGE).items()
        if name != "ranges" and value != JOB_DEFAULTS.get(name)
    }
    reading = {name: said.get(f"read_{key}") for key, name in READING.items()}
    options |= {name: value for name, value in reading.items() if value is not None}
    if said["skip_bad_rows"]:
        options["on_bad_row"] = "skip"
    return options
