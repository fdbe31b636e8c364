"""How many blocks make a micro-batch; the scheduler and a worker without one use the same rule."""

from embedfarm.settings import Settings
from embedfarm.status import JobStatus


def blocks_for(tokens: float, status: JobStatus, settings: Settings) -> int:
    """Stream entries that hold about `tokens` tokens, at least 1, within the limit on text."""
    by_tokens = round(tokens / status.block_tokens_mean)
    by_bytes = int(settings.micro_batch_bytes_max // max(1.0, status.block_bytes_mean))
    return max(1, min(by_tokens, by_bytes))


def has_room(status: JobStatus, settings: Settings) -> bool:
    """Whether results are collected fast enough for more work to be leased.

    What was lost and sent again is leased in any case: it may be what the collector waits for.
    """
    refilled = status.drained_upto < status.refilled_upto
    return refilled or status.result_bytes < settings.results_bytes_max
