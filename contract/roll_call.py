"""The roll of a farm: the workers that are alive, and those that were lost."""

import math
from dataclasses import dataclass, field
from typing import Final

import redis

from embedfarm.contract import wire
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.unreadable_records import Report, name_once, read_or_skip

WORKER_SECONDS: Final = 3600


@dataclass
class RollCall:
    """Calls of a farm's roll, each of which reads only heartbeats that may be new.

    Attributes:
        on_unreadable: Called for each heartbeat that cannot be read.
        fresh_seconds: Time for which a heartbeat that was read is believed, unless the worker has
            sent another one: at most that in which it would lapse; 0 to read all each time.
    """

    client: redis.Redis
    on_unreadable: Report = name_once
    fresh_seconds: float = 0.0
    # With the time of each, which is NaN while another one may have it; None for one that lapsed.
    _read: dict[str, tuple[float, Heartbeat | None]] = field(default_factory=dict)

    def call(self) -> tuple[list[Heartbeat], dict[str, float]]:
        """Return live workers' heartbeats, and by name the seconds since each lost one was seen.

        A heartbeat that the last call read later than it came is the same object, and one that had
        lapsed then is not asked for again. Workers count as lost for an hour. One that stops
        cleanly is taken off the list, and does not count as lost.
        """
        pipe = self.client.pipeline(transaction=False)
        pipe.time()
        pipe.zrange(wire.WORKERS, 0, -1, withscores=True)
        (seconds, microseconds), listed = pipe.execute()
        now = seconds + microseconds / 1e6
        came = dict(sorted((name.decode(errors="replace"), at) for name, at in listed))
        same = {name for name, (at, _) in self._read.items() if at == came.get(name)}
        believed = {
            name
            for name in same
            if self._read[name][1] is None or 0 <= now - came[name] < self.fresh_seconds
        }
        asked = [name for name in came if name not in believed]
        pipe.zremrangebyscore(wire.WORKERS, "-inf", now - WORKER_SECONDS)
        for name in asked:
            pipe.hget(wire.worker_key(name), "heartbeat")
        found = dict(zip(asked, pipe.execute()[1:], strict=True))
        read: dict[str, tuple[float, Heartbeat | None]] = {}
        for name, at in came.items():
            data = found.get(name)
            if name in believed or (data is not None and name in same):
                read[name] = self._read[name]
                continue
            beat = None if data is None else self._decode(name, data)
            if data is None or beat is not None:
                read[name] = at if _is_last(at, now) else math.nan, beat
        self._read = read
        lost = {name: max(0.0, now - came[name]) for name, (_, beat) in read.items() if not beat}
        return [beat for _, beat in read.values() if beat], lost

    def _decode(self, name: str, data: bytes) -> Heartbeat | None:
        return read_or_skip(Heartbeat, data, wire.worker_key(name), self.on_unreadable)


def _is_last(at: float, now: float) -> bool:
    """Tell whether no other heartbeat can have the time `at` any more, in Unix seconds.

    Times are in milliseconds; those of workers of an earlier release are in whole seconds.
    """
    return now >= at + (0.001 if at % 1 else 1)
