"""How much of the farm each job and each tenant has had: what fair shares and ageing look at."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Demand(NamedTuple):
    """Work that a job has leased, and whether it wants more.

    Attributes:
        job: Id of the job.
        tenant: Tenant of the job.
        weight: The job's part of the tenant's share.
        leased_tokens: Tokens leased since the job came, done or not.
        speed: Tokens per second of all workers on such chunks, 0 while none is known.
        wants: Whether the job has blocks to lease.
    """

    job: str
    tenant: str
    weight: int
    leased_tokens: float
    speed: float
    wants: bool


class Service(NamedTuple):
    """Service that a job has received, in seconds of the whole farm.

    Attributes:
        job_seconds: Service of the job over its weight; the differences between a tenant's jobs
            count.
        tenant_seconds: Service of its tenant over the tenant's weight; the differences between
            tenants count.
        waited_seconds: Time since the job last got any service, 0 for a job that wants none.
    """

    job_seconds: float = 0.0
    tenant_seconds: float = 0.0
    waited_seconds: float = 0.0


@dataclass
class _Account:
    """Account of a job or a tenant: service so far, and whether it wanted any at the last look."""

    seconds: float = 0.0
    wants: bool = False
    tokens: float | None = None
    served_at: float = 0.0


@dataclass
class Ledger:
    """Charges jobs for tokens leased, in seconds that the whole farm would need for them.

    So a job of a heavy model pays for what it costs, whichever device does it. Who comes, or comes
    back after wanting nothing, begins where the least served of the others stands: nobody saves up
    for later (the virtual time of Goyal, Vin and Cheng 1996).

    Attributes:
        tenant_weights: Weight of each tenant beside the others, where that is not 1.
    """

    tenant_weights: Mapping[str, int] = field(default_factory=dict)
    _tenants: dict[str, _Account] = field(default_factory=dict)
    _jobs: dict[str, dict[str, _Account]] = field(default_factory=dict)  # by tenant

    def charge(self, demands: Sequence[Demand], now: float) -> Mapping[str, Service]:
        """Charge every job for the work that it leased since the last call.

        Args:
            demands: Demands of all unfinished jobs.
            now: Seconds on any clock that only goes forward.
        """
        groups: defaultdict[str, list[Demand]] = defaultdict(list)
        for each in demands:
            groups[each.tenant].append(each)
        wanting = {tenant for tenant, group in groups.items() if any(d.wants for d in group)}
        self._tenants = _let_in(self._tenants, groups.keys(), wanting)
        self._jobs = {tenant: jobs for tenant, jobs in self._jobs.items() if tenant in groups}
        services = {}
        for tenant, group in groups.items():
            names = {each.job for each in group}
            jobs = _let_in(
                self._jobs.get(tenant, {}), names, {each.job for each in group if each.wants}
            )
            self._jobs[tenant] = jobs
            paid = sum(_charge(jobs[each.job], each, now) for each in group)
            self._tenants[tenant].seconds += paid / self.tenant_weights.get(tenant, 1)
        for tenant, group in groups.items():
            for each in group:
                account = self._jobs[tenant][each.job]
                services[each.job] = Service(
                    account.seconds, self._tenants[tenant].seconds, now - account.served_at
                )
        return services


def _let_in(
    accounts: Mapping[str, _Account], names: Iterable[str], wanting: Collection[str]
) -> dict[str, _Account]:
    """Return accounts of these names; raise who wants service again to the least of who wanted it.

    Where nobody wanted service, the account is raised to the most of all: one that only waits for
    its producer is not far ahead.
    """
    most = max((a.seconds for a in accounts.values()), default=0.0)
    floor = min((a.seconds for n, a in accounts.items() if n in wanting and a.wants), default=most)
    kept = {}
    for name in names:
        account = kept[name] = accounts.get(name) or _Account()
        if name in wanting and not account.wants:
            account.seconds = max(account.seconds, floor)
        account.wants = name in wanting
    return kept


def _charge(account: _Account, demand: Demand, now: float) -> float:
    """Charge one job, and return the seconds that its tenant has to pay."""
    if not account.served_at or not demand.wants:
        account.served_at = now
    if account.tokens is None:  # what was leased before we came is held against nobody
        account.tokens = demand.leased_tokens
    grown = demand.leased_tokens - account.tokens
    if grown <= 0 or demand.speed <= 0:
        return 0.0
    account.tokens, account.served_at = demand.leased_tokens, now
    account.seconds += grown / demand.speed / demand.weight
    return grown / demand.speed
