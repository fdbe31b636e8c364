"""Estimates by HTTP: what a job would take, from the request that would make it.

All that is looked at is the beginning of a corpus, so that a request costs the same for any.
"""

from pathlib import Path, PurePosixPath
from typing import Annotated, Final

from fastapi import APIRouter, HTTPException, Query, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from tokenizers import Tokenizer

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.sizing import BYTES_PER_TOKEN
from embedfarm.contract.token_counter import TokenCounter
from embedfarm.ingest.allow_list import is_url
from embedfarm.readers import CorpusError, CorpusOptions
from embedfarm.readers.corpus import SUFFIXES
from embedfarm.readers.source import split_compression
from embedfarm.watch.corpus_beginning import read_beginning
from embedfarm.watch.rough_estimate import RoughEstimate, estimate_roughly
from embedfarm.watch.trial_run import ForecastError
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.http.schemas import WHOLE
from embedfarm.web.http.tokenizers import TEXT_BYTES_MAX, tokenize, tokenizer_of
from embedfarm.web.jobs.job_requests import Options, Order, reading
from embedfarm.web.jobs.submissions import BODIES, find_source
from embedfarm.web.services import Service, Services, need

TOKENISED_CHARACTERS: Final = 1 << 17  # to know how many bytes a token has
SIZE_MAX: Final = 1 << 50

router: Final = APIRouter(prefix="/v1", tags=["jobs"])


class EstimateOptions(Options):
    """Options of a job, and how large its corpus is where only its beginning is sent."""

    bytes: Annotated[
        int, Field(ge=0, le=SIZE_MAX, description="Of the whole file; 0: it is all sent."), WHOLE
    ] = 0
    chunks: Annotated[
        int, Field(ge=0, le=SIZE_MAX, description="Of the whole corpus; 0: by its bytes."), WHOLE
    ] = 0


@router.post(
    "/estimates",
    responses=problems(404, 409, 415, 507),
    dependencies=need(Scope.SUBMIT),
    openapi_extra={"requestBody": {"required": True, "content": BODIES}},
)
async def estimate_job(
    services: Service, request: Request, options: Annotated[EstimateOptions, Query()]
) -> RoughEstimate:
    """Say what a job would take, without making it: time, device-hours, cost, with ranges.

    The body is that of `POST /v1/jobs`; some texts, or the beginning of a file of lines, are
    enough if `chunks` or `bytes` says how large the whole is.
    """
    async with reading(request, services, options) as order:
        return await run_in_threadpool(estimate_order, services, order)


def estimate_order(services: Services, order: Order) -> RoughEstimate:
    """Estimate the job that an order asks for, from the beginning of its corpus.

    Raises:
        HTTPException: The corpus cannot be estimated, or the farm does not know the model.
        ModelNotServed, PathRefused: The model or the corpus may not be asked for.
    """
    said = order.options
    assert isinstance(said, EstimateOptions)  # noqa: S101 -- as whoever has read it gave it
    model = services.find_model(said.model)
    if order.upload is not None:
        path = order.upload.path
    elif is_url(order.corpus):
        raise HTTPException(422, "a URL is not read for an estimate: send some texts, and chunks")
    else:
        path = Path(find_source(order.corpus, services.settings))
    try:
        options = CorpusOptions(
            text_field=said.text_field, template=said.text or None, id_field=said.id_field or None,
            format=_format_of(order), encoding=said.encoding,
        )  # fmt: skip
        beginning = read_beginning(path, options, said.bytes, said.chunks)
    except (CorpusError, OSError) as error:
        raise HTTPException(422, f"the corpus cannot be estimated: {error}") from error
    spec, settings = said.spec(model), services.settings
    counter = _counter(services, spec, beginning.texts)
    try:
        return estimate_roughly(
            services.farm, spec, beginning, counter, settings.rate_half_life_seconds
        )
    except ForecastError as error:
        raise HTTPException(409, f"{error}: `embedfarm embed … --plan` tries it") from error


def _format_of(order: Order) -> str | None:
    """Return the format of a corpus by its options and name; None where it is not read here."""
    stem, compression = split_compression(order.corpus.lower())
    suffix = PurePosixPath(stem).suffix
    if compression or not suffix:
        return None
    return order.options.input_format or SUFFIXES.get(suffix)


def _counter(services: Services, spec: JobSpec, texts: list[str]) -> TokenCounter:
    """Return what estimates tokens, the worse where the model's tokenizer is not here."""
    if model_files.is_null(spec.model):
        return TokenCounter.of_job(spec, None, BYTES_PER_TOKEN)
    try:
        tokenizer = tokenizer_of(spec.model, services.settings)
    except HTTPException:
        return TokenCounter.of_job(spec, None)
    directory = model_files.find_local(spec.model, services.settings.model_cache)
    return TokenCounter.of_job(spec, directory, _bytes_per_token(tokenizer, texts))


def _bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> float | None:
    """Return the bytes of a token in texts; None without any token."""
    some, left = list[str](), TOKENISED_CHARACTERS
    for text in texts:
        some.append(text[: min(left, TEXT_BYTES_MAX // 4)])
        left -= len(some[-1])
        if not left:
            break
    tokens = sum(len(each.ids) for each in tokenize(tokenizer, some, special=False))
    return sum(len(text.encode()) for text in some) / tokens if tokens else None
