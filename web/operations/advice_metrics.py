"""Metrics of the advice: backlog in seconds of one worker, and advised workers, by model.

No label has more values than models have work, 200 models that had some lately, and kinds.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from prometheus_client.core import Metric

from embedfarm.contract.pace import Range
from embedfarm.watch.advised_workers import Advice
from embedfarm.web.operations.metric_families import gauge

MODELS_MAX: Final = 200  # with the largest backlogs


def backlog_metric(whole: Range | None, advice: Advice | None) -> Metric:
    """Return how long the backlog takes: all of it on the farm, and each model's on one worker.

    Args:
        whole: Least and most time for all of it, with the workers that there are; None if nobody
            can tell.
        advice: Backlogs by model; None for a tenant, who sees the farm's speed only.
    """
    values = dict[tuple[str, str], float]()
    if whole is not None:
        values |= {("least", ""): whole.low, ("most", ""): whole.high}
    if advice is not None:
        models = islice(advice.models.items(), MODELS_MAX)
        values |= {("one_worker", name): each.backlog_seconds for name, each in models}
    words = (
        "Seconds that the backlog takes: all of it by the fastest and the slowest rate of late, "
        "and a model's on one worker of the slowest kind that is known."
    )
    return gauge("backlog_seconds", words, values, "estimate", "model")


def advised_metrics(advice: Advice) -> Iterator[Metric]:
    """Yield the advised workers by model and kind; the sum over models is what a kind needs."""
    values = {
        (name, kind): float(each.workers_advised)
        for name, model in islice(advice.models.items(), MODELS_MAX)
        for kind, each in model.kinds.items()
    }
    words = "Workers of a kind that are advised for a model; see GET /v1/advice for the reasons."
    yield gauge("workers_advised", words, values, "model", "kind")
