"""Limits that belong together: proportions that they must keep, and sets of them for a purpose."""

from typing import Final

MEBIBYTE: Final = 1 << 20
GIBIBYTE: Final = 1 << 30
PROPORTIONS: Final = (
    # Results leave the server part by part: with room for less than the part that is being made and
    # the one that follows, the farm would wait for its collector, and the collector for the farm.
    ("part_bytes_max", 2, "window_bytes_max"),
    # So does the room for what is stored past the server.
    ("part_bytes_max", 2, "stored_bytes_max"),
    # Workers stop at the results limit, and a producer that fills its window must not reach it.
    ("window_bytes_max", 1, "results_bytes_max"),
    # Leases are renewed between heartbeats, and a worker must outlive a heartbeat that is late.
    ("heartbeat_seconds", 3, "lease_seconds"),
    ("heartbeat_seconds", 2, "heartbeat_ttl_seconds"),
)
PROFILES: Final[dict[str, dict[str, float]]] = {
    # Fewer and longer leases; requests wait for longer device batches.
    "high-throughput": {"micro_batch_seconds_max": 10.0, "lane_batch_seconds": 0.25},
    # Whoever comes is served sooner, at the price of more overhead.
    "low-latency": {"micro_batch_seconds_max": 1.0, "lane_batch_seconds": 0.05},
    # A quarter of the memory of the usual limits, on the server and in each process.
    "memory-constrained": {
        "window_bytes_max": 20 * MEBIBYTE,
        "results_bytes_max": 32 * MEBIBYTE,
        "part_bytes_max": 6 * MEBIBYTE,
        "micro_batch_bytes_max": MEBIBYTE,
        "redis_bytes_max": 256 * MEBIBYTE,
    },
}
