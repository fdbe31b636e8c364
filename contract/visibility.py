"""Visibility of jobs: a caller sees all jobs of a server, or those of one tenant."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import redis

from embedfarm.contract import wire
from embedfarm.contract.records import Sample


@dataclass
class Sight:
    """View of a server's jobs: of all, or of one tenant's.

    Attributes:
        client: Client of the server.
        tenant: Tenant whose jobs are seen, None for everybody's. Jobs of others are as if they
            were not there.
    """

    client: redis.Redis
    tenant: str | None = field(default=None, kw_only=True)

    def sees(self, tenant: str | None) -> bool:
        """Tell whether what belongs to a tenant is seen; `tenant` is None where it is unknown."""
        return self.tenant is None or tenant == self.tenant

    def own(self, jobs: Collection[str]) -> list[str]:
        """Return those of the jobs that are seen, in one round trip where the server is asked."""
        if self.tenant is None:
            return list(jobs)
        own = self.tenant.encode()
        return [job for job, its in zip(jobs, self._tenants(jobs), strict=True) if its == own]

    def _tenants(self, jobs: Collection[str]) -> Sequence[object]:
        """Return the tenants of jobs, as bytes; anything else where the server does not say."""
        pipe = self.client.pipeline(transaction=False)
        for job in jobs:
            pipe.hget(wire.JobKeys(job).meta, "tenant")
        return pipe.execute(raise_on_error=False) if jobs else []

    def own_samples(self, samples: Sequence[tuple[float, Sample]]) -> list[tuple[float, Sample]]:
        """Return samples without the jobs of others, and without figures that count all jobs."""
        if self.tenant is None:
            return list(samples)
        own = set(self.own({job for _, sample in samples for job in sample.jobs}))
        return [(end, _take_others_out(sample, own)) for end, sample in samples]


def _take_others_out(sample: Sample, own: Collection[str]) -> Sample:
    jobs = {job: done for job, done in sample.jobs.items() if job in own}
    job_workers = {job: done for job, done in sample.job_workers.items() if job in own}
    return msgspec.structs.replace(
        sample, jobs=jobs, job_workers=job_workers, workers={}, backlog_tokens=0
    )
