"""The pass that leaves out jobs that cannot be worked on now."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import has_room, results_free
from embedfarm.scheduler.state import Draft, FarmState, JobState

RUNNING: Final = frozenset({"open", "closed"})


@dataclass(frozen=True)
class Defer:
    """Leaves out jobs that are paused, cancelled or done, or whose results are not collected."""

    settings: Settings
    name: ClassVar[str] = "defer"

    def __call__(self, draft: Draft) -> Draft:
        """Keep the jobs that can be worked on now."""
        state = draft.state
        free = results_free(self.settings, state.room)  # only who has more is looked at closely
        lists = [
            tuple(
                [
                    job
                    for job in tier
                    if job.status.state in RUNNING
                    and (job.status.result_bytes < free or self._may(job, state))
                ]
            )
            for tier in draft.tiers
        ]
        made = replace(draft, tiers=tuple(tier for tier in lists if tier))
        if not draft.explain:
            return made
        kept = {job.job for job in made.jobs}
        return made.note(self.name, map(_reason, (j for j in draft.jobs if j.job not in kept)))

    def _may(self, job: JobState, state: FarmState) -> bool:
        """Tell whether a job has room for results, or blocks that a dead worker holds.

        What a dead worker holds is rescued in any case: it may be what the collector waits for.
        """
        return has_room(job.status, self.settings, state.room) or job.job in state.orphaned


def _reason(job: JobState) -> str:
    state = job.status.state
    return f"{job.job} deferred: {state if state not in RUNNING else 'results are not collected'}"
