"""Objects that all routes use: the farm, the settings and the caller."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, cast

import redis
from fastapi import Depends, HTTPException, Request, Security
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.scheduling_terms import Terms, priority_name
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.contract.tenants import TenantFarm
from embedfarm.ingest.job_directories import directory_of
from embedfarm.ingest.job_queue import Submissions
from embedfarm.ingest.openai_files import batch_tenant, content_of, file_tenant
from embedfarm.ingest.tenant_storage import stored_bytes
from embedfarm.web.auth.keys import ANYBODY, Key, Scope
from embedfarm.web.http.problems import ModelNotServed

BEARER: Final = HTTPBearer(auto_error=False, description="A key of `embedfarm keys new`.")


@dataclass(frozen=True)
class Passes:
    """Passes of the scheduler, as far as the web must know them.

    Attributes:
        names: All passes that there are.
        default: Passes of a scheduler for which none were chosen.
        check: Function that raises ValueError for a list of names that no farm could work by.
    """

    names: Sequence[str]
    default: Sequence[str]
    check: Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Services:
    """Objects that a request works with; only the caller differs between requests.

    Whatever belongs to a tenant is reached through here, and only that which the caller may see.

    Attributes:
        client: Client of the farm's server.
        settings: The farm's settings.
        passes: The passes that the farm's scheduler can run.
        rq: Client of the server of RQ's queue.
        caller: The key of the request.
    """

    client: redis.Redis
    settings: Settings
    passes: Passes
    rq: redis.Redis
    caller: Key = ANYBODY

    def find_model(self, name: str) -> str:
        """Return the name of a model that is served; without a name the first one.

        Workers load any model that they are asked for, so that only some may be asked for.

        Raises:
            ModelNotServed: The model is not served.
        """
        models = self.settings.models
        if name and name not in models:
            raise ModelNotServed(name, models)
        return name or models[0]

    @property
    def farm(self) -> FarmClient:
        """The farm, as far as the caller may see it."""
        tenant = self.caller.tenant
        actor = "HTTP" if self.caller == ANYBODY else f"key {self.caller.name}"
        if tenant is None:
            return FarmClient(self.client, actor=actor)
        jobs_max = self.settings.limits_of(tenant).jobs
        return TenantFarm(self.client, tenant=tenant, actor=actor, jobs_max=jobs_max)

    @property
    def stores(self) -> list[str]:
        """Names of the vector stores that the caller's jobs may fill."""
        stores = self.settings.stores
        return sorted(name for name in stores if stores[name].serves(self.caller.tenant))

    @property
    def submissions(self) -> Submissions:
        """Queue of the jobs that `embedfarm ingest` runs."""
        return Submissions(self.client, self.settings, self.rq)

    def grant(self, terms: Terms) -> Terms:
        """Return the terms as the caller may have them: jobs by a tenant's key are that tenant's.

        Raises:
            HTTPException: The terms are another tenant's, or more urgent than this one may have.
        """
        tenant = self.caller.tenant
        if tenant is None:
            return terms
        if terms.tenant not in {"", tenant}:
            raise HTTPException(403, f"key {self.caller.name} makes jobs of tenant {tenant} only")
        highest = self.settings.limits_of(tenant).priority
        if highest is not None and terms.priority > highest:
            raise HTTPException(
                403, f"priority: tenant {tenant} may have {priority_name(highest)} at most"
            )
        return replace(terms, tenant=tenant)

    def find_room(self, count: int) -> int:
        """Return the bytes that the caller may put on the disk now; running work may take some too.

        Raises:
            HTTPException: The room is less than `count` bytes.
        """
        tenant = self.caller.tenant
        most = None if tenant is None else self.settings.limits_of(tenant).bytes
        if tenant is None or most is None:
            return sys.maxsize
        left = most - stored_bytes(self.settings, tenant)
        if left < count:
            raise HTTPException(
                403,
                f"bytes: tenant {tenant} may have {most:,} on the disk, and has {most - left:,}: "
                "delete jobs or files",
            )
        return left

    def find_job(self, job: str) -> None:
        """Make sure that a job is there for the caller.

        Raises:
            JobGone: The job is not there for the caller.
        """
        if self.caller.tenant is not None and not self.farm.own([job]):
            raise JobGone(job)

    def find_batch(self, batch: str) -> Path:
        """Return the directory of a batch.

        Raises:
            HTTPException: There is no such batch for the caller.
        """
        found = directory_of(self.settings, batch)
        if found is None or (self.caller.tenant is not None and not self.sees_batch(found)):
            raise HTTPException(404, f"no such batch: {batch}")
        return found

    def sees_batch(self, directory: Path) -> bool:
        """Tell whether the batch of a directory is there for the caller."""
        return self.caller.tenant in {None, batch_tenant(directory)}

    def find_file(self, file: str) -> Path:
        """Return where the content of a file is.

        Raises:
            HTTPException: There is no such file for the caller.
        """
        found = content_of(self.settings, file)
        hidden = found is not None and self.caller.tenant is not None
        if found is None or (hidden and self.caller.tenant != file_tenant(found)):
            raise HTTPException(404, f"no such file: {file}")
        return found

    def find_all(self, ids: Mapping[str, str]) -> None:
        """Make sure that all that the path of a request names is there for the caller.

        Raises:
            JobGone, HTTPException: Something of it is not there for the caller.
        """
        for name, find in (
            ("job", self.find_job),
            ("batch", self.find_batch),
            ("file", self.find_file),
        ):
            if name in ids:
                find(ids[name])


async def _services(request: Request) -> Services:
    services = cast("Services", request.app.state.services)
    return replace(services, caller=request.state.key or ANYBODY)  # open paths tell of no job


async def _caller(request: Request) -> Key:
    return cast("Key", request.state.key)


Service = Annotated[Services, Depends(_services)]
Caller = Annotated[Key, Depends(_caller)]


def need(scope: Scope, *, whole_farm: bool = False) -> list[Any]:
    """Return the dependencies of a route that needs a key with a scope.

    What its path names is looked for before anything else is done, so that to a tenant's key all
    that is another's is answered as what does not exist.

    Args:
        scope: Scope that the key must have.
        whole_farm: Whether the route tells of all jobs at once, and so is the operator's.
    """

    async def check(request: Request, services: Service, key: Caller) -> None:
        if not key.allows(scope):
            raise HTTPException(403, f"key {key.name} has no scope {scope.value}")
        if key.tenant is None:
            return
        if whole_farm:
            raise HTTPException(403, f"key {key.name} is of tenant {key.tenant}, not an operator's")
        if request.path_params:
            await run_in_threadpool(services.find_all, request.path_params)

    return [Security(BEARER), Depends(check)]
