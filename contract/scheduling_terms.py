"""Terms on which a job shares the farm with others.

They are no part of the job's specification: they may change while it runs, and change no vector.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypedDict

PRIORITIES: Final = {"normal": 0, "high": 1, "urgent": 2}
WEIGHT_MAX: Final = 1000
TENANT_CHARACTERS_MAX: Final = 64
NO_DEADLINE: Final = "none"
DEADLINE_MS_MAX: Final = 253_370_764_800_000  # the year 9999: with every zone in all calendars

LIMIT_MAX: Final = 1e9  # of device-hours, and of costs
LABELS_MAX: Final = 10
LABEL_CHARACTERS_MAX: Final = 40
LABEL_PATTERN: Final = rf"[A-Za-z0-9._:/+-]{{1,{LABEL_CHARACTERS_MAX}}}"
_LABEL: Final = re.compile(LABEL_PATTERN)

_DURATION: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_UNIT_SECONDS: Final = (86400, 3600, 60, 1)
_DEADLINE_SECONDS_MAX: Final = 100 * 365 * 86400


@dataclass(frozen=True)
class Terms:
    """Terms of one job: how it shares the farm, until when, and what it may take of it.

    Attributes:
        priority: Priority of the job: 0 normal, 1 high, 2 urgent.
        tenant: Tenant for whom the job is done; jobs without one belong together as well.
        weight: Share of what its tenant gets, relative to the tenant's other jobs: 1 to 1000.
        deadline_ms: Unix time in ms by which the job should be done, 0 for none.
        labels: Labels by which people find the job, with commas between; they are kept in order,
            each once.
        max_hours: Device-hours after which the job pauses itself, 0 for any number.
        max_cost: Cost at which the job pauses itself, 0 for any.

    Raises:
        ValueError: A value is out of range.
    """

    priority: int = 0
    tenant: str = ""
    weight: int = 1
    deadline_ms: int = 0
    labels: str = ""
    max_hours: float = 0.0
    max_cost: float = 0.0

    def __post_init__(self) -> None:
        """Refuse terms that no scheduler could use."""
        object.__setattr__(self, "labels", read_labels(self.labels))
        if self.priority not in PRIORITIES.values():
            raise ValueError(f"priority {self.priority} is not one of {describe_priorities()}")
        if len(self.tenant) > TENANT_CHARACTERS_MAX or not self.tenant.isprintable():
            raise ValueError(f"a tenant has at most {TENANT_CHARACTERS_MAX} printable characters")
        if not 1 <= self.weight <= WEIGHT_MAX:
            raise ValueError(f"weight {self.weight} is not in 1 to {WEIGHT_MAX}")
        if not 0 <= self.deadline_ms <= DEADLINE_MS_MAX:
            raise ValueError("a deadline lies after 1970 and before 9999, and 0 is none")
        for name in LIMITS:
            if not 0 <= getattr(self, name) <= LIMIT_MAX:  # NaN is not, either
                raise ValueError(f"{name} is 0, for none, or up to {LIMIT_MAX:,.0f}")


class TermChanges(TypedDict, total=False):
    """New values of terms by name; those that are None stay as they are."""

    priority: int | None
    tenant: str | None
    weight: int | None
    deadline_ms: int | None
    labels: str | None
    max_hours: float | None
    max_cost: float | None


LIMITS: Final = ("max_hours", "max_cost")


def read_labels(text: str) -> str:
    """Return labels as they are kept, in order and each once, out of words with commas between.

    Raises:
        ValueError: There are too many, or one has other characters than a label has.
    """
    labels = sorted({label for word in text.split(",") if (label := word.strip())})
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise ValueError(
                f"{label!r} is no label: one has at most {LABEL_CHARACTERS_MAX} letters of ASCII, "
                "digits, and any of . _ : / + -"
            )
    if len(labels) > LABELS_MAX:
        raise ValueError(f"a job has at most {LABELS_MAX} labels")
    return ",".join(labels)


USUAL: Final = Terms()


def describe_priorities() -> str:
    """Return all priorities with their names, for people."""
    return ", ".join(f"{value} ({name})" for name, value in PRIORITIES.items())


def priority_name(priority: int) -> str:
    """Return the name of a priority, or its number if this program does not know it."""
    names = {value: name for name, value in PRIORITIES.items()}
    return names.get(priority, str(priority))


def describe_terms(terms: Mapping[str, str | float]) -> str:
    """Return terms, given by the names of their fields, in words."""
    words = []
    for name, term in terms.items():
        if name == "priority":
            words.append(f"priority {priority_name(int(term))}")
        elif name == "deadline_ms":
            at = datetime.fromtimestamp(int(term) / 1000, UTC)
            words.append(f"deadline {f'{at:%Y-%m-%d %H:%M:%S} UTC' if term else NO_DEADLINE}")
        elif name in LIMITS:
            words.append(f"{name} {f'{term:g}' if term else 'none'}")
        else:
            words.append(f"{name} {term or 'none'}")
    return ", ".join(words)


def read_deadline(text: str, now: float | None = None) -> int:
    """Return the Unix ms of a deadline as people write it, 0 for "none" and for an empty text.

    Args:
        text: A time in ISO 8601, local if it names no zone, or a duration such as "2h", "90m" or
            "1d12h". A time may have passed: who runs a command again may do so late.
        now: Unix time from which a duration counts; None for the clock's.

    Raises:
        ValueError: The text is neither.
    """
    if text in {"", NO_DEADLINE}:
        return 0
    try:
        at = _later(text, time.time() if now is None else now)
        return round(1000 * (datetime.fromisoformat(text).timestamp() if at is None else at))
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{text!r} is no deadline: give a time such as 2030-01-31T18:00, or a duration such as "
            f"2h, 90m or 1d12h, or {NO_DEADLINE}"
        ) from error


def term_options(terms: Terms) -> dict[str, str | float]:
    """Return terms by the names and in the values of the options of `embedfarm embed`."""
    at = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=terms.deadline_ms)
    said = asdict(terms) | {
        "priority": priority_name(terms.priority),
        "deadline": at.isoformat(timespec="milliseconds") if terms.deadline_ms else NO_DEADLINE,
    }
    del said["deadline_ms"]
    return said


def _later(text: str, now: float) -> float | None:
    """Return the Unix time after a duration, None if `text` is no duration."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    seconds = sum(int(n or 0) * unit for n, unit in zip(found.groups(), _UNIT_SECONDS, strict=True))
    if seconds > _DEADLINE_SECONDS_MAX:
        raise ValueError("longer than anybody waits")
    return now + seconds
