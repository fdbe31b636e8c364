"""Who repeats which blocks at the tail: what plans said, until somebody did something else."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from embedfarm.records import JobShare

Block = tuple[str, str]  # job, and ID of the entry


@dataclass
class Copies:
    """Remembers, so that no block is repeated by two at a time.

    A worker is taken to repeat what its last plan told it, and what an earlier one did unless it
    has completed something since: it may still be at that when its plan tells it something else.
    """

    _told: Mapping[Block, str] = field(default_factory=dict)
    _known: Mapping[Block, str] = field(default_factory=dict)

    def told(self, shares: Mapping[str, Sequence[JobShare]]) -> None:
        """Take in what the plans of a decision say."""
        self._told = {
            (each.job, identifier): worker
            for worker, made in shares.items()
            for each in made
            for identifier in each.copies
        }
        self._known = {**self._known, **self._told}

    def completed(self, worker: str) -> None:
        """A worker has done something; if that was before its last plan, this one still counts."""
        self._known = {
            block: name
            for block, name in self._known.items()
            if name != worker or self._told.get(block) == worker
        }

    def by_job(self, alive: Collection[str]) -> Mapping[str, Mapping[str, str]]:
        """The worker for each block, by job; what the dead repeated is forgotten."""
        self._known = {block: name for block, name in self._known.items() if name in alive}
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for (job, identifier), worker in self._known.items():
            found[job][identifier] = worker
        return found
