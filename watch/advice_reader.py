"""Advice for a farm as its server has it: jobs and deadlines, workers, and the rates of both."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, NamedTuple

import redis

from embedfarm.contract import wire
from embedfarm.contract.device_kinds import kind_of, price_of
from embedfarm.contract.encoding import RecordError, decode
from embedfarm.contract.farm_client import FarmClient, length_class
from embedfarm.contract.formatting import counted
from embedfarm.contract.job_spec import JobSpec, model_key, weights_of
from embedfarm.contract.model_counts import ModelCounts
from embedfarm.contract.model_states import ready
from embedfarm.contract.records import Heartbeat, Rate
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import has_room
from embedfarm.contract.status import JobGone, JobStatus, JobUnreadable, status_from
from embedfarm.contract.window import FarmWindow
from embedfarm.scheduler.history import History
from embedfarm.watch.advice import DeviceKind, DueWork, KindSpeed
from embedfarm.watch.advised_workers import Advice, advise

STEP: Final = 1000  # jobs looked at in one round trip
RATES_MAX: Final = 10  # workers of a kind that are gone, by which the next one is judged
MODELS_MAX: Final = 200  # that are listed without work
FIELDS: Final = (
    "state", "tenant", "chunk_count", "chunks_expected", "first_chunk", "blocks_in", "blocks_done",
    "chunks_in", "known_in", "tokens_in", "tokens_done", "result_bytes", "drained_upto",
    "refilled_upto", "deadline_ms",
)  # fmt: skip


class DueTokens(NamedTuple):
    """What tokens that wait have in common: model, length class, and deadline, 0 for none."""

    model: str
    length: int
    deadline_ms: int


@dataclass
class Waiting:
    """Tokens of jobs that wait for workers, and what is to be said of those that do not.

    Attributes:
        tokens: Tokens that are not embedded, of jobs that may be worked on.
        paused: Number of jobs that are paused, and have such tokens.
        held: Number of jobs that may not be worked on, since their results are not collected.
        reading: Number of jobs of which more is sent, and nobody can tell how much.
        estimated: Number of jobs of which more is sent, and which is estimated.
    """

    tokens: defaultdict[DueTokens, float] = field(default_factory=lambda: defaultdict(float))
    paused: int = 0
    held: int = 0
    reading: int = 0
    estimated: int = 0

    @property
    def notes(self) -> Iterator[str]:
        """What is left out of the tokens, in sentences."""
        if self.paused:
            yield f"{counted(self.paused, 'paused job')} left out"
        if self.held:
            yield f"{counted(self.held, 'job')} left out whose results are not collected"
        if self.reading:
            yield f"what is not sent yet of {counted(self.reading, 'job')} is not counted"
        if self.estimated:
            yield (
                f"what is not sent yet of {counted(self.estimated, 'job')} is estimated, from how "
                "much of the corpus was read"
            )


@dataclass(frozen=True)
class KnownSpeeds:
    """How fast workers of each kind are, as the farm remembers it.

    Attributes:
        beats: Heartbeats of the live workers that take work, by name.
        rates: Remembered rates, by `worker|model|length class`.
        counts: Counters of models, by name.
        settings: Settings of the farm.
    """

    beats: Mapping[str, Heartbeat]
    rates: Mapping[str, Rate]
    counts: Mapping[str, ModelCounts]
    settings: Settings
    _history: History = field(init=False)
    _loads: Mapping[tuple[str, str], list[float]] = field(init=False)

    def __post_init__(self) -> None:
        history = History(self.settings.rate_half_life_seconds)
        history.recall(self.rates)
        object.__setattr__(self, "_history", history)
        loads = defaultdict[tuple[str, str], list[float]](list)
        for beat in self.beats.values():
            for each in {weights_of(each.model): each for each in ready(beat.models)}.values():
                loads[weights_of(each.model), kind_of(beat)].append(each.load_seconds)
        object.__setattr__(self, "_loads", dict(loads))

    def kinds(self) -> list[DeviceKind]:
        """Return the kinds of live workers, of those that are remembered, and those with a bound.

        The price of a kind is the mean of its live workers', or else that of the one seen last.
        """
        bounds = self.settings.advice_workers_max
        prices = defaultdict[str, list[float]](list)
        for beat in self.beats.values():
            prices[kind_of(beat)].append(price_of(beat))
        live = {kind: len(known) for kind, known in prices.items()}
        for rate in sorted(self.rates.values(), key=lambda rate: -rate.updated):
            if rate.kind and rate.kind not in prices:
                prices[rate.kind] = [rate.cost_per_hour]
        return [
            DeviceKind(
                name, fmean(prices.get(name, [0.0])), live.get(name, 0), bounds.get(name, math.inf)
            )
            for name in sorted({*prices, *bounds})
        ]

    def of(self, model: str, length: int) -> dict[str, KindSpeed]:
        """Return how fast kinds are with chunks of a length class: the mean of live workers.

        Without any it is that of the ten seen last. Kinds of which nobody knows it are left out.

        Args:
            model: Key of the model.
            length: Length class of the chunks; where it is not known, the nearest one counts.
        """
        live = defaultdict[str, list[float]](list)
        gone = defaultdict[str, list[Rate]](list)
        for worker, rate in self._history.rates(model, length).items():
            beat = self.beats.get(worker)
            if beat is not None:
                live[kind_of(beat)].append(rate.tokens_per_second)
            elif rate.kind:
                gone[rate.kind].append(rate)
        for kind in gone.keys() - live.keys():
            newest = sorted(gone[kind], key=lambda rate: -rate.updated)[:RATES_MAX]
            live[kind] = [rate.tokens_per_second for rate in newest]
        return {kind: self._speed(model, kind, fmean(rates)) for kind, rates in live.items()}

    def _speed(self, model: str, kind: str, rate: float) -> KindSpeed:
        """Return the speed of a kind; a load that nobody knows takes as long as a start."""
        loads = self._loads.get((weights_of(model), kind), [])
        count = self.counts.get(name_of(model), ModelCounts())
        usual = count.load_seconds / count.loads if count.loads else None
        if usual is None:
            usual = self.settings.advice_start_seconds
        return KindSpeed(rate, fmean(loads) if loads else usual, len(loads))

    def models(self) -> list[tuple[str, int]]:
        """Return models with remembered rates, each with a length class, the one used last first.

        At most 200 of them, so that a list of all models is short.
        """
        newest = sorted(self.rates.items(), key=lambda item: -item[1].updated)
        found = dict[str, int]()
        for key, _ in newest:
            model, _, length = key.partition("|")[2].rpartition("|")
            found.setdefault(model, int(length))
        return list(found.items())[:MODELS_MAX]


def name_of(model: str) -> str:
    """Return the name of the model of a key, as jobs have it."""
    return model.partition("|")[0]


def read_advice(farm: FarmClient, settings: Settings) -> Advice:
    """Return the advice for a farm as it is now, by the `advice_…` settings.

    Raises:
        redis.ConnectionError, redis.TimeoutError: The server is away.
    """
    seconds, microseconds = farm.client.time()
    now = seconds + microseconds / 1e6
    waiting = _read_waiting(farm, settings)
    beats = {beat.worker: beat for beat in farm.workers() if beat.state != "draining"}
    known = KnownSpeeds(beats, farm.statistics.history(), farm.model_counts.all(), settings)
    within = settings.advice_within_seconds
    waits = {(due.model, due.length) for due in waiting.tokens}
    busy = {model for model, _ in waits}
    idle = [(model, length) for model, length in known.models() if model not in busy]
    speeds = {each: known.of(*each) for each in (*waits, *idle)}
    works = [
        DueWork(
            name_of(due.model),
            tokens,
            due.deadline_ms / 1000 - now if due.deadline_ms else within,
            speeds[due.model, due.length],
        )
        for due, tokens in waiting.tokens.items()
    ]
    works += [DueWork(name_of(model), 0, within, speeds[model, length]) for model, length in idle]
    return advise(
        sorted(works, key=lambda each: (-each.tokens, each.model)),
        known.kinds(),
        within_seconds=within,
        start_seconds=settings.advice_start_seconds,
        notes=list(waiting.notes),
    )


def _read_waiting(farm: FarmClient, settings: Settings) -> Waiting:
    """Read what waits, in a round trip for each thousand jobs."""
    room, waiting, jobs = FarmWindow(farm.client, settings).seen(), Waiting(), farm.job_ids()
    for place in range(0, len(jobs), STEP):
        some = jobs[place : place + STEP]
        pipe = farm.client.pipeline(transaction=False)
        for job in some:
            pipe.hmget(wire.JobKeys(job).meta, ["spec", *FIELDS])
        for job, answer in zip(some, pipe.execute(raise_on_error=False), strict=True):
            try:
                spec, status = _read_job(answer)
            except JobUnreadable as error:
                farm.on_unreadable(f"job {job}", str(error))
            except JobGone:
                continue
            else:
                _add(waiting, spec, status, held=not has_room(status, settings, room))
    return waiting


def _read_job(answer: Any) -> tuple[JobSpec, JobStatus]:  # noqa: ANN401 # the server's reply, or what went wrong
    """Return a job's specification and status.

    Raises:
        JobGone: There is no such job.
        JobUnreadable: The job's key holds what no program of ours wrote.
    """
    if isinstance(answer, redis.ResponseError) and "WRONGTYPE" in str(answer):
        raise JobUnreadable(str(answer))
    if isinstance(answer, Exception):
        raise answer
    spec, *values = answer
    status = status_from(FIELDS, values)
    if spec is None:
        raise JobGone("the job has no specification")
    try:
        return decode(JobSpec, spec), status
    except RecordError as error:
        raise JobUnreadable(str(error)) from error


def _add(waiting: Waiting, spec: JobSpec, status: JobStatus, *, held: bool) -> None:
    """Count the tokens of a job that wait, or count the job among those that are left out."""
    tokens = 0 if status.embedded else status.tokens_left
    unsent = status.tokens_unsent
    waiting.estimated += status.moving and unsent > 0
    waiting.reading += status.moving and status.chunk_count < 0 and not status.chunks_expected
    if status.state == "paused":
        waiting.paused += tokens > 0
    elif status.moving and held:
        waiting.held += tokens > 0
    elif status.moving and tokens:
        length = length_class(status.chunk_tokens_mean)
        waiting.tokens[DueTokens(model_key(spec), length, status.deadline_ms)] += tokens + unsent
