"""OpenAI's protocol: embeddings and models, for clients that know nothing of the farm."""

import base64
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Final, Literal, cast

import msgspec
import numpy as np
from fastapi import APIRouter, HTTPException, Response
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from embedfarm.contract.farm_client import model_rows
from embedfarm.contract.model_states import StateOfModel
from embedfarm.contract.token_ids import TOKENS_REFUSED
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.answers import list_of, respond
from embedfarm.web.http.bodies import BoundedRoute
from embedfarm.web.http.problems import openai_problems
from embedfarm.web.http.schemas import ROWS, TEXT, TEXTS, TOKENS, WHOLE, Body, Many, shapes
from embedfarm.web.http.tokenizers import check_count, decode_ids, tokenizer_of
from embedfarm.web.interactive import DIMENSIONS_MAX, Interactive, InteractiveRequests, shape
from embedfarm.web.services import Service, Services, need

OWNER: Final = "embedfarm"
BEST_FIRST: Final[tuple[StateOfModel, ...]] = ("ready", "loading", "parked", "failed")
TOKENS_MAX: Final = 1 << 15  # of one text: no model reads more at once

router: Final = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)
TokenId = Annotated[int, Field(ge=0, lt=2**32), WHOLE]
Row = Annotated[Many[TokenId], Field(min_length=1, max_length=TOKENS_MAX)]
Input = Annotated[
    Annotated[str, TEXT]
    | Annotated[Many[str], Field(min_length=1), TEXTS]
    | Annotated[Row, TOKENS]
    | Annotated[Many[Row], Field(min_length=1), ROWS],
    shapes("must be a text, a list of texts, a list of token ids, or a list of such lists"),
]


class EmbeddingsRequest(Body):
    """Texts to embed; or token ids of the model's own tokenizer, where the farm takes these."""

    input: Input
    model: str
    dimensions: Annotated[int, Field(ge=1, le=DIMENSIONS_MAX), WHOLE] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class Embedding(BaseModel):
    """A vector of length 1: numbers, or the bytes of little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens of the input, as the model counts and truncates them."""

    prompt_tokens: int
    total_tokens: int


class CreateEmbeddingResponse(BaseModel):
    """Vectors in the order of the input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """A model that may be asked for, and the workers that have it loaded.

    Its state is the best one on any worker; one that is not loaded is when a request comes.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = OWNER
    state: StateOfModel | Literal["unloaded"] = "unloaded"
    workers: list[str] = []


class Models(BaseModel):
    """All models that may be asked for."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.post(
    "/embeddings",
    response_model=CreateEmbeddingResponse,
    responses=openai_problems(404),
    dependencies=need(Scope.SUBMIT),
)
async def embeddings(
    services: Service, interactive: Interactive, request: EmbeddingsRequest
) -> Response:
    """Embed texts, on the worker that is free first."""
    services.find_model(request.model)
    answer = partial(_answer, services, interactive, request)
    return await interactive.run(answer, request.model)


@router.get("/models", responses=openai_problems(), dependencies=need(Scope.READ))
def list_models(services: Service) -> Models:
    """List the models that may be asked for."""
    return Models(data=_models(services, services.settings.models))


@router.get("/models/{model:path}", responses=openai_problems(404), dependencies=need(Scope.READ))
def show_model(services: Service, model: str) -> Model:
    """Show a model that may be asked for."""
    services.find_model(model)
    return _models(services, [model])[0]


def _models(services: Services, names: Sequence[str]) -> list[Model]:
    """Return models with their states, by the heartbeats of the live workers."""
    rows = model_rows(services.farm.workers())
    found = []
    for name in names:
        own = [(worker, each) for worker, each in rows if each.model.partition("|")[0] == name]
        states = {each.state for _, each in own}
        ready = [worker for worker, each in own if each.state == "ready"]
        best = next((each for each in BEST_FIRST if each in states), None)
        found.append(Model(id=name, state=best or "unloaded", workers=list(dict.fromkeys(ready))))
    return found


def _answer(
    services: Services, interactive: InteractiveRequests, request: EmbeddingsRequest
) -> Response:
    """Embed the input and respond; only some rows are held as text at a time."""
    answer = interactive.embed(request.model, _texts(services, request))
    vectors = shape(answer.matrix(), request.dimensions).astype("<f4", copy=False)
    print_row = _in_base64 if request.encoding_format == "base64" else _as_numbers
    rows = (
        {"object": "embedding", "index": index, "embedding": print_row(row)}
        for index, row in enumerate(vectors)
    )
    usage = {"prompt_tokens": answer.token_count, "total_tokens": answer.token_count}
    rest = msgspec.json.encode({"model": request.model, "usage": usage})
    return respond(chain([b'{"object":"list","data":'], list_of(rows), [b"," + rest[1:]]))


def _in_base64(row: NDArray[np.float32]) -> str:
    return base64.b64encode(row.tobytes()).decode()


def _as_numbers(row: NDArray[np.float32]) -> list[float]:
    return cast("list[float]", row.astype(np.float64).tolist())


def _texts(services: Services, request: EmbeddingsRequest) -> Sequence[str]:
    """Return the texts that are asked for; token ids are decoded to texts."""
    given = request.input
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], str):
        return given
    rows = [given] if isinstance(given[0], int) else given
    if not services.settings.accept_token_ids:
        raise HTTPException(422, f"input: {TOKENS_REFUSED}")
    check_count(rows, services.settings)
    tokenizer = tokenizer_of(request.model, services.settings)
    return decode_ids(tokenizer, rows)
