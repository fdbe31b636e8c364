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

    _told: Mapping[str, dict[Block, None]] = field(default_factory=dict)
    _known: dict[str, dict[Block, None]] = field(default_factory=dict)

    def told(self, shares: Mapping[str, Sequence[JobShare]]) -> None:
        """Take in what the plans of a decision say."""
        self._told = {
            worker: dict.fromkeys((each.job, copy) for each in made for copy in each.copies)
            for worker, made in shares.items()
            if any(each.copies for each in made)
        }
        for worker, blocks in self._told.items():
            self._known[worker] = self._known.get(worker, {}) | blocks

    def completed(self, worker: str) -> None:
        """A worker has done something; if that was before its last plan, this one still counts."""
        self._known[worker] = self._told.get(worker, {})

    def by_job(self, alive: Collection[str]) -> Mapping[str, Mapping[str, str]]:
        """The worker for each block, by job; what the dead repeated is forgotten."""
        self._known = {name: blocks for name, blocks in self._known.items() if name in alive}
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for worker, blocks in self._known.items():
            for job, identifier in blocks:
                found[job][identifier] = worker
        return found
