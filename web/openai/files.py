"""OpenAI's files: inputs of batches, their answers, and their errors."""

import logging
import time
from itertools import islice
from typing import Annotated, Final, Literal

import msgspec
from fastapi import APIRouter, HTTPException, Query, Request
from fastapi import Path as InPath
from fastapi.responses import FileResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from embedfarm.contract.scheduling_terms import USUAL
from embedfarm.ingest.openai_files import (
    FileFacts,
    facts_of,
    keep_file,
    list_files,
    new_file_id,
    remove_file,
)
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.bodies import media_type
from embedfarm.web.http.problems import openai_problems
from embedfarm.web.jobs.job_requests import FORM
from embedfarm.web.jobs.uploads import receive_form, receiving
from embedfarm.web.services import Caller, Service, need

LOGGER: Final = logging.getLogger(__name__)
FILES_MAX: Final = 10_000
NAME_CHARACTERS_MAX: Final = 255

router: Final = APIRouter(prefix="/v1/files", tags=["OpenAI"])
FileId = Annotated[str, InPath(max_length=64)]
After = Annotated[str, Query(max_length=64, description="The last one of the page before.")]
_FORM: Final = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
}


class File(BaseModel):
    """A file, as OpenAI's API shows it; its time is in Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"]
    status: Literal["processed"]


class Files(BaseModel):
    """A page of files; more follow the last of them if `has_more`."""

    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """Receipt for a file that was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


@router.post(
    "",
    responses=openai_problems(415, 507),
    dependencies=need(Scope.SUBMIT),
    openapi_extra={"requestBody": {"required": True, "content": {FORM: {"schema": _FORM}}}},
)
async def upload_file(services: Service, who: Caller, request: Request) -> File:
    """Keep a file of requests for a batch."""
    if media_type(request.headers) != FORM:
        raise HTTPException(415, f"send {FORM}")
    async with receiving(request, services) as upload:
        fields = await receive_form(request, upload)
        if fields.get("purpose") != "batch":
            raise HTTPException(422, "purpose: files are for batches here: batch")
        facts = FileFacts(
            id=new_file_id(),
            bytes=upload.size_bytes,
            created_at=int(time.time()),
            filename=upload.filename[:NAME_CHARACTERS_MAX],
            purpose="batch",
            tenant=services.grant(USUAL).tenant,
        )
        await run_in_threadpool(keep_file, services.settings, upload.path, facts)
    LOGGER.info("%s uploads %s", who.name, facts.id)
    return _describe(facts)


@router.get("", responses=openai_problems(), dependencies=need(Scope.READ))
def show_files(
    services: Service,
    after: After = "",
    limit: Annotated[int, Query(ge=1, le=FILES_MAX)] = FILES_MAX,
    order: Literal["asc", "desc"] = "desc",
    purpose: Literal["", "batch", "batch_output"] = "",
) -> Files:
    """List files by the time when they were made."""
    found = list_files(services.settings, after, newest_first=order == "desc")
    seen = (each for each in found if services.farm.sees(each.tenant))
    wanted = (_describe(each) for each in seen if purpose in {"", each.purpose})
    files = list(islice(wanted, limit + 1))
    page = files[:limit]
    return Files(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(files) > limit,
    )


@router.get("/{file}", responses=openai_problems(404), dependencies=need(Scope.READ))
def show_file(services: Service, file: FileId) -> File:
    """Show a file's facts."""
    facts = facts_of(services.find_file(file))
    if facts is None:
        raise HTTPException(404, f"what is kept of {file} cannot be read")
    return _describe(facts)


@router.get(
    "/{file}/content",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "The file."},
        **openai_problems(404),
    },
    dependencies=need(Scope.READ),
)
def send_content(services: Service, file: FileId) -> FileResponse:
    """Send the content of a file."""
    return FileResponse(services.find_file(file), media_type="application/octet-stream")


@router.delete("/{file}", responses=openai_problems(404), dependencies=need(Scope.SUBMIT))
def delete_file(services: Service, who: Caller, file: FileId) -> Deleted:
    """Remove a file; a batch that reads it keeps its content."""
    remove_file(services.find_file(file))
    LOGGER.info("%s deletes %s", who.name, file)
    return Deleted(id=file)


def _describe(facts: FileFacts) -> File:
    return File(**msgspec.structs.asdict(facts))
