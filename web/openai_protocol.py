"""OpenAI's protocol: embeddings and models, for clients that know nothing of the farm."""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final, Literal, cast

import msgspec
import numpy as np
from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from web.interactive import AtDesk, Desk, shape
from web.keys import Scope
from web.problems import openai_problems
from web.schemas import WHOLE, Body
from web.services import Service, Services, need
from web.tokens import decode_ids, tokenizer_of

OWNER: Final = "embedfarm"
DIMENSIONS_MAX: Final = 1 << 16

router: Final = APIRouter(prefix="/v1", tags=["OpenAI"])
TokenId = Annotated[int, Field(ge=0, lt=2**32), WHOLE]
Row = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1)]
Rows = Annotated[list[Row], Field(min_length=1)]


class EmbeddingsRequest(Body):
    """Texts, or token ids of the model's own tokenizer."""

    input: str | Texts | Row | Rows
    model: str
    dimensions: Annotated[int, Field(ge=1, le=DIMENSIONS_MAX), WHOLE] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


class Embedding(BaseModel):
    """A vector of length 1: numbers, or the bytes of little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens as the model counts and cuts them."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """Vectors in the order of the input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """A model that may be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = OWNER


class Models(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.post(
    "/embeddings",
    response_model=Embeddings,
    responses=openai_problems(404),
    dependencies=need(Scope.SUBMIT),
)
async def embeddings(services: Service, desk: AtDesk, request: EmbeddingsRequest) -> Response:
    """Vectors of texts, by the worker that is free first."""
    services.find_model(request.model)
    content = await desk.run(partial(_answer, services, desk, request))
    return Response(content, media_type="application/json")


@router.get("/models", responses=openai_problems(), dependencies=need(Scope.READ))
async def list_models(services: Service) -> Models:
    """The models that may be asked for."""
    return Models(data=[Model(id=name) for name in services.settings.models])


@router.get("/models/{model:path}", responses=openai_problems(404), dependencies=need(Scope.READ))
async def show_model(services: Service, model: str) -> Model:
    """One of them."""
    services.find_model(model)
    return Model(id=model)


def _answer(services: Services, desk: Desk, request: EmbeddingsRequest) -> bytes:
    """The body of the response: encoded here, since megabytes of it would hold everybody up."""
    answer = desk.embed(request.model, _texts(services, request))
    vectors = shape(answer.matrix(), request.dimensions).astype("<f4", copy=False)
    rows: Sequence[list[float] | str] = (
        [base64.b64encode(row.tobytes()).decode() for row in vectors]
        if request.encoding_format == "base64"
        else cast("list[list[float]]", np.asarray(vectors, np.float64).tolist())
    )
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": row}
                for index, row in enumerate(rows)
            ],
            "model": request.model,
            "usage": {"prompt_tokens": answer.token_count, "total_tokens": answer.token_count},
        }
    )


def _texts(services: Services, request: EmbeddingsRequest) -> Sequence[str]:
    """The texts that are asked for, token ids made texts again."""
    given = request.input
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], str):
        return given
    rows = [given] if isinstance(given[0], int) else given
    tokenizer = tokenizer_of(request.model, services.settings)
    return decode_ids(tokenizer, rows)
