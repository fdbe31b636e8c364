"""How many workers of each kind end a farm's work by its deadlines at least cost.

Pure: state in, advice out. Work is taken to be divisible at will, as blocks nearly are, so that the
workers of a kind are one machine, and to be done in the order of its deadlines, which ends all of
it in time if any order does (Jackson, Scheduling a production line to minimize maximum tardiness,
1955). What is counted is the time of workers:

    need = tokens / rate + loads * load_seconds
    time = live * seconds + new * (seconds - start_seconds)

For each piece of work, earliest deadline first, a kind gives what time is left of its workers that
are advised already, then live workers, those first that have the model loaded, then new ones: the
fewest that end it. If one kind may not have enough of them others do the rest; of all ways to do
it the cheapest counts. So it is for all kinds together and for each kind alone, and of these the
cheapest whole. Only what the fewest workers of one kind have left over might be done
cheaper by another kind: at most the starts and loads of a worker or two for each deadline, which a
test compares with all mixes of small farms.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from embedfarm.contract.formatting import HOUR

ANY_KIND: Final = "any"
SOONEST_SECONDS: Final = 60.0  # in which work that is late already is to end, at the soonest
WORTH: Final = 2.0  # a new worker works at least as long as it takes to come
ROUNDING: Final = 1e-9
KINDS_NEXT: Final = 3  # kinds that are tried for what one leaves over


class DeviceKind(NamedTuple):
    """A kind of device, of which there may be workers.

    Attributes:
        name: Name of the kind.
        cost_per_hour: Price of an hour of one worker, 0 if there is none.
        live: Live workers of the kind that take work.
        most: Most workers that there may be.
    """

    name: str
    cost_per_hour: float = 0.0
    live: int = 0
    most: float = math.inf


class KindSpeed(NamedTuple):
    """How fast workers of a kind do some work.

    Attributes:
        tokens_per_second: Rate of one worker.
        load_seconds: Time that its model takes to load.
        ready: Live workers that have it loaded.
    """

    tokens_per_second: float
    load_seconds: float = 0.0
    ready: int = 0


class DueWork(NamedTuple):
    """Work of one model that is due at one time.

    Attributes:
        model: Name of the model.
        tokens: Tokens that are to be embedded.
        due_seconds: Time from now until it is to be done; negative if that has passed.
        speeds: How fast each kind does it, as far as that is known.
    """

    model: str
    tokens: float
    due_seconds: float
    speeds: Mapping[str, KindSpeed]


class WorkPart(NamedTuple):
    """Part of some work that a kind does.

    Attributes:
        tokens: Tokens of it.
        seconds: Time that workers need for it, with their loads.
        live: Live workers that are kept for it.
        new: Workers that are started for it.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    live: int = 0
    new: int = 0


@dataclass
class Pool:
    """The workers of a kind that are advised.

    Attributes:
        kind: The kind.
        price: Cost of an hour, by which kinds are compared.
        start_seconds: Time that a new worker needs until it lives.
        live: Live workers that are kept.
        new: Workers that are started.
        used_seconds: Time that all work so far takes of them.
    """

    kind: DeviceKind
    price: float
    start_seconds: float
    live: int = 0
    new: int = 0
    used_seconds: float = 0.0

    @property
    def count(self) -> int:
        """Number of workers that are advised."""
        return self.live + self.new

    @property
    def seconds(self) -> float:
        """Time of devices that is paid for."""
        return self.used_seconds + self.new * self.start_seconds

    def arrival_seconds(self, speed: KindSpeed) -> float:
        """Return the time after which a new worker begins to do some work."""
        return self.start_seconds + speed.load_seconds

    def cost(self, part: WorkPart) -> float:
        """Return what it costs to do a part of some work."""
        return self.price * (part.seconds + part.new * self.start_seconds) / HOUR

    def fill(self, work: DueWork, tokens: float, seconds: float) -> WorkPart:
        """Return how much of some work is done within a time, with the fewest workers more."""
        speed = work.speeds[self.kind.name]
        load, arrival = speed.load_seconds, self.arrival_seconds(speed)
        whole = left = tokens / speed.tokens_per_second
        spare = self._spare(seconds)
        busy = _count(min(left, spare), seconds)
        loads = load * max(0, busy - speed.ready)
        done = min(left, max(0.0, spare - loads))
        left, used = left - done, done + loads if done else 0.0
        ready = max(0, speed.ready - busy) if done else speed.ready
        free = max(0, int(min(self.kind.live, self.kind.most)) - self.live)
        room = max(0.0, self.kind.most - self.count - free) if seconds >= WORTH * arrival else 0
        offers = (
            (min(free, ready), seconds, 0.0),
            (free - min(free, ready), seconds - load, load),
            (room, seconds - arrival, load),
        )
        counts = list[int]()
        for most, each, loading in offers:
            counts.append(int(min(most, _count(left, each))))
            done = min(left, counts[-1] * each)
            left, used = left - done, used + done + counts[-1] * loading
        done = tokens if left <= ROUNDING * whole else tokens * (1 - left / whole)
        return WorkPart(done, used, counts[0] + counts[1], counts[2])

    def take(self, part: WorkPart) -> None:
        """Count a part of some work among what the workers do."""
        self.live += part.live
        self.new += part.new
        self.used_seconds += part.seconds

    def _spare(self, seconds: float) -> float:
        """Return the time within some seconds that its workers have left."""
        there = self.live * seconds + self.new * max(0.0, seconds - self.start_seconds)
        return max(0.0, there - self.used_seconds)


def _count(left: float, each: float) -> int:
    """Return how many workers it takes that have some seconds each; 0 if they have none."""
    return math.ceil(left / each - ROUNDING) if left > 0 and each > 0 else 0


class Placed(NamedTuple):
    """Part of some work, the pool that does it, and the seconds within which it does."""

    pool: Pool
    part: WorkPart
    seconds: float


def _order(option: tuple[Sequence[Placed], float]) -> tuple[float, float, float, list[str]]:
    """Return what decides between ways to do work: tokens left over, cost, time, and names."""
    placed, left = option
    cost = sum(pool.cost(part) for pool, part, _ in placed)
    seconds = sum(part.seconds for _, part, _ in placed)
    return left, cost, seconds, [each.pool.kind.name for each in placed]


@dataclass
class Staffing:
    """Workers for all work, in the making.

    Attributes:
        pools: Workers that are advised, by kind.
        needed: How many workers some model takes, by model and kind; parts of one count as such.
        advised: Workers that were added for a model, by model and kind; those that others were
            added for, and which have time for it as well, do not count again.
        late_seconds: Time by which work of a model is late at most, where it is late or left over.
        tokens_left: Tokens of a model that all workers that there may be do not do in time.
        tried_by: The kind of which one worker is to find out how fast it is with a model.
    """

    pools: dict[str, Pool]
    needed: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    advised: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    late_seconds: dict[str, float] = field(default_factory=dict)
    tokens_left: dict[str, float] = field(default_factory=dict)
    tried_by: dict[str, str] = field(default_factory=dict)

    @property
    def order(self) -> tuple[float, float, float, float]:
        """What decides between staffings: work left, models late, cost, time of devices."""
        cost = sum(pool.price * pool.seconds for pool in self.pools.values())
        seconds = sum(pool.seconds for pool in self.pools.values())
        return sum(self.tokens_left.values()), len(self.late_seconds), cost, seconds

    def place(self, work: DueWork) -> None:
        """Have some work done in time, or else as soon as it is worth starting workers for it."""
        placed, left = self._split(work, late=False)
        late = 0.0
        if left:
            placed, left = self._split(work, late=True)
            end = max((each.seconds for each in placed), default=max(0.0, work.due_seconds))
            late = end - work.due_seconds
        for pool, part, seconds in placed:
            pool.take(part)
            paid = part.seconds + part.new * pool.start_seconds
            self.needed[work.model, pool.kind.name] += paid / seconds
            self.advised[work.model, pool.kind.name] += part.live + part.new
        if left:
            self.tokens_left[work.model] = self.tokens_left.get(work.model, 0.0) + left
            speeds = ((self.pools[name].count, each) for name, each in work.speeds.items())
            rate = sum(count * each.tokens_per_second for count, each in speeds)
            late += left / rate if rate else 0.0
        if late or left:
            self.late_seconds[work.model] = max(self.late_seconds.get(work.model, 0.0), late)

    def _split(self, work: DueWork, *, late: bool) -> tuple[list[Placed], float]:
        """Return the parts of some work by kind, and the tokens that are left over."""
        allowed = [pool for pool in self.pools.values() if pool.kind.most]
        pools = [pool for pool in allowed if pool.kind.name in work.speeds]
        pools.sort(key=lambda p: p.price / work.speeds[p.kind.name].tokens_per_second)
        return min(self._ways(pools, work, work.tokens, late=late), key=_order)

    def _ways(
        self, pools: Sequence[Pool], work: DueWork, left: float, *, late: bool
    ) -> Iterator[tuple[list[Placed], float]]:
        """Yield ways to do some work: a kind as much as it can, the others what it leaves over.

        Each kind comes first once, and the three cheapest of the others behind it in any order.
        """
        yield [], left
        for place, pool in enumerate(pools):
            found = self._try(pool, work, left, late=late)
            if not found.part.tokens:
                continue
            rest = max(0.0, left - found.part.tokens)
            others = [*pools[:place], *pools[place + 1 :]] if rest else []
            for placed, over in self._ways(others[:KINDS_NEXT], work, rest, late=late):
                yield [found, *placed], over

    @staticmethod
    def _try(pool: Pool, work: DueWork, tokens: float, *, late: bool) -> Placed:
        """Return what a pool does of some work: until it is due, or a little later."""
        seconds = work.due_seconds
        if late:
            arrival = pool.arrival_seconds(work.speeds[pool.kind.name])
            seconds = max(seconds, WORTH * arrival, SOONEST_SECONDS)
        return Placed(pool, pool.fill(work, tokens, seconds), seconds)

    def try_out(self, model: str) -> None:
        """Have one worker find out how fast it is with a model that nobody knows.

        One that is advised already does; else one that lives, or one of the cheapest kind. Where
        no kind is known, as on a farm that never had a worker, it is one of any.
        """
        pools = [pool for pool in self.pools.values() if pool.kind.most >= 1]
        if not pools and not self.pools:
            pools = [Pool(DeviceKind(ANY_KIND), 0.0, 0.0)]
            self.pools[ANY_KIND] = pools[0]
        if not pools:
            return
        pool = min(pools, key=lambda p: (not p.count, not p.kind.live, p.price, p.kind.name))
        name = self.tried_by[model] = pool.kind.name
        self.advised[model, name] += not pool.count
        if not pool.count:
            pool.take(WorkPart(live=min(1, pool.kind.live), new=max(0, 1 - pool.kind.live)))


def staff(works: Sequence[DueWork], kinds: Sequence[DeviceKind], start_seconds: float) -> Staffing:
    """Return the workers that end all work in time at least cost.

    Where no kind has a price, an hour of each costs the same.

    Args:
        works: All work, in any order.
        kinds: All kinds that are known.
        start_seconds: Time that a new worker needs until it lives.
    """
    known = sorted((each for each in works if each.speeds), key=lambda each: each.due_seconds)
    choices = [kinds, *([each] for each in kinds)] if len(kinds) > 1 else [kinds]
    some_price = any(kind.cost_per_hour for kind in kinds)
    tried = list[Staffing]()
    for chosen in choices:
        staffing = Staffing({})
        for kind in kinds:
            price = kind.cost_per_hour if some_price else 1.0
            allowed = kind if kind in chosen else kind._replace(most=0)
            staffing.pools[kind.name] = Pool(allowed, price, start_seconds)
        for work in known:
            staffing.place(work)
        tried.append(staffing)
    best = min(tried, key=lambda each: each.order)
    best.pools = {kind.name: replace(best.pools[kind.name], kind=kind) for kind in kinds}
    for model in dict.fromkeys(each.model for each in works if not each.speeds and each.tokens):
        best.try_out(model)
    return best
