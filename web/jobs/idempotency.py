"""`Idempotency-Key`: a request that is sent again makes nothing twice, and gets the same answer."""

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple, cast

import msgspec
from fastapi import Header, HTTPException

from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmFull
from embedfarm.ingest.allow_list import PathRefused
from embedfarm.ingest.job_directories import new_id
from embedfarm.web.auth.keys import Key
from embedfarm.web.services import Services

WORK_SECONDS: Final = 60  # time for which a request whose server died counts as in work
AGAIN_SECONDS: Final = 1

log = logging.getLogger(__name__)

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="With it, the same request again gets the same answer and makes nothing new.",
    ),
]


class _Record(NamedTuple):
    """Record of a request: its hash, the id of what it makes, and the answer once there is one."""

    request: str
    id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    answer: str | None


def answer_once(
    services: Services,
    who: Key,
    key: str | None,
    request: Any,  # noqa: ANN401 -- anything that JSON can say
    work: Callable[[str], str],
) -> tuple[str, str]:
    """Do a request's work unless it was done before; return the id of what it makes and the answer.

    The id is kept before the work begins. So a request whose server died in between is done with
    that id again: `work` must do nothing twice for one id, and leaves what it finds as it is.

    Args:
        services: Has the server that keeps the record, and the setting for how long.
        who: The caller; the same `key` of another caller is another one.
        key: The `Idempotency-Key` of the request; with None the work is done whatever was before.
        request: All in which requests differ, as values for JSON.
        work: Function that makes what is asked for under an id (32 hexadecimal digits), and
            returns the answer, a JSON object.

    Raises:
        HTTPException: The key was used for another request, its request is in work, or what is kept
            of it cannot be read.
    """
    if key is None:
        made = new_id()
        return made, work(made)
    client = services.client
    name = _hash([*who.owner, key])
    in_work = wire.in_work_key(name)
    if not client.set(in_work, 1, nx=True, ex=WORK_SECONDS):
        found = _find(services, name, _hash(request))
        if found is None or found.answer is None:
            raise HTTPException(
                409, "a request with this key is in work", {"retry-after": str(AGAIN_SECONDS)}
            )
        return found.id, found.answer
    try:
        found = _find(services, name, _hash(request))
        if found is not None and found.answer is not None:
            return found.id, found.answer
        record = found or _Record(_hash(request), new_id(), None)
        _keep(services, name, record)
        try:
            answer = work(record.id)
        except (HTTPException, FarmFull, PathRefused):
            # Nothing was made; after any other error, who knows.
            client.delete(wire.answer_key(name))
            raise
        _keep(services, name, record._replace(answer=answer))
        return record.id, answer
    finally:
        client.delete(in_work)


def _find(services: Services, name: str, request: str) -> _Record | None:
    place = wire.answer_key(name)
    data = cast("bytes | None", services.client.get(place))
    if data is None:
        return None
    record = _read(data, place)
    if record.request != request:
        raise HTTPException(422, "this Idempotency-Key was used for another request")
    return record


def _read(data: bytes, place: str) -> _Record:
    """Decode the record of a request; one that cannot be read is refused, since it may be done."""
    try:
        record = msgspec.json.decode(data, type=_Record)
        if record.answer is not None:
            msgspec.json.decode(record.answer, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        says = f"what is kept of this Idempotency-Key in {place} cannot be read"
        log.warning("%s: %s", says, error)
        raise HTTPException(409, f"{says}; ask with another key, or have it deleted") from error
    return record


def _keep(services: Services, name: str, record: _Record) -> None:
    seconds = services.settings.idempotency_seconds
    services.client.set(wire.answer_key(name), json.dumps(record), ex=seconds)


def _hash(value: Any) -> str:  # noqa: ANN401 -- anything that JSON can say
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
