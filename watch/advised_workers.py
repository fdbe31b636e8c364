"""Advice as it is given by all doors: figures by model and kind, and the reasons in words."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from embedfarm.contract.formatting import HOUR, format_count, format_seconds
from embedfarm.contract.spending import format_cost
from embedfarm.watch.advice import ANY_KIND, DeviceKind, DueWork, KindSpeed, Staffing, staff

TOKENS_PER_SECOND_UNKNOWN: Final = 1000.0  # a slow CPU: so that work of unknown speed is not none
MILLION: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class KindForModel:
    """Workers of one kind for one model.

    Attributes:
        tokens_per_second: Rate of one of them for the model's work, None if it is not known.
        backlog_seconds: Time that one of them would need for the model's backlog, None as above.
        workers_ready: Live workers that have the model loaded.
        workers_needed: Workers that the model takes until its work is due; 0.2 is a fifth of the
            time of one.
        workers_advised: Workers that are advised for it. One that is advised for another model and
            has time for this one counts there, so that the sum over models is that of the kind.
    """

    tokens_per_second: float | None
    backlog_seconds: float | None
    workers_ready: int
    workers_needed: float
    workers_advised: int


@dataclass(frozen=True, kw_only=True)
class ModelAdvice:
    """Backlog of a model, and workers for it.

    Attributes:
        backlog_tokens: Tokens that were sent and are not embedded, of jobs that are in work.
        backlog_seconds: Time that one worker of the slowest kind whose rate is known would need for
            them; of a kind with 1,000 tokens/s where nobody knows.
        late_seconds: Time by which its work is late at most with the advised workers, 0 if it is
            in time.
        kinds: Workers by kind.
        reasons: Why so many, in sentences.
    """

    backlog_tokens: int
    backlog_seconds: float
    late_seconds: float
    kinds: Mapping[str, KindForModel]
    reasons: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class KindAdvice:
    """Workers of one kind of devices.

    Attributes:
        cost_per_hour: Price of an hour of one of them, 0 if there is none.
        workers_live: Live ones, without those that end.
        workers_max: Most that there may be, None for any number.
        workers_advised: Workers that are advised, for all models.
    """

    cost_per_hour: float
    workers_live: int
    workers_max: int | None
    workers_advised: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    """How many workers of each kind end the farm's backlog in time at least cost.

    Attributes:
        backlog_tokens: Tokens of all models' backlogs.
        backlog_seconds: Sum of `ModelAdvice.backlog_seconds`.
        workers_live: Live workers.
        workers_advised: Workers that are advised.
        cost: What the backlog costs with them, by the prices of the kinds; 0 without any.
        within_seconds: Time within which jobs without a deadline are to end.
        start_seconds: Time that a new worker is taken to need until it lives.
        kinds: Workers by kind.
        models: Backlogs and workers by model.
        reasons: What this goes by, in sentences.
    """

    backlog_tokens: int
    backlog_seconds: float
    workers_live: int
    workers_advised: int
    cost: float
    within_seconds: float
    start_seconds: float
    kinds: Mapping[str, KindAdvice]
    models: Mapping[str, ModelAdvice]
    reasons: Sequence[str]

    def about(self, model: str = "", kind: str = "") -> "Advice":
        """Return the advice about one model, one kind or both; "" is for all of them.

        Figures at the top are those of what is asked for: `workers_advised` of a kind and a model,
        `backlog_seconds` of a worker of the kind. What the farm does not know has zeros. A worker
        of any kind that is advised, where none is known, is one of the kind that is asked for.
        """
        if not model and not kind:
            return self
        kinds = {name: each for name, each in self.kinds.items() if kind in {"", name}}
        if kind not in {"", *self.kinds} and ANY_KIND in self.kinds:
            kinds[kind] = self.kinds[ANY_KIND]
        found = self.models if not model else {model: self.models.get(model, NO_MODEL)}
        models = {name: _about(each, kind) for name, each in found.items()}
        advised = [each.workers_advised for m in models.values() for each in m.kinds.values()]
        return replace(
            self,
            backlog_tokens=sum(each.backlog_tokens for each in models.values()),
            backlog_seconds=sum(each.backlog_seconds for each in models.values()),
            workers_live=sum(each.workers_live for each in kinds.values()),
            workers_advised=sum(advised),
            kinds=kinds,
            models=models,
        )


NO_MODEL: Final = ModelAdvice(
    backlog_tokens=0, backlog_seconds=0.0, late_seconds=0.0, kinds={}, reasons=()
)


def _about(model: ModelAdvice, kind: str) -> ModelAdvice:
    """Return what is advised for a model of one kind; "" for all of them."""
    if not kind:
        return model
    found = model.kinds.get(kind) or model.kinds.get(ANY_KIND)
    seconds = None if found is None else found.backlog_seconds
    if seconds is None:
        known = any(each.backlog_seconds is not None for each in model.kinds.values())
        seconds = 0.0 if known else model.backlog_seconds
    kinds = {} if found is None else {kind: found}
    return replace(model, kinds=kinds, backlog_seconds=seconds)


def advise(
    works: Sequence[DueWork],
    kinds: Sequence[DeviceKind],
    *,
    within_seconds: float,
    start_seconds: float,
    notes: Sequence[str] = (),
) -> Advice:
    """Return the advice for some work, all of it in one list, and the kinds that are known.

    Args:
        works: All work, and of models without any what is known of their speed, with no tokens.
        kinds: All kinds that are known, live or not.
        within_seconds: Time within which work without a deadline is due, as `works` have it.
        start_seconds: Time that a new worker needs until it lives.
        notes: What is to be said of work that is not among these.
    """
    staffing = staff(works, kinds, start_seconds)
    names = dict.fromkeys(each.model for each in works)
    models = {
        name: _advise_model(name, [each for each in works if each.model == name], staffing)
        for name in names
    }
    return Advice(
        backlog_tokens=sum(each.backlog_tokens for each in models.values()),
        backlog_seconds=sum(each.backlog_seconds for each in models.values()),
        workers_live=sum(each.live for each in kinds),
        workers_advised=sum(pool.count for pool in staffing.pools.values()),
        cost=sum(pool.kind.cost_per_hour * pool.seconds / HOUR for pool in staffing.pools.values()),
        within_seconds=within_seconds,
        start_seconds=start_seconds,
        kinds={
            name: KindAdvice(
                cost_per_hour=pool.kind.cost_per_hour,
                workers_live=pool.kind.live,
                workers_max=None if math.isinf(pool.kind.most) else int(pool.kind.most),
                workers_advised=pool.count,
            )
            for name, pool in staffing.pools.items()
        },
        models=models,
        reasons=[*notes, *_assumptions(kinds, within_seconds, start_seconds)],
    )


def _advise_model(name: str, works: Sequence[DueWork], staffing: Staffing) -> ModelAdvice:
    tokens = sum(each.tokens for each in works)
    kinds = dict[str, KindForModel]()
    for kind in staffing.pools:
        speeds = [(each.tokens, each.speeds[kind]) for each in works if kind in each.speeds]
        advised = staffing.advised.get((name, kind), 0)
        if not speeds and not advised and staffing.tried_by.get(name) != kind:
            continue
        rate = _mean_rate(speeds) if speeds else None
        kinds[kind] = KindForModel(
            tokens_per_second=rate,
            backlog_seconds=None if rate is None else tokens / rate,
            workers_ready=max((each.ready for _, each in speeds), default=0),
            workers_needed=staffing.needed.get((name, kind), 0.0),
            workers_advised=advised,
        )
    known = [each.backlog_seconds for each in kinds.values() if each.backlog_seconds is not None]
    return ModelAdvice(
        backlog_tokens=round(tokens),
        backlog_seconds=max(known) if known else tokens / TOKENS_PER_SECOND_UNKNOWN,
        late_seconds=staffing.late_seconds.get(name, 0.0),
        kinds=kinds,
        reasons=list(_reasons(name, tokens, kinds, staffing)) if tokens else [],
    )


def _mean_rate(speeds: Sequence[tuple[float, KindSpeed]]) -> float:
    """Return the rate over all of some tokens; where there are none, the first one."""
    tokens = sum(some for some, _ in speeds)
    if not tokens:
        return speeds[0][1].tokens_per_second
    return tokens / sum(some / each.tokens_per_second for some, each in speeds)


def _reasons(
    name: str, tokens: float, kinds: Mapping[str, KindForModel], staffing: Staffing
) -> Iterator[str]:
    """Yield why there are so many workers for a model."""
    size = f"{format_count(tokens)} tokens"
    for kind, each in kinds.items():
        if each.workers_needed and each.backlog_seconds is not None:
            yield (
                f"{size} are {format_seconds(each.backlog_seconds)} of one worker of kind {kind}; "
                f"with starts and loads {each.workers_needed:.2g} of them are at it until they are "
                "due"
            )
            if not each.workers_advised:
                yield f"workers of kind {kind} that are advised for others have time for it"
    if name in staffing.tried_by:
        yield (
            f"{size}, and nobody knows how fast a worker is with this model: one of kind "
            f"{staffing.tried_by[name]} finds out"
        )
    elif not any(each.workers_needed for each in kinds.values()):
        yield f"{size}, and no worker of a kind that can do them may be there"
        return
    prices = {
        kind: staffing.pools[kind].kind.cost_per_hour / HOUR / each.tokens_per_second * MILLION
        for kind, each in kinds.items()
        if each.tokens_per_second
    }
    if len(prices) > 1 and any(prices.values()):
        said = ", ".join(f"{format_cost(cost)} on {kind}" for kind, cost in prices.items())
        yield f"a million tokens cost {said}, without starts and loads"
    late = format_seconds(staffing.late_seconds.get(name, 0.0))
    if left := staffing.tokens_left.get(name):
        yield (
            f"the workers that there may be do {1 - left / tokens:.0%} of it in time, and the rest "
            f"about {late} late"
        )
    elif name in staffing.late_seconds:
        yield (
            f"some of it is up to {late} late even so: a worker is started only if it then works "
            "for as long as it took to come"
        )


def _assumptions(
    kinds: Sequence[DeviceKind], within_seconds: float, start_seconds: float
) -> Iterator[str]:
    """Yield what the advice takes for granted."""
    yield f"jobs without a deadline are to end within {format_seconds(within_seconds)} from now"
    yield (
        f"a new worker is taken to need {format_seconds(start_seconds)} until it lives, and then "
        "as long to load a model as workers took before"
    )
    free = [kind.name for kind in kinds if not kind.cost_per_hour]
    if kinds and len(free) == len(kinds):
        yield "no kind has a price: an hour of each is taken to cost the same"
    elif free:
        yield f"taken to cost nothing, since they have no price: {', '.join(free)}"
