"""Metrics of models: what workers have loaded now, and what all of them have done with each.

No label has more values than models are loaded at a time, or have counters of their own.
"""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from embedfarm.contract.farm_client import model_rows
from embedfarm.contract.model_counts import UNLOADS, ModelCounts
from embedfarm.contract.records import Heartbeat
from embedfarm.web.operations.metric_families import counter, gauge


def resident_metrics(beats: Iterable[Heartbeat]) -> Iterator[Metric]:
    """Yield what each worker has loaded now."""
    rows = [(worker, each.model.partition("|")[0], each) for worker, each in model_rows(beats)]
    states = Tally((worker, model, each.state) for worker, model, each in rows)
    words = "Models that a worker has loaded, is loading, or failed to load, by state."
    counts = {of: float(count) for of, count in states.items()}
    yield gauge("worker_models", words, counts, "worker", "model", "state")
    taken: dict[tuple[str, str], float] = {}
    took: dict[tuple[str, str], float] = {}
    for worker, model, each in rows:
        if each.state == "ready":
            taken[worker, model] = taken.get((worker, model), 0.0) + each.bytes
            took[worker, model] = max(took.get((worker, model), 0.0), each.load_seconds)
    words = "Memory that the weights of a loaded model take on a worker."
    yield gauge("model_bytes", words, taken, "worker", "model")
    yield gauge("model_load_seconds", "Time that its loading took.", took, "worker", "model")


def count_metrics(counts: Mapping[str, ModelCounts]) -> Iterator[Metric]:
    """Yield the counters of models, which a restart of workers does not set back."""
    for name, attribute, words in (
        ("loads", "loads", "Times that workers have loaded a model."),
        (
            "loading_seconds",
            "load_seconds",
            "Seconds that the loading of a model took, all together.",
        ),
        ("requests", "requests", "Interactive requests that were answered with a model."),
        ("texts_full", "texts_full", "Texts that filled what a model takes: longer ones were cut."),
    ):
        values = {(model,): float(getattr(each, attribute)) for model, each in counts.items()}
        yield counter(f"model_{name}", words, values, "model")
    unloads = {
        (model, reason): float(getattr(each, attribute))
        for model, each in counts.items()
        for reason, attribute in UNLOADS.items()
    }
    words = "Times that workers have unloaded a model: to make room, since it was idle, by order."
    yield counter("model_unloads", words, unloads, "model", "reason")
