"""Plans of the scheduler, the passes that make them, its decisions, and who may decide."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from embedfarm.contract import wire
from embedfarm.contract.broker import block_ms, if_room
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_keys import FarmKeys
from embedfarm.contract.records import Decision, Plan, Policy, SchedulerStats

DECISIONS_MAX: Final = 100
WAKE_SECONDS: Final = 5
STATS_SECONDS: Final = 60


@dataclass
class Plans(FarmKeys):
    """Plans, decisions and figures that the active scheduler of a farm publishes."""

    def plan(self, worker: str) -> Plan | None:
        """Return the current plan of a worker, None without one."""
        data = cast("bytes | None", self.client.get(wire.plan_key(worker)))
        return self._read(Plan, wire.plan_key(worker), data)

    def publish(
        self, plans: Sequence[Plan], fence: int, ttl_seconds: float, wake: Sequence[str] = ()
    ) -> bool:
        """Write plans and wake the named workers; return False if another scheduler took over."""
        keys = [wire.plan_key(plan.worker) for plan in plans]
        answer = self._script("publish")(
            keys=[wire.SCHEDULER, *keys, *map(wire.wake_key, wake)],
            args=[fence, int(ttl_seconds * 1000), *(encode(plan) for plan in plans)],
        )
        return bool(answer == b"published")

    def wait_for_plan(self, worker: str, seconds: float) -> bool:
        """Wait until a worker is woken, for `seconds` (as `block_ms`); tell whether it was."""
        key = wire.wake_key(worker)
        return self.client.blpop([key], timeout=block_ms(seconds) / 1000) is not None

    def wake(self, worker: str) -> None:
        """End a worker's waiting for its plan; one that does not wait has its next end at once."""
        key = wire.wake_key(worker)
        pipe = self.client.pipeline(transaction=False)
        pipe.lpush(key, b"1")
        pipe.ltrim(key, 0, 0)
        pipe.expire(key, WAKE_SECONDS)
        pipe.execute()

    def policy(self) -> list[str]:
        """Return the names of the chosen passes, in order; none for the default policy."""
        data = cast("bytes | None", self.client.get(wire.POLICY))
        policy = self._read(Policy, wire.POLICY, data)
        return policy.passes if policy else []

    def set_policy(self, passes: Sequence[str]) -> None:
        """Choose the passes from the next decision on; an empty list means the scheduler's own."""
        self.client.set(wire.POLICY, encode(Policy(passes=list(passes))))

    def tell(self, decision: Decision, stats: SchedulerStats) -> None:
        """Keep a decision and the figures of the scheduler for people."""
        pipe = self.client.pipeline(transaction=False)
        pipe.lpush(wire.DECISIONS, encode(decision))
        pipe.ltrim(wire.DECISIONS, 0, DECISIONS_MAX - 1)
        pipe.set(wire.STATS, encode(stats), ex=STATS_SECONDS)
        with if_room():
            pipe.execute()

    def decisions(self, count: int) -> list[Decision]:
        """Return the last decisions that were kept, about one in a second, newest first."""
        rows = cast("list[bytes]", self.client.lrange(wire.DECISIONS, 0, count - 1))
        found = (self._read(Decision, wire.DECISIONS, row) for row in rows)
        return [decision for decision in found if decision is not None]

    def scheduler_stats(self) -> SchedulerStats | None:
        """Return the figures of the active scheduler, None when none was active lately."""
        data = cast("bytes | None", self.client.get(wire.STATS))
        return self._read(SchedulerStats, wire.STATS, data)

    def has_scheduler(self) -> bool:
        """Tell whether a scheduler is active now."""
        return bool(self.client.exists(wire.SCHEDULER))

    def elect(self, token: str, ttl_seconds: float) -> int:
        """Take or keep the scheduler's lock; return its fencing token, 0 if another holds it."""
        keys, ttl_ms = [wire.SCHEDULER, wire.FENCE], int(ttl_seconds * 1000)
        return int(self._script("elect")(keys=keys, args=[token, ttl_ms]))

    def abdicate(self, fence: int) -> None:
        """Give the lock up, so that a standby need not wait for it to expire."""
        self._script("abdicate")(keys=[wire.SCHEDULER], args=[fence])
