"""What routes work with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

import redis
from fastapi import Depends, HTTPException, Request, Security
from fastapi.security import HTTPBearer

from embedfarm.farm import Farm
from embedfarm.settings import Settings
from producer.submissions import Submissions
from web.keys import Key, Scope

BEARER: Final = HTTPBearer(auto_error=False, description="A key of `embedfarm keys new`.")


@dataclass(frozen=True)
class Passes:
    """What the scheduler can do, as far as the web must know.

    Attributes:
        names: All passes that there are.
        default: Those of a scheduler for which none were chosen.
        check: Raises ValueError for a list of names that no farm could work by.
    """

    names: Sequence[str]
    default: Sequence[str]
    check: Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Services:
    """One of each, for all requests of an application."""

    client: redis.Redis
    settings: Settings
    passes: Passes

    def find_model(self, name: str) -> str:
        """A model that is served; without a name the first one.

        Workers load what they are asked for, so that not everything may be asked for.

        Raises:
            HTTPException: It is not served.
        """
        models = self.settings.models
        if name and name not in models:
            served = ", ".join(models)
            raise HTTPException(404, f"model {name!r} is not served here, but {served}")
        return name or models[0]

    @property
    def farm(self) -> Farm:
        """The farm."""
        return Farm(self.client)

    @property
    def submissions(self) -> Submissions:
        """What `embedfarm ingest` is asked for."""
        return Submissions(self.client, self.settings)


async def _services(request: Request) -> Services:
    return cast("Services", request.app.state.services)


async def _caller(request: Request) -> Key:
    return cast("Key", request.state.key)


Service = Annotated[Services, Depends(_services)]
Caller = Annotated[Key, Depends(_caller)]


def need(scope: Scope) -> list[Any]:
    """Dependencies of a route that takes a key with a scope."""

    async def check(key: Caller) -> None:
        if not key.allows(scope):
            raise HTTPException(403, f"key {key.name} has no scope {scope.value}")

    return [Security(BEARER), Depends(check)]
