"""The protocol of Text Embeddings Inference, and of TEI Machine where that has more."""

import base64
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, Final, Literal

import numpy as np
from fastapi import APIRouter, HTTPException, Response
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, Field
from tokenizers import Encoding

from embedfarm.contract.hyperplanes import BITS_MAX, BITS_MIN, SEED_MAX, hash_once
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.answers import list_of, respond
from embedfarm.web.http.bodies import BoundedRoute
from embedfarm.web.http.problems import problems
from embedfarm.web.http.schemas import TEXT, TEXTS, WHOLE, Body, Many, shapes
from embedfarm.web.http.tokenizers import check_texts, tokenize, tokenizer_of
from embedfarm.web.interactive import (
    DIMENSIONS_MAX,
    Interactive,
    InteractiveRequests,
    are_unit,
    shape,
)
from embedfarm.web.jobs.job_requests import Words
from embedfarm.web.services import Service, Services, need

router: Final = APIRouter(tags=["TEI"], route_class=BoundedRoute)
Inputs = Annotated[
    Annotated[str, TEXT] | Annotated[Many[str], Field(min_length=1), TEXTS],
    shapes("must be a text or a list of texts"),
]


UNIT: Final = "normalize: the model itself makes all vectors of length 1, and so has no others"


def capitalised(word: object) -> object:
    """Return a word as TEI writes it, which takes it in any case; anything else as it is."""
    return word.capitalize() if isinstance(word, str) else word


class EmbedRequest(Body):
    """Texts to embed; one that is too long is cut, or an error if `truncate` is false.

    `truncation_direction` is there for clients that send it: a text is cut at its end.
    """

    inputs: Inputs
    normalize: bool | None = True
    truncate: bool | None = True
    prompt_name: Words | None = None
    dimensions: Annotated[int, Field(ge=1, le=DIMENSIONS_MAX), WHOLE] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncation_direction: Annotated[Literal["Right"], BeforeValidator(capitalised)] | None = None


class LshRequest(Body):
    """Texts to hash with random hyperplanes; `bitn`, the bits of each, is a multiple of 8."""

    inputs: Inputs
    bitn: Annotated[int, Field(ge=BITS_MIN, le=BITS_MAX, multiple_of=8), WHOLE] = 2048
    seed: Annotated[int, Field(ge=0, le=SEED_MAX), WHOLE] = 0
    encoding: Literal["hex", "base64"] = "hex"
    truncate: bool = True


class TokenizeRequest(Body):
    """Texts to split into tokens."""

    inputs: Inputs
    add_special_tokens: bool = True


class RerankRequest(Body):
    """Texts to be sorted by their nearness to a query."""

    query: str
    texts: Annotated[Many[str], Field(min_length=1)]
    return_text: bool = False
    truncate: bool = True


class Token(BaseModel):
    """A token, and which characters of the text it is."""

    id: int
    text: str
    special: bool
    start: int
    stop: int


class Ranked(BaseModel):
    """A text by its place in the request, and the cosine of its vector with the query's."""

    index: int
    score: float
    text: str | None = None


class Info(BaseModel):
    """The model that is served, and its limits."""

    model_id: str
    auto_truncate: bool
    max_concurrent_requests: int
    max_client_batch_size: int
    version: str


@router.get("/info", responses=problems(), dependencies=need(Scope.READ))
async def info(services: Service) -> Info:
    """Show the model of these routes, and its limits."""
    settings = services.settings
    return Info(
        model_id=settings.models[0],
        auto_truncate=True,
        max_concurrent_requests=settings.http_waiting_max,
        max_client_batch_size=settings.lane_texts_max,
        version=version("embedfarm"),
    )


@router.post(
    "/",
    response_model=list[list[float] | str],
    responses=problems(404),
    dependencies=need(Scope.SUBMIT),
    include_in_schema=False,  # the page at the root is not in it either
)
@router.post(
    "/embed",
    response_model=list[list[float] | str],
    responses=problems(404),
    dependencies=need(Scope.SUBMIT),
)
async def embed(services: Service, interactive: Interactive, request: EmbedRequest) -> Response:
    """Embed texts; vectors come in the order of the inputs.

    In base64 a vector is the bytes of its little-endian float32.
    """

    def work() -> Response:
        vectors = _vectors(
            services,
            interactive,
            _listed(request.inputs),
            truncate=request.truncate is not False,
            prompt_name=request.prompt_name or "",
        )
        plain = request.normalize is False
        if plain and are_unit(vectors):
            raise HTTPException(422, UNIT)
        shaped = shape(vectors, request.dimensions, normalize=not plain).astype("<f4", copy=False)
        if request.encoding_format == "base64":
            return respond(list_of(map(_in_base64, shaped)))
        return respond(list_of(row.tolist() for row in shaped))

    return await interactive.run(work, services.settings.models[0])


@router.post(
    "/lsh", response_model=list[str], responses=problems(), dependencies=need(Scope.SUBMIT)
)
async def lsh(services: Service, interactive: Interactive, request: LshRequest) -> Response:
    """Hash texts to bits: on which side of each hyperplane a vector lies, first in the highest bit.

    Two vectors at an angle of a differ in a share a / pi of the bits, on average.
    """

    def work() -> Response:
        vectors = _vectors(
            services, interactive, _listed(request.inputs), truncate=request.truncate
        )
        print_row = _in_hex if request.encoding == "hex" else _in_base64
        return respond(list_of(map(print_row, hash_once(vectors, request.bitn, request.seed))))

    return await interactive.run(work, services.settings.models[0])


@router.post("/rerank", responses=problems(), dependencies=need(Scope.SUBMIT))
async def rerank(
    services: Service, interactive: Interactive, request: RerankRequest
) -> list[Ranked]:
    """Sort texts, nearest to the query first."""

    def work() -> list[Ranked]:
        texts = [request.query, *request.texts]
        vectors = shape(_vectors(services, interactive, texts, truncate=request.truncate))
        scores = vectors[1:] @ vectors[0]
        return [
            Ranked(
                index=index,
                score=float(scores[index]),
                text=request.texts[index] if request.return_text else None,
            )
            for index in np.argsort(-scores, kind="stable").tolist()
        ]

    return await interactive.run(work, services.settings.models[0])


@router.post(
    "/tokenize",
    response_model=list[list[Token]],
    responses=problems(),
    dependencies=need(Scope.SUBMIT),
)
async def tokens(services: Service, interactive: Interactive, request: TokenizeRequest) -> Response:
    """Split each text into tokens, none cut off; a text has at most 32,768 bytes."""
    return await interactive.run(partial(_tokens, services, request))


def _tokens(services: Services, request: TokenizeRequest) -> Response:
    texts = _listed(request.inputs)
    check_texts(texts, services.settings)
    tokenizer = tokenizer_of(services.settings.models[0], services.settings)
    found = tokenize(tokenizer, texts, special=request.add_special_tokens)
    return respond(_print(texts, found))


def _print(texts: Sequence[str], found: Iterable[Encoding]) -> Iterator[bytes]:
    """Yield a JSON list of lists; no more than one `Token` is made at a time."""
    before = b"["
    for text, each in zip(texts, found, strict=True):
        yield before
        yield from list_of(_describe(text, each))
        before = b","
    yield b"]"


def _describe(text: str, found: Encoding) -> Iterator[dict[str, Any]]:
    """Yield a `Token` for each token of a text."""
    rows = zip(found.ids, found.tokens, found.special_tokens_mask, found.offsets, strict=True)
    for identifier, word, special, (start, stop) in rows:
        yield {
            "id": identifier,
            "text": word if special else text[start:stop],
            "special": bool(special),
            "start": start,
            "stop": stop,
        }


def _vectors(
    services: Services,
    interactive: InteractiveRequests,
    texts: list[str],
    *,
    truncate: bool,
    prompt_name: str = "",
) -> NDArray[np.float32]:
    model = services.settings.models[0]
    return interactive.embed(model, texts, truncate=truncate, prompt_name=prompt_name).matrix()


def _listed(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs


def _in_hex(row: NDArray[np.uint8]) -> str:
    return row.tobytes().hex()


def _in_base64(row: NDArray[np.uint8] | NDArray[np.float32]) -> str:
    return base64.b64encode(row.tobytes()).decode()
