"""Speculative copies at the tail: which worker repeats which blocks, by what plans told it."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from embedfarm.contract.records import JobShare

EntryPlace = tuple[str, str]  # job, and ID of the entry


@dataclass
class SpeculativeCopies:
    """Remembers which worker repeats which blocks, so that no two repeat the same one at a time.

    A worker is taken to repeat what its last plan told it, and what an earlier one did unless it
    has completed something since: it may still be at that when its plan tells it something else.
    What a worker was to repeat when it ended may have brought it down, and is counted.
    """

    _told: Mapping[EntryPlace, str] = field(default_factory=dict)
    _known: Mapping[EntryPlace, str] = field(default_factory=dict)
    _lost: Mapping[str, Counter[str]] = field(default_factory=dict)

    def told(self, shares: Mapping[str, Sequence[JobShare]]) -> None:
        """Take in the copies that the plans of a decision order."""
        self._told = {
            (each.job, identifier): worker
            for worker, made in shares.items()
            for each in made
            for identifier in each.copies
        }
        self._known = {**self._known, **self._told}

    def completed(self, worker: str) -> None:
        """Forget the copies that a worker was to make before it completed something."""
        self._known = {
            block: name
            for block, name in self._known.items()
            if name != worker or self._told.get(block) == worker
        }

    def look(
        self, jobs: Collection[str], alive: Collection[str], restarted: Collection[str] = ()
    ) -> tuple[Mapping[str, Mapping[str, str]], Mapping[str, Mapping[str, int]]]:
        """Forget the copies of workers that have ended, and what is known of other jobs than these.

        Args:
            jobs: Jobs that are not finished.
            alive: Live workers.
            restarted: Those of them that are other processes than at the last look.

        Returns:
            The worker that repeats each block; and for each block that was to be repeated when its
            worker ended, how often that was so: both by job and ID of the entry.
        """
        lost = {job: Counter(self._lost.get(job)) for job in jobs}
        found: dict[str, dict[str, str]] = {job: {} for job in jobs}
        for (job, identifier), worker in self._known.items():
            if job not in found:
                continue
            if worker in alive and worker not in restarted:
                found[job][identifier] = worker
            else:
                lost[job][identifier] += 1
        self._lost = lost
        self._known = {
            (job, identifier): worker
            for job, made in found.items()
            for identifier, worker in made.items()
        }
        return found, lost
