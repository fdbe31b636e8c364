"""Tally of what the callers got that used a farm while it was shot at."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts of answers and jobs, and findings in words.

    Attributes:
        answered: Requests that got their vector.
        served: Monotonic time at which the last answered request began.
        refused: Requests that were told to come again, or met nobody.
        wrong: Findings about wrong answers.
        unanswered: Findings about requests that waited in vain.
        jobs: Small jobs that ended well, by their door.
        again: How often a small job was asked for again, since it was forgotten or a disk failed.
        failed: Findings about small jobs that did not end well.
        read: Answers that the reader of each tenant has looked through.
        own: Answers that told a tenant's reader of the tenant itself; without any it read nothing.
        leaks: Findings about words of one tenant that another one has read.
    """

    answered: int = 0
    served: float = 0.0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    jobs: Counter[str] = field(default_factory=Counter)
    again: int = 0
    failed: list[str] = field(default_factory=list)
    read: Counter[str] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)
