"""What a job takes of devices, and what that costs: computed and worded here for all that show it.

A worker says with each result how long its devices worked on it, and what that costs by the price
of its own settings at that time. So workers of several prices add up, and a price that changes
counts from then on. The sums are whole numbers on the server, which the commits count up.
"""

from typing import Final, NamedTuple

from embedfarm.contract.formatting import HOUR, format_range, format_seconds

MICRO: Final = 1_000_000  # of a second, and of the unit of costs
_CENT: Final = 0.01
_HOURS_SHOWN: Final = 100  # with their minutes


class Spent(NamedTuple):
    """Device-hours that a job has taken, and what they cost.

    Attributes:
        device_hours: Hours of single devices: a worker on two devices takes two in an hour.
        cost: Their cost, in whatever unit `device_cost_per_hour` is set; 0 without any price.
    """

    device_hours: float = 0.0
    cost: float = 0.0

    @property
    def words(self) -> str:
        """Both in words, such as "12 s of devices' time, cost 0.03"; without a price no cost."""
        cost = f", cost {format_cost(self.cost)}" if self.cost else ""
        return f"{format_device_hours(self.device_hours)} of devices' time{cost}"


class Estimate(NamedTuple):
    """What a job was estimated to take before it ran; a job's hash has it under these names.

    Attributes:
        estimated_seconds_least: Least time from its first block to its last result.
        estimated_seconds_most: Most of that time.
        estimated_device_hours: Device-hours of its results.
        estimated_cost: Their cost; 0 without any price.
    """

    estimated_seconds_least: float = 0.0
    estimated_seconds_most: float = 0.0
    estimated_device_hours: float = 0.0
    estimated_cost: float = 0.0

    @property
    def kept(self) -> dict[str, float]:
        """The estimate by its names; nothing for none."""
        return self._asdict() if self.estimated_seconds_most else {}

    @property
    def notes(self) -> dict[str, str]:
        """The estimate as it is noted with a job; nothing for none."""
        return {name: str(value) for name, value in self.kept.items()}

    @property
    def words(self) -> str:
        """The estimate in words; "" for none."""
        least, most, hours, cost = self
        if not most:
            return ""
        return f"{format_range(least, most)}, {Spent(hours, cost).words}"


def spent_from(device_us: int, cost_micros: int) -> Spent:
    """Return what was spent, out of microseconds of devices and millionths of costs."""
    return Spent(device_us / MICRO / HOUR, cost_micros / MICRO)


def counters_of(spent: Spent) -> dict[str, int]:
    """Return the counters of a job's status that say what was spent, by name."""
    device_us = round(spent.device_hours * HOUR * MICRO)
    return {"device_us": device_us, "cost_micros": round(spent.cost * MICRO)}


def format_device_hours(hours: float) -> str:
    """Format device-hours: as a time below a hundred of them, such as "1 min 05 s"."""
    return format_seconds(hours * HOUR) if hours < _HOURS_SHOWN else f"{hours:,.0f} h"


def format_cost(cost: float) -> str:
    """Format a cost with two decimals, or with two digits where it is less than a hundredth."""
    return f"{cost:,.2f}" if cost >= _CENT or not cost else f"{cost:.2g}"
