"""Limits on what is leased, pushed and kept, the same for a scheduler and a worker without one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus

KNOWN_BYTES: Final = 128  # what a process that collects keeps of a chunk: digest, place, id
BYTES_PER_TOKEN: Final = 4  # of English in the tokenizers in use
VECTOR_BYTES_GUESSED: Final = 4096  # while no result of the job has said it
# Results that any job may have, whatever others hold: one that its collector keeps for the next
# part, and one to go on with.
RESULT_BYTES_SPARE: Final = 2 << 20


@dataclass(frozen=True)
class FarmRoom:
    """Usage of the farm's window, which all jobs share.

    Attributes:
        bytes_max: Size of the window; 0 if nobody knows it.
        used_bytes: Bytes of texts, of vectors to come, and of results, of all jobs.
        result_bytes: Bytes of results among the used ones.
        refusing: Whether producers have waited for room in the last two seconds.
        share: Fair share, in bytes, of a job whose tenant has nothing on the server.
        shares: Fair share, in bytes, of one job of each other tenant.
    """

    bytes_max: int = 0
    used_bytes: int = 0
    result_bytes: int = 0
    refusing: bool = False
    share: int = 0
    shares: Mapping[str, int] = field(default_factory=dict)

    @property
    def full_of_results(self) -> bool:
        """Whether results fill 1.5 times the window, which our own producers never let happen."""
        return 0 < self.bytes_max <= self.result_bytes * 2 // 3

    @property
    def short(self) -> bool:
        """Whether producers wait for room, or results overfill the window."""
        return self.refusing or self.full_of_results


ROOMY: Final = FarmRoom()


def blocks_for(tokens: float, status: JobStatus, settings: Settings) -> int:
    """Return how many stream entries hold about `tokens`: at least 1, within the limit on text.

    The text of blocks that only refer to it is estimated from its tokens.
    """
    mean = status.block_tokens_mean
    by_tokens = round(tokens / mean)
    text_bytes = max(1.0, status.block_bytes_mean, BYTES_PER_TOKEN * mean)
    by_bytes = int(settings.micro_batch_bytes_max // text_bytes)
    return max(1, min(by_tokens, by_bytes))


def used_bytes(status: JobStatus, vector_bytes: int) -> int:
    """Return the bytes that a job takes of a window: waiting texts, their vectors, and results.

    Chunks whose vectors are known have no vector on the server; who collects keeps a little of
    each until its turn comes.
    """
    known = max(0, status.known_in - status.known_done)
    vectors = status.chunks_to_embed * vector_bytes
    texts = status.bytes_in - status.bytes_done
    return max(0, texts + vectors + known * KNOWN_BYTES + status.result_bytes)


def results_free(settings: Settings, farm: FarmRoom = ROOMY) -> int:
    """Return the bytes of results below which every job has room, whatever its share."""
    most = settings.results_bytes_max
    return min(most, RESULT_BYTES_SPARE) if farm.full_of_results else most


def has_room(status: JobStatus, settings: Settings, farm: FarmRoom = ROOMY) -> bool:
    """Tell whether results are collected fast enough for more work to be leased.

    Where results of all jobs overfill the farm's window, each may have its fair share. What was
    lost and sent again is leased in any case: the collector may wait for it.
    """
    if status.result_bytes < results_free(settings, farm):
        return True
    if status.drained_upto < status.refilled_upto:
        return True
    share = farm.shares.get(status.tenant, farm.share) if farm.full_of_results else 0
    return status.result_bytes < min(share, settings.results_bytes_max)
