"""The page of workers: the speed of each, how well it was predicted, and where its time goes."""

import statistics
import time
from collections import defaultdict
from functools import partial
from typing import Any, Final, NamedTuple, cast

from fastapi import APIRouter, Request, Response

from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmClient, length_class, model_rows
from embedfarm.contract.records import Completion, Heartbeat, Rate
from embedfarm.contract.unreadable_records import readable
from embedfarm.watch.view import FarmReader
from embedfarm.web.auth.keys import Scope
from embedfarm.web.farm_readers import Reader
from embedfarm.web.pages.page_events import LIVE, answer_live
from embedfarm.web.services import Service, Services, need

PAIRS_MAX: Final = 500  # micro-batches that are compared
CHART_SECONDS: Final = 10
ACTIVITIES: Final = (
    "forward",
    "lane",
    "queue",
)  # of the device: it works for jobs, requests, or waits

router: Final = APIRouter(
    include_in_schema=False, dependencies=[*need(Scope.READ, whole_farm=True), LIVE]
)


class Pair(NamedTuple):
    """Predicted seconds and taken seconds of a micro-batch."""

    worker: str
    predicted: float
    took: float


class Learned(NamedTuple):
    """A learned rate, with its model and the least tokens of the chunks that it is for."""

    model: str
    tokens_least: int
    rate: Rate


class Accuracy(NamedTuple):
    """Quality of the predictions for a worker: count, mean seconds, and median relative error."""

    batches: int
    predicted_mean: float
    took_mean: float
    error: float


@router.get("/workers")
def show_workers(request: Request, services: Service, reader: Reader) -> Response:
    """Show all workers."""
    return answer_live(request, "workers.html", partial(_read, services, reader))


def _read(services: Services, reader: FarmReader) -> dict[str, Any]:
    farm, view = services.farm, reader.read()
    pairs = read_pairs(farm)
    beats = {beat.worker: beat for beat in farm.workers()}
    return {
        "view": view,
        "workers": [(each, beats[each.worker]) for each in view.workers if each.worker in beats],
        "models": model_rows(beats.values()),
        "counts": farm.model_counts.all(),
        "times": {name: where_time_goes(beat) for name, beat in beats.items()},
        "names": {job.job: job.name or job.job for job in view.jobs},
        "learned": read_learned(farm),
        "accuracy": accuracies(pairs),
        "chart_at": int(time.time() // CHART_SECONDS),
    }


def where_time_goes(beat: Heartbeat) -> dict[str, float]:
    """Return the shares of a device's time by activity; nothing before its first work."""
    seconds = {name: beat.where.get(name, 0.0) for name in ACTIVITIES}
    whole = sum(seconds.values())
    return {name: each / whole for name, each in seconds.items()} if seconds["forward"] else {}


def read_learned(farm: FarmClient) -> dict[str, list[Learned]]:
    """Read the rates that were learned, by worker, the shortest chunks first."""
    found: defaultdict[str, list[Learned]] = defaultdict(list)
    for name, rate in sorted(farm.statistics.history().items()):
        worker, _, rest = name.partition("|")
        model, _, size = rest.rpartition("|")
        found[worker].append(Learned(model.partition("|")[0], 1 << int(size), rate))
    for rates in found.values():
        rates.sort(key=lambda each: (each.model, each.tokens_least))
    return dict(found)


def read_pairs(farm: FarmClient) -> list[Pair]:
    """Read the last micro-batches with the seconds that today's rates would predict for them."""
    rates = farm.statistics.history()
    rows = cast("list[Any]", farm.client.xrevrange(wire.EVENTS, count=PAIRS_MAX))
    found = []
    for _, done in readable(Completion, b"done", rows, wire.EVENTS):
        size = length_class(done.tokens / max(1, done.chunks))
        rate = rates.get(f"{done.worker}|{done.model}|{size}")
        if rate is not None and done.tokens:
            found.append(Pair(done.worker, done.tokens / rate.tokens_per_second, done.seconds))
    return found


def accuracies(pairs: list[Pair]) -> dict[str, Accuracy]:
    """Return how good the predictions are, by worker."""
    by_worker: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_worker[pair.worker].append(pair)
    return {
        worker: Accuracy(
            len(own),
            statistics.fmean(each.predicted for each in own),
            statistics.fmean(each.took for each in own),
            statistics.median(abs(each.took / each.predicted - 1) for each in own),
        )
        for worker, own in sorted(by_worker.items())
    }
