"""How long a job will take, before it is run: `embedfarm simulate --plan`."""

import json
import logging
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from embedfarm.contract import model_files
from embedfarm.contract.broker import closing_client
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_client import FarmClient, length_class
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.processes import RUN_MODULE
from embedfarm.contract.settings import Settings
from embedfarm.producer.readers import CorpusOptions, fail_on_bad_row, read_corpus
from embedfarm.runs.private_farm import LocalFarm, run_local_farm
from embedfarm.runs.request import tokenizer_file
from embedfarm.scheduler.history import History
from embedfarm.scheduler.policies import DEFAULT_POLICY
from embedfarm.scheduler.simulation.scenario import PAIRS_TOKENS, Machine, Scenario, Work
from embedfarm.scheduler.simulation.suite import simulate
from embedfarm.workers.device_groups import choose_devices

SEEDS = 20
SAMPLE = 1000  # chunks, to know how many tokens a byte is, and how fast they are embedded
TOKENS_MAX = 512
START_SECONDS_MAX = 120.0  # for all workers of a large host
REMEMBERED_SECONDS_MAX = 20.0
POLL_SECONDS = 0.2
FRAMING = 2  # tokens around a text
CHUNK_TOKENS = 100.0  # of a chunk, where nothing is said about it
BYTES_PER_TOKEN = 4.0  # without a tokenizer

log = logging.getLogger(__name__)


class ForecastError(EmbedfarmError, ValueError):
    """Raised when nothing can be said about a job; the message says why."""

    exit_status = 2


@dataclass(frozen=True)
class Forecast:
    """Forecast of how long a job will take.

    Attributes:
        chunks: Chunks in the corpus.
        tokens: Tokens in the corpus, after cutting what is too long.
        workers: Number of workers that share the job.
        tokens_per_second: Speed of all workers together.
        source: Where the speed is from: "history" or "calibration".
        seconds: Median of the simulated makespans.
        seconds_p95: 95th percentile of the simulated makespans.
        device_hours: Device hours of all workers together.
    """

    chunks: int
    tokens: int
    workers: int
    tokens_per_second: float
    source: str
    seconds: float
    seconds_p95: float
    device_hours: float


def forecast(
    corpus: Sequence[str], spec: JobSpec, settings: Settings, devices: str, cpu_workers: int
) -> Forecast:
    """Forecast how long a corpus will take, by running the job in the simulator.

    The speed of the workers is what the farm at `redis_url` remembers; without a farm, or where
    it does not know the model, the devices here embed a sample first.

    Raises:
        ForecastError: There is nothing to go by.
    """
    lengths = chunk_lengths(corpus, spec, settings)
    mean = sum(lengths) / len(lengths)
    speeds, source = _known_speeds(spec, settings, mean), "history"
    if not speeds:
        speeds, source = _calibrate(corpus, spec, settings, devices, cpu_workers), "calibration"
    # The speeds are of chunks of this length class, or the nearest known one: attention included.
    work = Work(sum(lengths) / sum(speeds), lengths=lengths)
    slower = 1 + sum(each**2 for each in lengths) / sum(lengths) / PAIRS_TOKENS
    machines = tuple(Machine(speed * slower) for speed in speeds)
    scenario = Scenario("plan", "the corpus", machines, (work,), history_error=0.0)
    ran = [simulate(scenario, DEFAULT_POLICY, settings, seed).makespan for seed in range(SEEDS)]
    seconds = statistics.median(ran)
    return Forecast(
        chunks=len(lengths),
        tokens=sum(lengths),
        workers=len(speeds),
        tokens_per_second=sum(speeds),
        source=source,
        seconds=seconds,
        seconds_p95=float(np.percentile(ran, 95)),
        device_hours=seconds * len(speeds) / 3600,
    )


def chunk_lengths(corpus: Sequence[str], spec: JobSpec, settings: Settings) -> list[int]:
    """Estimate the tokens of each chunk of a corpus from its bytes.

    How many bytes a token has is found out from a sample, if the model's tokenizer is at hand.

    Raises:
        ForecastError: The corpus is empty.
    """
    sizes = [len(text.encode()) for text in _texts(corpus, spec, settings)]
    if not sizes:
        raise ForecastError("the corpus has no chunks")
    tokens_max = spec.max_length or TOKENS_MAX
    bytes_per_token = _bytes_per_token(
        list(islice(_texts(corpus, spec, settings), SAMPLE)), spec, settings
    )
    return [min(tokens_max, int(size / bytes_per_token) + FRAMING) for size in sizes]


def _known_speeds(spec: JobSpec, settings: Settings, chunk_tokens: float) -> list[float]:
    """Return the speeds that the farm remembers; none without a farm."""
    try:
        return remembered_speeds(spec, settings, chunk_tokens) if settings.redis_url else []
    except ForecastError as error:
        log.warning("%s: a sample is embedded here", error)
        return []


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
        farm, history = FarmClient(client), History(settings.rate_half_life_seconds)
        history.recall(farm.statistics.history())
        alive = {beat.worker for beat in farm.workers() if beat.state != "draining"}
    rates = history.rates(model_key(spec), length_class(chunk_tokens))
    found = [rate.tokens_per_second for name, rate in rates.items() if not alive or name in alive]
    if not found:
        raise ForecastError(f"no worker of the farm has embedded anything with {spec.model} yet")
    return found


def _texts(corpus: Sequence[str], spec: JobSpec, settings: Settings) -> Iterator[str]:
    options = CorpusOptions(tokenizer_file=tokenizer_file(corpus, spec.model, settings))
    for rows in read_corpus(tuple(corpus), options, fail_on_bad_row):
        yield from rows.texts


def _bytes_per_token(texts: Sequence[str], spec: JobSpec, settings: Settings) -> float:
    """Return the bytes per token of these texts, without the tokens that frame each of them."""
    from tokenizers import Tokenizer  # noqa: PLC0415 # only where it is needed

    if model_files.is_null(spec.model):
        return BYTES_PER_TOKEN
    path = model_files.resolve(spec.model, settings.model_cache) / "tokenizer.json"
    if not path.exists():
        return BYTES_PER_TOKEN
    encoded = Tokenizer.from_file(str(path)).encode_batch_fast(texts, add_special_tokens=False)
    return sum(len(text.encode()) for text in texts) / max(1, sum(len(e.ids) for e in encoded))


def _calibrate(
    corpus: Sequence[str], spec: JobSpec, settings: Settings, devices: str, cpu_workers: int
) -> list[float]:
    """Measure tokens/s of the workers here, by embedding a sample in a farm of its own.

    Raises:
        ForecastError: The workers did not start, or the sample was not embedded.
        ChildError: A process of that farm cannot start.
    """
    workers = len(choose_devices(devices, cpu_workers, settings))
    with tempfile.TemporaryDirectory(prefix="embedfarm-plan-") as name:
        place = Path(name)
        with (place / "sample.jsonl").open("w", encoding="utf-8") as file:
            for text in islice(_texts(corpus, spec, settings), SAMPLE):
                file.write(json.dumps({"text": text}) + "\n")
        with run_local_farm(place / "farm", settings, devices, cpu_workers) as farm:
            _await_workers(farm, workers)
            words = ["embed", str(place / "sample.jsonl"), "--out", str(place / "out")]
            words += ["--redis", farm.url, "--model", spec.model]
            words += ["--max-length", str(spec.max_length)]
            done = subprocess.run(
                [*RUN_MODULE, "embedfarm", *words],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise ForecastError(f"the sample was not embedded: {done.stderr.strip()}")
            here = settings.model_copy(update={"redis_url": farm.url})
            return await_speeds(spec, here, workers)


def _await_workers(farm: LocalFarm, workers: int) -> None:
    """Wait for the workers and the scheduler: a worker that came late would find nothing to do."""
    deadline = time.monotonic() + START_SECONDS_MAX
    with closing_client(farm.url) as client:
        here = FarmClient(client)
        while (there := len(here.workers())) < workers or here.plans.scheduler_stats() is None:
            if farm.failed:
                raise farm.failed
            if time.monotonic() > deadline:
                raise ForecastError(
                    f"{there} of {workers} workers, or no scheduler, after {START_SECONDS_MAX:g} s"
                )
            threading.Event().wait(POLL_SECONDS)


def await_speeds(spec: JobSpec, settings: Settings, workers: int) -> list[float]:
    """Wait until the scheduler has stored the speeds, which it does every other second.

    A worker without any share of the sample has no speed; it is left out in the end, with a
    warning.

    Raises:
        ForecastError: The scheduler has stored nothing in time.
    """
    deadline = time.monotonic() + REMEMBERED_SECONDS_MAX
    while True:
        late = time.monotonic() > deadline
        try:
            speeds = remembered_speeds(spec, settings)
        except ForecastError:
            if late:
                raise
            speeds = []
        if len(speeds) >= workers:
            return speeds
        if late:
            there = f"{len(speeds)} of {workers} workers"
            log.warning("only %s had a share of the sample: the forecast is for these", there)
            return speeds
        threading.Event().wait(POLL_SECONDS)
