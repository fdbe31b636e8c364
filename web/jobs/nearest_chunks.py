"""Search in the output of a finished job: the chunks nearest to a text, with their texts."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel

from embedfarm.collector.manifest import Manifest, OutputError, read_manifest
from embedfarm.collector.search import search
from embedfarm.contract.canaries import cosine_min, likeness
from embedfarm.contract.settings import Settings
from embedfarm.ingest.allow_list import allow
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.interactive import Interactive, InteractiveRequests, shape
from embedfarm.web.jobs.chunk_texts import chunk_texts
from embedfarm.web.jobs.results import open_output
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.services import Service, Services, need

COUNT_MAX: Final = 100
WEIGHTS, DTYPE = "weights", "dtype"  # of a fingerprint
COMPONENT_BYTES: Final = {"float32": 4, "float16": 2}  # of the other types one

router: Final = APIRouter(prefix="/v1/jobs", tags=["jobs"])

QueryText = Annotated[str, Query(min_length=1, max_length=2000, description="Text to look for.")]


class FoundChunk(BaseModel):
    """A chunk near a query: its cosine, and its text where the corpus still has it, as embedded."""

    index: int
    id: str | None
    score: float
    text: str | None


class FoundChunks(BaseModel):
    """The chunks nearest to a query, the nearest first."""

    chunks: list[FoundChunk]


@router.get("/{job}/search", responses=problems(404, 409), dependencies=need(Scope.READ))
async def search_job(
    services: Service,
    interactive: Interactive,
    job: JobId,
    query: QueryText,
    count: Annotated[int, Query(ge=1, le=COUNT_MAX, description="Most chunks.")] = 5,
) -> FoundChunks:
    """Find the chunks of a finished job nearest to a text, by exact cosine over all vectors."""
    find = partial(find_chunks, services, interactive, job, query, count)
    return FoundChunks(chunks=await interactive.run(find))


def find_chunks(
    services: Services, interactive: InteractiveRequests, job: str, query: str, count: int
) -> list[FoundChunk]:
    """Return the chunks of a finished job nearest to a text; this blocks, and reads all vectors.

    Raises:
        HTTPException: The job has no finished output that can be read here, its output is too
            large, no worker embeds the query, or with other weights than the job's.
    """
    settings, status = services.settings, services.farm.job(job).status()
    try:
        with open_output(settings, job, status):
            directory = allow(status.out, settings.task_roots)
        manifest = read_manifest(directory)
        _check_size(manifest, settings)
        task = "query" if manifest.settings.get("task") else ""
        answer = interactive.embed(manifest.model, [query], task=task)
        if answer.fingerprint.get(WEIGHTS) != manifest.fingerprint.get(WEIGHTS):
            raise HTTPException(409, f"the workers have another {manifest.model} than the job had")
        _compare_canaries(interactive, manifest, answer.fingerprint)
        vector = shape(answer.matrix(), manifest.settings["dimensions"] or None)[0]
        hits = search(directory, vector, count)
    except (OutputError, OSError) as error:
        raise HTTPException(409, f"there is nothing to be searched yet: {error}") from error
    texts = chunk_texts(directory, manifest.settings, [hit.index for hit in hits], settings)
    return [
        FoundChunk(index=hit.index, id=hit.id, score=hit.score, text=texts.get(hit.index))
        for hit in hits
    ]


def _compare_canaries(
    interactive: InteractiveRequests, manifest: Manifest, fingerprint: Mapping[str, str]
) -> None:
    """Refuse a search where the workers make other vectors than those of the output.

    They are asked now and then. A job with a prompt, a limit or windows of its own has canaries
    that no request can ask for.

    Args:
        interactive: What asks the workers.
        manifest: The output's.
        fingerprint: That of the model that embedded the query.

    Raises:
        HTTPException: They do.
    """
    known, said = manifest.canaries, manifest.settings
    own = said["prompt"] or said["max_length"] or said["long"] != "truncate"
    key = (manifest.job, manifest.manifest_sha256, *sorted(fingerprint.items()))
    if known is None or own or interactive.compared.holds(key):
        return
    answer = interactive.embed(
        manifest.model,
        known.texts,
        prompt_name=said.get("prompt_name", ""),
        task=said.get("task", ""),
    )
    made = answer.matrix()[:, : known.dimensions]
    least = likeness(known.matrix(), made).least if made.shape[1] == known.dimensions else 0.0
    if least < cosine_min(manifest.fingerprint.get(DTYPE, ""), answer.fingerprint.get(DTYPE, "")):
        raise HTTPException(
            409, f"the workers' {manifest.model} makes other vectors: least cosine {least:.4f}"
        )
    interactive.compared.add(key)


def _check_size(manifest: Manifest, settings: Settings) -> None:
    size = manifest.count * manifest.dimensions * COMPONENT_BYTES.get(manifest.dtype, 1)
    if size > settings.http_search_bytes_max:
        raise HTTPException(
            409, "its vectors are more than EMBEDFARM_HTTP_SEARCH_BYTES_MAX: use `embedfarm search`"
        )
