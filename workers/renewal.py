"""Leases on the server: kept, found to be lost, and handed back."""

import redis

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.status import is_gone
from embedfarm.workers.leases import Holdings


def lose_ended(farm: FarmClient, holdings: Holdings) -> bool:
    """Mark leases of cancelled and deleted jobs as lost; tell whether there are such jobs."""
    jobs = holdings.jobs()
    ended = farm.ended(jobs) if jobs else set()
    holdings.lose(ended)
    return bool(ended)


def renew(farm: FarmClient, worker: str, holdings: Holdings) -> None:
    """Renew our leases; mark those that are lost, so that the device skips them."""
    for (job, stream), leases in holdings.by_stream().items():
        try:
            lost = farm.job(job).stream.renew(stream, worker, [lease.entry.id for lease in leases])
        except redis.ResponseError as error:
            if not is_gone(error):
                raise
            lost = {lease.entry.id for lease in leases}
        for lease in leases:
            lease.lost = lease.lost or lease.entry.id in lost


def hand_back(farm: FarmClient, worker: str, holdings: Holdings) -> None:
    """Release leases that were not begun; the others are left to expire: they count as tries."""
    for (job, stream), leases in holdings.by_stream().items():
        ids = [lease.entry.id for lease in leases if not lease.tried]
        try:
            farm.job(job).stream.release(stream, worker, ids)
        except redis.ResponseError as error:
            if not is_gone(error):
                raise
