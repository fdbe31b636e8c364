"""How long a job will take, and what it will cost, before it is run: `embedfarm embed --plan`."""

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient, length_class
from embedfarm.contract.formatting import HOUR
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.settings import Settings
from embedfarm.contract.spending import Estimate
from embedfarm.runs.request import Request
from embedfarm.scheduler.history import History
from embedfarm.scheduler.policies import DEFAULT_POLICY
from embedfarm.scheduler.simulation.scenario import PAIRS_TOKENS, Machine, Scenario, Work
from embedfarm.scheduler.simulation.suite import simulate
from embedfarm.watch.corpus_sample import take_sample
from embedfarm.watch.trial_run import ForecastError, WorkerPace, calibrate

SEEDS: Final = 20
SIMULATED_SECONDS: Final = 60.0  # of a job; the rest of a longer one goes at the same speed
SIMULATED_CHUNKS: Final = 10_000
SPREAD_MIN: Final = 0.05  # that a range has at least, to both sides
HISTORY_SPREAD: Final = 0.1  # sigma of what is remembered, when the work is done
CHUNK_TOKENS: Final = 100.0  # of a chunk, where nothing is said about it

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forecast:
    """Forecast of how long a job will take, and what it will cost.

    Attributes:
        chunks: Chunks in the corpus.
        tokens: Tokens in the corpus, after cutting what is too long.
        workers: Number of workers that share the job.
        tokens_per_second: Speed of all workers together.
        source: Where the speed is from: "history" or "calibration".
        seconds: Median of the simulated makespans.
        seconds_p5: 5th percentile of the simulated makespans.
        seconds_p95: 95th percentile of the simulated makespans.
        device_hours: Hours of single devices that the results will take.
        cost: What these cost, by the prices of the workers; 0 without any.
    """

    chunks: int
    tokens: int
    workers: int
    tokens_per_second: float
    source: str
    seconds: float
    seconds_p5: float
    seconds_p95: float
    device_hours: float
    cost: float

    @property
    def estimate(self) -> Estimate:
        """What is kept with the job, to be shown beside what it took."""
        return Estimate(self.seconds_p5, self.seconds_p95, self.device_hours, self.cost)


def forecast(request: Request, settings: Settings, devices: str, cpu_workers: int) -> Forecast:
    """Forecast how long a request will take on a farm that has nothing else to do.

    The speed of the workers is what the farm at `redis_url` remembers; without a farm, or where
    it does not know the model, the devices here embed a sample for some seconds first.

    Raises:
        ForecastError: There is nothing to go by.
        CorpusError: The corpus cannot be read.
    """
    if "-" in request.sources:
        raise ForecastError("standard input can be read once only: put it into a file to plan it")
    sample = take_sample(request, settings)
    if not len(sample.lengths):
        raise ForecastError("the corpus has no chunks")
    tokens = int(sample.lengths.sum())
    paces, source = _known_paces(request.spec, settings, tokens / len(sample.lengths)), "history"
    if not paces:
        paces, source = calibrate(request, sample, settings, devices, cpu_workers), "calibration"
    every = max(1, len(sample.lengths) // SIMULATED_CHUNKS)
    lengths = [int(each) for each in sample.lengths[::every]]
    ran = [_makespan(paces, tokens, lengths, settings, seed) for seed in range(SEEDS)]
    seconds = statistics.median(ran)
    least, most = (float(np.percentile(ran, share)) for share in (5, 95))
    speed = sum(each.tokens_per_second for each in paces)
    shares = [(tokens * each.tokens_per_second / speed, each) for each in paces]
    return Forecast(
        chunks=len(sample.lengths),
        tokens=tokens,
        workers=len(paces),
        tokens_per_second=speed,
        source=source,
        seconds=seconds,
        seconds_p5=min(least, seconds * (1 - SPREAD_MIN)),
        seconds_p95=max(most, seconds * (1 + SPREAD_MIN)),
        device_hours=sum(share * each.device_seconds for share, each in shares) / HOUR,
        cost=sum(share * each.cost for share, each in shares),
    )


def _makespan(
    paces: Sequence[WorkerPace],
    tokens: int,
    lengths: Sequence[int],
    settings: Settings,
    seed: int,
) -> float:
    """Simulate a job once, with speeds as they might have been measured as well."""
    random = np.random.default_rng(seed)
    speeds = [_draw(each, random) for each in paces]
    seconds = tokens / sum(speeds)
    simulated = min(seconds, SIMULATED_SECONDS)
    # The speeds are of chunks of these lengths, attention included.
    slower = 1 + sum(each**2 for each in lengths) / sum(lengths) / PAIRS_TOKENS
    machines = tuple(Machine(speed * slower) for speed in speeds)
    work = (Work(simulated, lengths=lengths),)
    scenario = Scenario("plan", "the corpus", machines, work, history_error=0.0)
    # What a micro-batch costs by itself is part of the speeds.
    scenario = replace(scenario, overhead_seconds=0.0)
    return seconds - simulated + simulate(scenario, DEFAULT_POLICY, settings, seed).makespan


def _draw(pace: WorkerPace, random: np.random.Generator) -> float:
    """Draw a speed: by some of the micro-batches that were measured, in place of all of them."""
    if not pace.batches:
        return float(pace.tokens_per_second * random.lognormal(0, HISTORY_SPREAD))
    batches = np.asarray(pace.batches)
    drawn = batches[random.integers(0, len(batches), len(batches))].sum(axis=0)
    whole = batches.sum(axis=0)
    return float(pace.tokens_per_second * (drawn[0] / drawn[1]) / (whole[0] / whole[1]))


def _known_paces(spec: JobSpec, settings: Settings, chunk_tokens: float) -> list[WorkerPace]:
    """Return the paces that the farm remembers; none without a farm."""
    if not settings.redis_url:
        return []
    try:
        with closing_client(settings.redis_url) as client:
            half_life = settings.rate_half_life_seconds
            return remembered_paces(FarmClient(client), spec, half_life, chunk_tokens)
    except ForecastError as error:
        log.warning("%s: a sample is embedded here", error)
        return []


def remembered_paces(
    farm: FarmClient, spec: JobSpec, half_life_seconds: float, chunk_tokens: float
) -> list[WorkerPace]:
    """Return the paces of a farm's live workers, or of all it remembers if none is alive.

    Args:
        farm: The farm.
        spec: Spec of the job, which has the model.
        half_life_seconds: Setting `rate_half_life_seconds`.
        chunk_tokens: Mean length of chunks; the rate is that of their class, or the nearest known.

    Raises:
        ForecastError: No such worker has embedded anything with the model.
    """
    return [
        WorkerPace(
            speed,
            beat.devices / speed if beat else 1 / speed,
            (beat.devices * beat.device_cost_per_hour if beat else 0.0) / HOUR / speed,
        )
        for speed, beat in _remembered(farm, spec, half_life_seconds, chunk_tokens)
    ]


def remembered_speeds(
    spec: JobSpec, settings: Settings, chunk_tokens: float = CHUNK_TOKENS
) -> list[float]:
    """Return tokens/s of a farm's live workers, or of all it remembers if none is alive.

    Args:
        spec: Spec of the job, which has the model.
        settings: Settings, which have the URL of the farm.
        chunk_tokens: Mean length of chunks; the rate is that of their class, or the nearest known.

    Raises:
        ForecastError: No such worker has embedded anything with the model.
    """
    with closing_client(settings.redis_url) as client:
        half_life = settings.rate_half_life_seconds
        found = _remembered(FarmClient(client), spec, half_life, chunk_tokens)
    return [speed for speed, _ in found]


def _remembered(
    farm: FarmClient, spec: JobSpec, half_life_seconds: float, chunk_tokens: float
) -> list[tuple[float, Heartbeat | None]]:
    history = History(half_life_seconds)
    history.recall(farm.statistics.history())
    alive = {beat.worker: beat for beat in farm.workers() if beat.state != "draining"}
    rates = history.rates(model_key(spec), length_class(chunk_tokens))
    found = [
        (rate.tokens_per_second, alive.get(name))
        for name, rate in rates.items()
        if not alive or name in alive
    ]
    if not found:
        raise ForecastError(f"no worker of the farm has embedded anything with {spec.model} yet")
    return found
