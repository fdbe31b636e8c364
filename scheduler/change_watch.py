"""What has changed on a farm between two looks at it, for its timeline."""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from embedfarm.contract.farm_timeline import FarmEvent
from embedfarm.contract.model_states import ready
from embedfarm.contract.records import Heartbeat
from embedfarm.scheduler.state import JobState


@dataclass
class ChangeWatch:
    """Compares each look at the farm with the one before; the first one has nothing to tell.

    A worker that falls silent without taking its leave is lost. It is remembered for as long as
    the farm counts it as lost, so that a late sign of life is told apart from a new start.
    """

    _beats: Mapping[str, Heartbeat] | None = None
    _lost: dict[str, str] = field(default_factory=dict)  # incarnations by name
    _unbegun: set[str] = field(default_factory=set)  # jobs without any vectors
    _braked: AbstractSet[str] = frozenset()  # jobs that have paused themselves

    def look(
        self, beats: Mapping[str, Heartbeat], lost: AbstractSet[str], jobs: Collection[JobState]
    ) -> list[FarmEvent]:
        """Return what has changed since the last look.

        Args:
            beats: Heartbeats of the live workers, by name.
            lost: Names of the workers that the farm counts as lost.
            jobs: Jobs that are not finished.
        """
        before, self._beats = self._beats, beats
        begun = {job.job for job in jobs if job.status.blocks_done}
        first = [job for job in self._unbegun if job in begun]
        self._unbegun = {job.job for job in jobs} - begun
        braked = {job.job: job.status.reason for job in jobs if job.status.braked}
        paused, self._braked = sorted(braked.keys() - self._braked), braked.keys()
        if before is None:
            return []
        gone = [beat for name, beat in before.items() if name not in beats]
        known = lost | beats.keys()
        self._lost = {name: each for name, each in self._lost.items() if name in known}
        self._lost |= {beat.worker: beat.incarnation for beat in gone if beat.worker in lost}
        return [
            *(FarmEvent(kind="first vectors", job=job) for job in sorted(first)),
            *(FarmEvent(kind="paused", job=job, note=f"it {braked[job]}") for job in paused),
            *(
                FarmEvent(kind="lost" if beat.worker in lost else "left", worker=beat.worker)
                for beat in gone
            ),
            *(
                event
                for name, beat in beats.items()
                if beat is not before.get(name)
                for event in self._news_of(beat, before)
            ),
        ]

    def _news_of(self, beat: Heartbeat, before: Mapping[str, Heartbeat]) -> Iterator[FarmEvent]:
        """Yield what has changed with a live worker."""
        name, earlier = beat.worker, before.get(beat.worker)
        known = earlier.incarnation if earlier else self._lost.pop(name, "")
        if known != beat.incarnation:
            note = f"process {beat.pid}, {beat.device}"
            yield FarmEvent(kind="restarted" if known else "joined", worker=name, note=note)
            earlier = None
        elif earlier is None:
            yield FarmEvent(kind="returned", worker=name)
        before_now = set() if earlier is None else {each.model for each in ready(earlier.models)}
        for each in ready(beat.models):
            if each.model not in before_now:
                note = f"{each.model.partition('|')[0]} in {each.load_seconds:.1f} s"
                yield FarmEvent(kind="loaded", worker=name, note=note)
        for job in beat.refused:
            if earlier is None or job not in earlier.refused:
                yield FarmEvent(kind="refused", worker=name, job=job)
