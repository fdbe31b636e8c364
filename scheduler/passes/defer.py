"""Which jobs can be worked on now."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from embedfarm.settings import Settings
from scheduler.state import Draft, JobState

RUNNING: Final = frozenset({"open", "closed"})


@dataclass(frozen=True)
class Defer:
    """Leaves out jobs that are paused, cancelled or done, or whose results are not collected."""

    settings: Settings
    name: ClassVar[str] = "defer"

    def __call__(self, draft: Draft) -> Draft:
        """Keep the jobs that can be worked on now."""
        full = self.settings.results_bytes_max
        lists = [
            tuple(
                [
                    job
                    for job in tier
                    if job.status.state in RUNNING and job.status.result_bytes < full
                ]
            )
            for tier in draft.tiers
        ]
        made = replace(draft, tiers=tuple(tier for tier in lists if tier))
        if not draft.explain:
            return made
        kept = {job.job for job in made.jobs}
        return made.note(self.name, map(_reason, (j for j in draft.jobs if j.job not in kept)))


def _reason(job: JobState) -> str:
    state = job.status.state
    return f"{job.job} deferred: {state if state not in RUNNING else 'results are not collected'}"
