"""Submission of jobs by HTTP.

Such a job has a directory (`ingest.job_directories`), and an RQ job that `embedfarm ingest` runs.
It is on the farm from the moment that it is accepted, so that it can be steered before it runs.
"""

import contextlib
import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema
from rq.exceptions import DuplicateJobError
from starlette.concurrency import run_in_threadpool

from embedfarm.collector.output_directory import State, read_state
from embedfarm.contract.private_directories import make_private
from embedfarm.contract.redaction import hide_in_word, name_corpus
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.contract.stored_results import StorageRefused, check_place, place_below
from embedfarm.ingest.allow_list import PathRefused, allow_source, allow_url, is_url
from embedfarm.ingest.job_directories import (
    OUTPUT,
    Call,
    directory_of,
    read_call,
    write_call,
)
from embedfarm.ingest.outbound import UrlRefused
from embedfarm.ingest.tasks import option_words
from embedfarm.ingest.webhooks import check_webhook
from embedfarm.runs.stored_place import check_stored
from embedfarm.watch.overview import JobFacts, read_job
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.jobs.idempotency import IdempotencyKey, answer_once
from embedfarm.web.jobs.job_requests import (
    FILE_TYPES,
    FORM,
    JSON,
    Options,
    Order,
    Submission,
    reading,
)
from embedfarm.web.services import Caller, Service, Services, need

LOGGER: Final = logging.getLogger(__name__)
REFERENCE: Final = "#/components/schemas/{model}"
LOCATION: Final = {"headers": {"Location": {"schema": {"type": "string"}}}}

router: Final = APIRouter(prefix="/v1/jobs", tags=["jobs"])
_FACTS: Final = TypeAdapter(JobFacts)


class UploadedCorpus(Options):
    """Form with a corpus as a file, whose name says its format, and options in other fields."""

    file: bytes


def _schemas() -> dict[str, Any]:
    """Describe the bodies that the route here reads by itself.

    A submission has texts or a source: a schema for each, since generated clients have no type for
    what has one of two fields.
    """
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (Submission, "validation"),
        (UploadedCorpus, "validation"),
    ]
    schemas: dict[str, Any] = models_json_schema(models, ref_template=REFERENCE)[1]["$defs"]
    either = schemas.pop(Submission.__name__)
    for has, other, says in (
        ("texts", "source", "Texts to embed, with options."),
        ("source", "texts", "The path or URL of a corpus that the farm may read, with options."),
    ):
        title = f"Submitted{has.title()}"
        fields = {name: each for name, each in either["properties"].items() if name != other}
        own = {"title": title, "description": says, "properties": fields, "required": [has]}
        schemas[title] = either | own
    return schemas


SCHEMAS: Final = _schemas()
_BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
_EITHER: Final = [
    {"$ref": REFERENCE.format(model=f"Submitted{has}")} for has in ("Texts", "Source")
]
BODIES: Final = {
    JSON: {"schema": {"oneOf": _EITHER}},
    FORM: {"schema": {"$ref": REFERENCE.format(model=UploadedCorpus.__name__)}},
} | dict.fromkeys(FILE_TYPES, _BINARY)


@router.post(
    "",
    status_code=201,
    response_model=JobFacts,
    responses={201: LOCATION, **problems(404, 409, 415, 507)},
    dependencies=need(Scope.SUBMIT),
    openapi_extra={"requestBody": {"required": True, "content": BODIES}},
)
async def submit_job(
    services: Service,
    who: Caller,
    request: Request,
    options: Annotated[Options, Query()],
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Embed a corpus: texts in JSON, a file that is the body or in a form, or a path of the farm.

    Options are in the query, the JSON object or the form; what the body says counts.
    """
    async with reading(request, services, options) as order:
        job, facts = await run_in_threadpool(_answer, services, who, idempotency_key, order)
    headers = {"location": f"{router.prefix}/{job}"}
    return Response(facts, 201, headers, "application/json")


def _answer(services: Services, who: Caller, key: str | None, order: Order) -> tuple[str, str]:
    """Make the job of an order, unless it was made before; return its id and its facts in JSON.

    The order is checked only when its job is made: a repeat is answered though its corpus is gone.
    """

    def submit(job: str) -> str:
        _submit(services, job, order)
        LOGGER.info("%s submits job %r", who.name, job)
        return _FACTS.dump_json(read_job(services.farm, job)).decode()

    return answer_once(services, who, key, order.identity(), submit)


def find_source(source: str, settings: Settings) -> str:
    """Return where a corpus is, if the farm may read it and it is not among the jobs by HTTP.

    Raises:
        PathRefused: The farm may not read it.
    """
    try:
        if is_url(source):
            allow_url(source, settings.ingest_urls)
            return source
        return str(allow_source(source, settings.ingest_roots, settings.jobs_path))
    except UrlRefused as error:
        raise PathRefused(str(error)) from error
    except OSError as error:
        raise PathRefused(f"{hide_in_word(source)!r}: {error.strerror}") from error


def _check_webhook(url: str, settings: Settings) -> None:
    try:
        check_webhook(url, settings)
    except ValueError as error:
        raise HTTPException(422, f"webhook: {error}") from error


def _check_stored(options: Options, settings: Settings) -> None:
    try:
        check_stored(options.format, options.stored)
        if options.stored:
            check_place(options.stored, settings.stored_roots)
    except StorageRefused as error:
        raise HTTPException(422, str(error)) from error


def _submit(services: Services, job: str, order: Order) -> None:
    """Make a job and have it done, or go on where an earlier try to do so has ended.

    Raises:
        JobGone: The job was made before, and the farm knows nothing of it any more.
    """
    directory = services.settings.jobs_path / job
    there = services.submissions.was_made(job)
    try:
        if not there:
            _make(services, job, order, directory)
        call = read_call(directory)
        if call is not None and services.submissions.is_forgotten(job):
            with contextlib.suppress(DuplicateJobError):
                services.submissions.embed(job, call)
    except BaseException:
        if not there:
            services.farm.job(job).delete()  # first: what is on the farm has its input
            services.submissions.remove(job)
        raise


def _make(services: Services, job: str, order: Order, directory: Path) -> None:
    """Put a job into its directory and on the farm."""
    model, corpus = _check(services, order)
    reuse = [str(_find_output(services, each)) for each in order.options.reuse.split(",") if each]
    terms = services.grant(order.options.terms())
    services.farm.admit(job, services.settings.jobs_max)
    make_private(directory)
    options = {"model": model, **order.options.for_task(), "job_id": job}
    if reuse:
        options["reuse"] = reuse
    call = _put(directory, replace(order, corpus=corpus), options, terms.tenant)
    notes = {
        "out": call.out,
        "command": _command(call, services.settings),
        "corpus": name_corpus(call.corpus, services.settings.jobs_path),
    }
    spec = order.options.spec(model)
    if spec.stored:
        spec = msgspec.structs.replace(spec, stored=place_below(spec.stored, job))
    services.farm.job(job).create(spec, 0, terms, notes)


def _check(services: Services, order: Order) -> tuple[str, str]:
    """Return the model and the corpus of an order, if all that it names may be asked for."""
    model = services.find_model(order.options.model)
    if order.options.to and order.options.to not in services.stores:
        shown = hide_in_word(order.options.to)
        raise HTTPException(422, f"to: there is no store {shown!r} for this key")
    _check_stored(order.options, services.settings)
    if order.options.webhook:
        _check_webhook(order.options.webhook, services.settings)
    if order.upload is not None:
        return model, order.corpus
    return model, find_source(order.corpus, services.settings)


def _find_output(services: Services, job: str) -> Path:
    """Return the output of a finished job whose vectors another one takes.

    Raises:
        HTTPException: The job is not there for the caller, or has no finished output here.
    """
    with contextlib.suppress(JobGone):
        services.find_job(job)
        directory = directory_of(services.settings, job)
        if directory is not None:
            if read_state(directory / OUTPUT) is State.FINISHED:
                return directory / OUTPUT
            raise HTTPException(409, f"reuse: job {job} has no finished output")
    raise HTTPException(404, f"reuse: no such job by HTTP: {job}")


def _command(call: Call, settings: Settings) -> str:
    """Return the command that does the same on the farm's host."""
    options = {name: value for name, value in call.options.items() if name != "webhook"}
    words = ["embedfarm", "embed", *option_words(options, settings), f"--out={call.out}"]
    return shlex.join(map(hide_in_word, [*words, "--", *call.corpus]))


def _put(directory: Path, order: Order, options: dict[str, Any], tenant: str) -> Call:
    """Put the upload of an order into its directory, with a record of the order."""
    corpus = order.corpus
    if order.upload is not None:
        corpus = str(directory / order.corpus)
        order.upload.path.replace(corpus)
    call = Call([corpus], str(directory / OUTPUT), options, tenant)
    write_call(directory, call)
    return call
