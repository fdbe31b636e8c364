"""Trial run: how fast the workers here are, by embedding a sample for some seconds."""

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from embedfarm.contract.broker import closing_client
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.formatting import HOUR
from embedfarm.contract.records import Completion, Heartbeat
from embedfarm.contract.settings import Settings
from embedfarm.runs.place import Place
from embedfarm.runs.private_farm import LocalFarm, run_local_farm
from embedfarm.runs.request import Request
from embedfarm.runs.run import Run
from embedfarm.runs.run_failures import Interrupted
from embedfarm.watch.corpus_sample import CorpusSample
from embedfarm.workers.device_groups import choose_devices

SECONDS_MAX: Final = 9.0  # of embedding, from the first result on
START_SECONDS_MAX: Final = 120.0  # for all workers of a large host
POLL_SECONDS: Final = 0.2


class ForecastError(EmbedfarmError, ValueError):
    """Raised when nothing can be said about a job; the message says why."""

    exit_status = 2


class WorkerPace(NamedTuple):
    """How fast a worker embeds, and what that takes.

    Attributes:
        tokens_per_second: Estimated tokens in a second.
        device_seconds: Seconds of its devices for an estimated token.
        cost: Cost of an estimated token.
        batches: Tokens and seconds of each micro-batch that this comes from; empty where that is
            not known.
    """

    tokens_per_second: float
    device_seconds: float
    cost: float
    batches: Sequence[tuple[float, float]] = ()


class TimedCompletion(NamedTuple):
    """A micro-batch that was done, and the monotonic time at which that was heard."""

    heard: float
    done: Completion


def calibrate(
    request: Request, sample: CorpusSample, settings: Settings, devices: str, cpu_workers: int
) -> list[WorkerPace]:
    """Measure the workers here, by embedding a sample on a farm of its own for some seconds.

    Raises:
        ForecastError: The workers did not start, or embedded nothing.
        EmbedfarmError: The sample cannot be embedded as the job asks for.
    """
    settings = settings.model_copy(update={"vector_cache_directory": None})  # is no speed
    workers = len(choose_devices(devices, cpu_workers, settings))
    with TemporaryDirectory(prefix="embedfarm-plan-") as name:
        corpus = Path(name) / "sample.jsonl"
        with corpus.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in sample.texts)
        with run_local_farm(Path(name) / "farm", settings, devices, cpu_workers) as farm:
            _await_workers(farm, workers)
            here = settings.model_copy(update={"redis_url": farm.url})
            place = Place(Path(name) / "out", here, devices, cpu_workers)
            heard, beats = _embed(
                Run(request.of_texts(corpus, "text", ()), place, _show_nothing, threading.Event())
            )
    if not heard:
        raise ForecastError("nothing of a sample was embedded")
    return paces_of(heard, beats, sample)


def _show_nothing(*_news: object) -> None:
    """Take the news of a run, and show nothing of it."""


def _embed(run: Run) -> tuple[list[TimedCompletion], list[Heartbeat]]:
    """Run until `SECONDS_MAX` after its first result, and return what workers did meanwhile."""
    errors: list[BaseException] = []
    heard: list[TimedCompletion] = []

    def embed() -> None:
        try:
            run.embed()
        except Interrupted:
            pass
        except BaseException as error:  # noqa: BLE001 # raised below
            errors.append(error)

    thread = threading.Thread(target=embed, name="calibration", daemon=True)
    thread.start()
    with closing_client(run.place.settings.redis_url) as client:
        farm, last = FarmClient(client), "0"
        while not heard or time.monotonic() < heard[0].heard + SECONDS_MAX:
            alive = thread.is_alive()
            last, new = farm.statistics.events(last, POLL_SECONDS)
            now = time.monotonic()
            heard += [TimedCompletion(now, done) for done in new]
            if not alive:
                break
        beats = farm.workers()
        run.stop.set()
        thread.join()
    for error in errors:
        raise error
    return heard, beats


def paces_of(
    heard: Sequence[TimedCompletion], beats: Sequence[Heartbeat], sample: CorpusSample
) -> list[WorkerPace]:
    """Return the pace of each worker, in the estimated tokens of the sample's corpus.

    A worker's first micro-batch is left out, if there are others: it warms up. No worker is faster
    than it was by the clock from its first result to its last: what it waits for counts as well.
    """
    done = [each.done for each in heard]
    chunks = sum(each.chunks for each in done)
    estimated = int(sample.lengths[sample.indices[:chunks]].sum())
    ratio = estimated / max(1, sum(each.real_tokens for each in done))
    by_worker: defaultdict[str, list[TimedCompletion]] = defaultdict(list)
    for each in heard:
        by_worker[each.done.worker].append(each)
    known = {beat.worker: beat for beat in beats}
    return [_pace(of, known.get(worker), ratio) for worker, of in sorted(by_worker.items())]


def _pace(heard: Sequence[TimedCompletion], beat: Heartbeat | None, ratio: float) -> WorkerPace:
    done = [each.done for each in heard if not each.done.first] or [each.done for each in heard]
    batches = [(ratio * each.real_tokens, each.seconds) for each in done]
    tokens = sum(tokens for tokens, _ in batches)
    devices = 1 if beat is None else beat.devices
    worked = devices * sum(each.seconds - each.overhead_seconds for each in done) / tokens
    price = 0.0 if beat is None else beat.device_cost_per_hour
    speed = min(tokens / sum(seconds for _, seconds in batches), _by_the_clock(heard, ratio))
    return WorkerPace(speed, worked, worked / HOUR * price, batches)


def _by_the_clock(heard: Sequence[TimedCompletion], ratio: float) -> float:
    """Return tokens per second from the first to the last result; infinite if that is short."""
    seconds = heard[-1].heard - heard[0].heard
    if seconds < SECONDS_MAX / 3:
        return math.inf
    return ratio * sum(each.done.real_tokens for each in heard[1:]) / seconds


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
