"""What a run of chaos came to, and whether that is good enough."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

COSINE_MIN: Final = 0.999
RECOVERY_SECONDS_MAX: Final = 20.0  # the 99th of a hundred recoveries
IDLE_SECONDS_MAX: Final = 20.0  # of a lease, until somebody has it again
SHARE_MIN: Final = 0.7  # of the throughput of the quiet run
SHARE_SECONDS_MIN: Final = 600.0  # in less, most faults do not come, and any of them decides


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        recoveries: Seconds until all was at work again, for each fault by its name.
        runs: Jobs that ended.
        chunks: In each of them.
        lost, doubled: Chunks that were not there, or more than once.
        cosine_min: Of any vector with that of the quiet run.
        quiet_rate, rate: Chunks per second without and with faults, all waiting included.
        duplicates: Results that somebody else had stored before; none was stored twice.
        deliveries_max: Of any block.
        idle_seconds_max: Longest time for which nobody renewed a lease.
        answered, wrong, unanswered, refused: Requests by HTTP that got their vector, another
            answer, none in time, or were told to come again.
        small_jobs: Jobs through RQ that ended well.
        problems: All that should not have been.
    """

    recoveries: list[tuple[str, float]] = field(default_factory=list)
    runs: int = 0
    chunks: int = 0
    lost: int = 0
    doubled: int = 0
    cosine_min: float = 1.0
    quiet_rate: float = 0.0
    rate: float = 0.0
    duplicates: int = 0
    deliveries_max: int = 0
    idle_seconds_max: float = 0.0
    answered: int = 0
    wrong: int = 0
    unanswered: int = 0
    refused: int = 0
    small_jobs: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Throughput under faults, of that without."""
        return self.rate / self.quiet_rate if self.quiet_rate else 0.0

    def recovery(self, percentile: float) -> float:
        """Seconds within which so many of a hundred recoveries were over."""
        seconds = [each for _, each in self.recoveries]
        return float(np.percentile(seconds, percentile)) if seconds else 0.0

    def judge(self, seconds: float, deliveries_max: int) -> list[str]:
        """What is beyond its bounds, in words.

        Args:
            seconds: How long there were faults.
            deliveries_max: As the setting.
        """
        p99 = self.recovery(99)
        bounds = {
            "vectors are lost, doubled or wrong": self.lost
            or self.doubled
            or not self.cosine_min >= COSINE_MIN,
            "no job has ended": not self.runs,
            "nothing was shot at": not self.recoveries,
            f"recovery took {p99:.1f} s (P99)": p99 > RECOVERY_SECONDS_MAX,
            f"throughput was {self.share:.0%} of the quiet one": seconds >= SHARE_SECONDS_MIN
            and not self.share >= SHARE_MIN,
            f"a lease was idle for {self.idle_seconds_max:.1f} s": self.idle_seconds_max
            > IDLE_SECONDS_MAX,
            f"a block was delivered {self.deliveries_max} times": self.deliveries_max
            > deliveries_max + 1,
            "nobody got a vector by HTTP": not self.answered,
            "no job through RQ has ended well": not self.small_jobs,
        }
        return [words for words, broken in bounds.items() if broken]
