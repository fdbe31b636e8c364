"""`Idempotency-Key`: a request that is sent again makes nothing twice, and gets the same answer."""

import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple, cast

from fastapi import Header, HTTPException

from embedfarm import wire
from embedfarm.farm import FarmFull
from producer.directories import new_id
from web.keys import Key
from web.services import Services

WORK_SECONDS: Final = 60  # a request whose server died is in work for so long
AGAIN_SECONDS: Final = 1

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="With it, the same request again gets the same answer and makes nothing new.",
    ),
]


class _Record(NamedTuple):
    """What is kept of a request: its hash, the id of what it makes, and the answer once it is."""

    request: str
    id: str
    answer: str | None


def answer_once(
    services: Services,
    who: Key,
    key: str | None,
    request: Any,  # noqa: ANN401 -- anything that JSON can say
    work: Callable[[str], str],
) -> str:
    """The answer to a request, from now or from before.

    The id is kept before the work begins. So a request whose server died in between is done with
    that id again: `work` must do nothing twice for one id.

    Args:
        services: Where it is kept, and for how long.
        who: Keys of one are no keys of another.
        key: As the request has it; None does the work whatever was before.
        request: All that makes it another request.
        work: Makes what is asked for under an id, 32 hexadecimal digits, and gives the answer.

    Raises:
        HTTPException: The key was used for another request, or its request is in work.
    """
    if key is None:
        return work(new_id())
    client = services.client
    name = _hash([who.name, key])
    in_work = wire.in_work_key(name)
    if not client.set(in_work, 1, nx=True, ex=WORK_SECONDS):
        found = _find(services, name, _hash(request))
        if found is None or found.answer is None:
            raise HTTPException(
                409, "a request with this key is in work", {"retry-after": str(AGAIN_SECONDS)}
            )
        return found.answer
    try:
        found = _find(services, name, _hash(request))
        if found is not None and found.answer is not None:
            return found.answer
        record = found or _Record(_hash(request), new_id(), None)
        _keep(services, name, record)
        try:
            answer = work(record.id)
        except (HTTPException, FarmFull):  # nothing was made; after anything else, who knows
            client.delete(wire.answer_key(name))
            raise
        _keep(services, name, record._replace(answer=answer))
        return answer
    finally:
        client.delete(in_work)


def _find(services: Services, name: str, request: str) -> _Record | None:
    data = cast("bytes | None", services.client.get(wire.answer_key(name)))
    record = None if data is None else _Record(*json.loads(data))
    if record is not None and record.request != request:
        raise HTTPException(422, "this Idempotency-Key was used for another request")
    return record


def _keep(services: Services, name: str, record: _Record) -> None:
    seconds = services.settings.idempotency_seconds
    services.client.set(wire.answer_key(name), json.dumps(record), ex=seconds)


def _hash(value: Any) -> str:  # noqa: ANN401 -- anything that JSON can say
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
