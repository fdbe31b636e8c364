"""Speculative copies at the tail: which worker repeats which blocks, by what plans told it."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from embedfarm.contract.records import JobShare

EntryPlace = tuple[str, str]  # job, and ID of the entry


@dataclass
class SpeculativeCopies:
    """Remembers which worker repeats which blocks, so that no two repeat the same one at a time.

    A worker is taken to repeat what its last plan told it, and what an earlier one did unless it
    has completed something since: it may still be at that when its plan tells it something else.
    """

    _told: Mapping[EntryPlace, str] = field(default_factory=dict)
    _known: Mapping[EntryPlace, str] = field(default_factory=dict)

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

    def by_job(self, alive: Collection[str]) -> Mapping[str, Mapping[str, str]]:
        """Return the worker that repeats each block, by job; forget copies of dead workers."""
        self._known = {block: name for block, name in self._known.items() if name in alive}
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for (job, identifier), worker in self._known.items():
            found[job][identifier] = worker
        return found
