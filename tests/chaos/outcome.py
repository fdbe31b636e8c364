"""The outcome of a run of chaos, and whether it is good enough."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tests.chaos.tally import Tally
from tests.chaos.tenants import NAMES

COSINE_MIN: Final = 0.999
RECOVERY_SECONDS_MAX: Final = 20.0  # the 99th of a hundred recoveries
IDLE_SECONDS_MAX: Final = 20.0  # of a lease, until somebody has it again
SHARE_MIN: Final = 0.7  # of the throughput of the quiet run
LEAKS_TOLD: Final = 20  # in words
SHARE_SECONDS_MIN: Final = 600.0  # in less, most faults do not come, and any of them decides


@dataclass
class Outcome:
    """The figures and findings of a run.

    Attributes:
        recoveries: Seconds until all was at work again, with the name of each fault.
        runs: Number of jobs that ended.
        chunks: Number of chunks in these jobs.
        refusals: How often the command rightly refused, by the reason.
        lost, doubled: Chunks that were not there, or more than once.
        cosine_min: The least cosine of a vector with that of the quiet run.
        quiet_rate, rate: Chunks per second without and with faults, all waiting included.
        duplicates: Results that somebody else had stored before; none was stored twice.
        deliveries_max: The most deliveries of a block.
        idle_seconds_max: Longest time for which nobody renewed a lease.
        idle_longest: The lease that was idle for longest, as text.
        answered, wrong, unanswered, refused: Requests by HTTP that got their vector, another
            answer, none in time, or were told to come again.
        small_jobs: Small jobs that ended well, by their door.
        again: Small jobs that were asked for again, since a server forgot them or a disk failed.
        read: Answers that the reader of each tenant has looked through.
        own: Answers that told a tenant's reader of the tenant itself.
        leaks: How often a tenant has read a word of another one.
        problems: Findings in words.
    """

    recoveries: list[tuple[str, float]] = field(default_factory=list)
    runs: int = 0
    chunks: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    doubled: int = 0
    cosine_min: float = 1.0
    quiet_rate: float = 0.0
    rate: float = 0.0
    duplicates: int = 0
    deliveries_max: int = 0
    idle_seconds_max: float = 0.0
    idle_longest: str = ""
    answered: int = 0
    wrong: int = 0
    unanswered: int = 0
    refused: int = 0
    small_jobs: Counter[str] = field(default_factory=Counter)
    again: int = 0
    read: Counter[str] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)
    leaks: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The throughput under faults as a share of the quiet one."""
        return self.rate / self.quiet_rate if self.quiet_rate else 0.0

    def recovery(self, percentile: float) -> float:
        """Return the seconds within which so many per cent of the recoveries were over."""
        seconds = [each for _, each in self.recoveries]
        return float(np.percentile(seconds, percentile)) if seconds else 0.0

    def add(self, tally: Tally) -> None:
        """Add what the callers counted and found."""
        self.answered, self.refused = tally.answered, tally.refused
        self.wrong, self.unanswered = len(tally.wrong), len(tally.unanswered)
        self.small_jobs, self.again = tally.jobs, tally.again
        self.read, self.own, self.leaks = tally.read, tally.own, len(tally.leaks)
        self.problems += [*tally.wrong, *tally.unanswered, *tally.failed, *tally.leaks[:LEAKS_TOLD]]

    def judge(self, seconds: float, deliveries_max: int) -> list[str]:
        """Return in words what is beyond its bounds.

        Args:
            seconds: Seconds for which there were faults.
            deliveries_max: The setting of that name.
        """
        p99, idle = self.recovery(99), self.idle_seconds_max
        bounds = {
            "vectors are lost, doubled or wrong": self.lost
            or self.doubled
            or not self.cosine_min >= COSINE_MIN,
            "no job has ended": not self.runs,
            "nothing was shot at": not self.recoveries,
            f"recovery took {p99:.1f} s (P99)": p99 > RECOVERY_SECONDS_MAX,
            f"throughput was {self.share:.0%} of the quiet one": seconds >= SHARE_SECONDS_MIN
            and not self.share >= SHARE_MIN,
            f"a lease was idle for {idle:.1f} s: {self.idle_longest}": idle > IDLE_SECONDS_MAX,
            f"a block was delivered {self.deliveries_max} times": self.deliveries_max
            > deliveries_max + 1,
            "nobody got a vector by HTTP": not self.answered,
            **{
                f"no job by {door} has ended well": not self.small_jobs[door]
                for door in ("RQ", "HTTP")
            },
            **{f"the reader of {name} saw nothing": not self.own[name] for name in NAMES},
            f"a tenant has read of another one {self.leaks} times": self.leaks,
        }
        return [words for words, broken in bounds.items() if broken]
