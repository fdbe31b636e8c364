"""Metrics of the farm's server: its memory, and the window that jobs fill of it."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from embedfarm.contract.sizing import FarmRoom
from embedfarm.watch.view import FarmView
from embedfarm.web.operations.metric_families import gauge


def server_metrics(view: FarmView, room: FarmRoom) -> Iterator[Metric]:
    """Yield what the server's memory holds and may hold, and the same of the window of all jobs."""
    used, most = {(): float(view.memory_used_bytes)}, {(): float(view.memory_bytes_max)}
    yield gauge("server_memory_used_bytes", "Memory that the server uses.", used)
    yield gauge("server_memory_limit_bytes", "Memory that it may use; 0: no limit.", most)
    if room.bytes_max:
        words = (
            "Text and vectors of all jobs in the server, those to come of what was sent included."
        )
        yield gauge("window_used_bytes", words, {(): float(room.used_bytes)})
        words = "Most of that, beyond which producers wait."
        yield gauge("window_limit_bytes", words, {(): float(room.bytes_max)})
