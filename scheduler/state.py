"""What a decision is made of, as plain data: no clock, no server, no sleep."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from embedfarm.jobs import JobStatus, Pending
from embedfarm.records import JobShare, Rate


@dataclass(frozen=True)
class WorkerState:
    """A live worker.

    Attributes:
        name: Its name.
        held_seconds: Since its current micro-batch began on the device, 0 when idle; as of its
            last heartbeat.
        draining: It takes no more work.
    """

    name: str
    held_seconds: float = 0.0
    draining: bool = False


@dataclass(frozen=True)
class JobState:
    """A job that is not finished.

    Attributes:
        job: Its id.
        model: Key under which rates are remembered.
        status: Its counters.
        waiting_blocks: Blocks that nobody has leased.
        leases: Every lease, oldest block first; only looked up when nothing waits. Pieces of
            blocks that failed are not among them: each goes alone, and no worker copies it.
    """

    job: str
    model: str
    status: JobStatus
    waiting_blocks: int
    leases: tuple[Pending, ...] = ()

    @property
    def waiting_tokens(self) -> float:
        """Tokens that nobody has leased."""
        return self.waiting_blocks * self.status.block_tokens_mean


@dataclass(frozen=True)
class FarmState:
    """All that a decision looks at.

    Attributes:
        jobs: Unfinished jobs.
        workers: Live workers.
        rates: Known rates by worker and job, for that job's model and chunk length.
    """

    jobs: tuple[JobState, ...]
    workers: tuple[WorkerState, ...]
    rates: Mapping[tuple[str, str], Rate]


@dataclass(frozen=True)
class Draft:
    """A plan in the making: what every pass takes and gives.

    Attributes:
        state: What the decision is about; no pass changes it.
        jobs: Jobs that may be worked on, the first one first.
        shares: Per worker, how much of which job.
        notes: What each pass did, in words.
    """

    state: FarmState
    jobs: tuple[JobState, ...]
    shares: Mapping[str, tuple[JobShare, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
