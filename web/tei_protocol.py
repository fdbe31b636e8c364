"""The protocol of Text Embeddings Inference, and of TEI Machine where that has more."""

import base64
from functools import partial
from importlib.metadata import version
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Response
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from embedfarm.hyperplanes import BITS_MAX, BITS_MIN, SEED_MAX, hash_vectors
from web.interactive import AtDesk, Desk, shape
from web.keys import Scope
from web.orders import Words
from web.problems import problems
from web.schemas import WHOLE, Body
from web.services import Service, Services, need
from web.tokens import tokenize, tokenizer_of

router: Final = APIRouter(tags=["TEI"])
Inputs = str | Annotated[list[str], Field(min_length=1)]


class EmbedRequest(Body):
    """Texts; one that is too long is cut unless `truncate` is false, which makes it an error."""

    inputs: Inputs
    normalize: bool = True
    truncate: bool = True
    prompt_name: Words | None = None


class LshRequest(Body):
    """Texts of which bits of random hyperplanes are wanted, a multiple of 8."""

    inputs: Inputs
    bitn: Annotated[int, Field(ge=BITS_MIN, le=BITS_MAX, multiple_of=8), WHOLE] = 2048
    seed: Annotated[int, Field(ge=0, le=SEED_MAX), WHOLE] = 0
    encoding: Literal["hex", "base64"] = "hex"
    truncate: bool = True


class TokenizeRequest(Body):
    """Texts of which the tokens are wanted."""

    inputs: Inputs
    add_special_tokens: bool = True


class RerankRequest(Body):
    """Texts to be put in the order of their nearness to a query."""

    query: str
    texts: Annotated[list[str], Field(min_length=1)]
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
    """What is served."""

    model_id: str
    auto_truncate: bool
    max_concurrent_requests: int
    max_client_batch_size: int
    version: str


@router.get("/info", responses=problems(), dependencies=need(Scope.READ))
async def info(services: Service) -> Info:
    """The model of these routes, and its limits."""
    settings = services.settings
    return Info(
        model_id=settings.models[0],
        auto_truncate=True,
        max_concurrent_requests=settings.http_waiting_max,
        max_client_batch_size=settings.lane_texts_max,
        version=version("embedfarm"),
    )


@router.post(
    "/embed",
    response_model=list[list[float]],
    responses=problems(404),
    dependencies=need(Scope.SUBMIT),
)
async def embed(services: Service, desk: AtDesk, request: EmbedRequest) -> Response:
    """Vectors, in the order of the inputs."""

    def work() -> bytes:
        vectors = _vectors(
            services,
            desk,
            _listed(request.inputs),
            truncate=request.truncate,
            prompt_name=request.prompt_name or "",
        )
        return msgspec.json.encode(shape(vectors, normalize=request.normalize).tolist())

    return Response(await desk.run(work), media_type="application/json")


@router.post(
    "/lsh", response_model=list[str], responses=problems(), dependencies=need(Scope.SUBMIT)
)
async def lsh(services: Service, desk: AtDesk, request: LshRequest) -> Response:
    """Bits that tell on which side of each hyperplane a vector lies, the first in the highest bit.

    Two vectors at an angle of a differ in a share a / pi of the bits, on average.
    """

    def work() -> bytes:
        vectors = _vectors(services, desk, _listed(request.inputs), truncate=request.truncate)
        rows = hash_vectors(vectors, request.bitn, request.seed)
        if request.encoding == "hex":
            return msgspec.json.encode([row.tobytes().hex() for row in rows])
        return msgspec.json.encode([base64.b64encode(row.tobytes()).decode() for row in rows])

    return Response(await desk.run(work), media_type="application/json")


@router.post("/rerank", responses=problems(), dependencies=need(Scope.SUBMIT))
async def rerank(services: Service, desk: AtDesk, request: RerankRequest) -> list[Ranked]:
    """The texts, nearest to the query first."""

    def work() -> list[Ranked]:
        texts = [request.query, *request.texts]
        vectors = shape(_vectors(services, desk, texts, truncate=request.truncate))
        scores = vectors[1:] @ vectors[0]
        return [
            Ranked(
                index=index,
                score=float(scores[index]),
                text=request.texts[index] if request.return_text else None,
            )
            for index in np.argsort(-scores, kind="stable").tolist()
        ]

    return await desk.run(work)


@router.post("/tokenize", responses=problems(), dependencies=need(Scope.SUBMIT))
async def tokens(services: Service, desk: AtDesk, request: TokenizeRequest) -> list[list[Token]]:
    """Tokens of each text, none cut off."""
    return await desk.run(partial(_tokens, services, request))


def _tokens(services: Services, request: TokenizeRequest) -> list[list[Token]]:
    tokenizer = tokenizer_of(services.settings.models[0], services.settings)
    texts = _listed(request.inputs)
    found = tokenize(tokenizer, texts, special=request.add_special_tokens)
    return [
        [
            Token(
                id=identifier,
                text=word if special else text[start:stop],
                special=bool(special),
                start=start,
                stop=stop,
            )
            for identifier, word, special, (start, stop) in zip(
                each.ids, each.tokens, each.special_tokens_mask, each.offsets, strict=True
            )
        ]
        for text, each in zip(texts, found, strict=True)
    ]


def _vectors(
    services: Services, desk: Desk, texts: list[str], *, truncate: bool, prompt_name: str = ""
) -> NDArray[np.float32]:
    model = services.settings.models[0]
    return desk.embed(model, texts, truncate=truncate, prompt_name=prompt_name).matrix()


def _listed(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs
