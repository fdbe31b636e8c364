"""Statistics of a farm: completions, samples of an hour, remembered rates and budgets."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec

from embedfarm.contract import wire
from embedfarm.contract.broker import block_ms, if_allowed, if_room
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_keys import FarmKeys
from embedfarm.contract.pace import TimedMicroBatch, bars_of
from embedfarm.contract.records import Completion, Rate, Sample
from embedfarm.contract.unreadable_records import (
    readable,
)

HISTORY_SECONDS: Final = 30 * 86400
BUDGET_SECONDS: Final = 7 * 86400
SAMPLES_MAX: Final = 360  # one in ten seconds: an hour
LONG_SAMPLES_MAX: Final = 1008  # one in ten minutes: a week
HOUR_SECONDS: Final = 3600.0

_RATE_KEY: Final = re.compile(r"[^|]+\|.+\|[0-9]{1,2}", re.DOTALL)


@dataclass
class FarmStatistics(FarmKeys):
    """Statistics of a farm, on the server: rates, samples, completions, budgets."""

    def report(self, completion: Completion, events_max: int) -> None:
        """Tell the scheduler about a micro-batch."""
        with if_room():
            self.client.xadd(
                wire.EVENTS, {"done": encode(completion)}, maxlen=events_max, approximate=True
            )

    def events(self, after: str, block_seconds: float) -> tuple[str, list[Completion]]:
        """Return the completions since ID `after` ("$": from now on).

        Args:
            after: ID that the last call returned.
            block_seconds: Seconds to wait for the first event, limited by `block_ms`.

        Returns:
            The ID to go on from, and the completions; other events only end the waiting.
        """
        answer = self.client.xread({wire.EVENTS: after}, count=1000, block=block_ms(block_seconds))
        items: list[Any] = [item for _, rows in cast("list[Any]", answer or []) for item in rows]
        last = items[-1][0].decode() if items else after
        return last, [
            done
            for _, done in readable(Completion, b"done", items, wire.EVENTS, self.on_unreadable)
        ]

    def recent_batches(self, seconds: float) -> dict[str, list[TimedMicroBatch]]:
        """Return the micro-batches reported in the last `seconds`, by worker, oldest first.

        One of several jobs is as many bars, one after the other.

        The server keeps about `events_max` of all workers, so that on a large farm they may not
        reach back as far.
        """
        rows = self._newest(wire.EVENTS, seconds)
        batches = defaultdict[str, list[TimedMicroBatch]](list)
        for end, done in readable(Completion, b"done", rows, wire.EVENTS, self.on_unreadable):
            batches[done.worker] += bars_of(done, end)
        return dict(batches)

    def sample(self, sample: Sample) -> None:
        """Keep a sample, and an hour of the samples before it."""
        self._keep(wire.SAMPLES, sample, SAMPLES_MAX)

    def long_sample(self, sample: Sample) -> None:
        """Keep a sample of ten minutes, and a week of those before it; workers are not kept."""
        nameless = msgspec.structs.replace(sample, workers={})
        with if_allowed():
            self._keep(wire.LONG_SAMPLES, nameless, LONG_SAMPLES_MAX)

    def _keep(self, stream: str, sample: Sample, samples_max: int) -> None:
        with if_room():
            self.client.xadd(
                stream, {"sample": encode(sample)}, maxlen=samples_max, approximate=False
            )

    def samples(self, seconds: float) -> list[tuple[float, Sample]]:
        """Return the samples of the last `seconds`, each after its Unix time, oldest first.

        Those of more than an hour are of ten minutes each, others of ten seconds.
        """
        stream = wire.SAMPLES if seconds <= HOUR_SECONDS else wire.LONG_SAMPLES
        rows = self._newest(stream, seconds)
        return list(readable(Sample, b"sample", rows, stream, self.on_unreadable))

    def _newest(self, stream: str, seconds: float) -> list[Any]:
        """Return a stream's entries of the last `seconds` by the server's clock."""
        now, microseconds = self.client.time()
        since = int(1000 * (now - seconds)) + microseconds // 1000
        return cast("list[Any]", self.client.xrange(stream, max(0, since), "+"))

    def history(self) -> dict[str, Rate]:
        """Return the remembered rates by `worker|model|length class`."""
        stored = cast("Mapping[bytes, bytes]", self.client.hgetall(wire.HISTORY))
        rates = {}
        for field, data in stored.items():
            name = field.decode(errors="replace")
            if not _RATE_KEY.fullmatch(name):
                self.on_unreadable(f"{wire.HISTORY} {name}", "not worker|model|length class")
            elif rate := self._read(Rate, f"{wire.HISTORY} {name}", data):
                rates[name] = rate
        return rates

    def remember(self, rates: Mapping[str, Rate], forgotten: Sequence[str]) -> None:
        """Store rates that changed, and drop the ones too old to believe."""
        if rates:
            with if_room():
                self.client.hset(wire.HISTORY, mapping={k: encode(v) for k, v in rates.items()})
        if forgotten:
            self.client.hdel(wire.HISTORY, *forgotten)

    def budget(self, device: str, model: str) -> int:
        """Return the tokens of a device batch learned for a device and a model; 0 without any."""
        data = cast("bytes | None", self.client.get(wire.budget_key(device, model)))
        return int(data) if data and re.fullmatch(rb"[0-9]{1,15}", data) else 0

    def learn_budget(self, device: str, model: str, tokens: int) -> None:
        """Remember a device batch's budget for a week, after which it is learned anew."""
        with if_room():
            self.client.set(wire.budget_key(device, model), tokens, ex=BUDGET_SECONDS)
