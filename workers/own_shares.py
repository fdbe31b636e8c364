"""What a worker may lease while no scheduler plans for it."""

from collections.abc import Callable, Iterator

import redis

from embedfarm.contract import sizing
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.records import JobShare
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone, is_gone
from embedfarm.contract.window import FarmWindow


def own_shares(
    farm: FarmClient, settings: Settings, rate: Callable[[str], float]
) -> Iterator[JobShare]:
    """Yield for each job half of what is there, at most a micro-batch at the worker's own rate.

    Args:
        farm: The farm.
        settings: Its limits.
        rate: Returns the tokens per second that the worker did lately for such a job, 0 if unknown.
    """
    room = FarmWindow(farm.client, settings).look()
    for job in map(farm.job, farm.job_ids()):
        try:
            status = job.status()
            # What a dead worker holds may be what the collector waits for.
            may = sizing.has_room(status, settings, room) or job.stream.has_expired(
                settings.lease_seconds
            )
            limit = rate(job.id) * settings.micro_batch_seconds_max
        except (JobGone, redis.ResponseError) as error:
            if not is_gone(error):
                raise
            continue
        if status.state not in {"open", "closed"} or not may:
            continue
        tokens = min(limit, status.tokens_left / 2)
        yield JobShare(
            job=job.id,
            tokens=int(tokens),
            blocks=sizing.blocks_for(tokens, status, settings),
            open=status.state == "open",
            priority=status.priority,
        )
