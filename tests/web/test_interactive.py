"""Tests of the places in which interactive requests wait."""

import asyncio
import threading

import pytest
import redis
from fastapi import HTTPException

from embedfarm.contract.lane import Lane
from embedfarm.web.interactive import InteractiveRequests


@pytest.mark.parametrize(("places", "most"), [(1, 1), (8, 7), (256, 224)])
def test_one_model_leaves_places_for_others(places: int, most: int) -> None:
    """Requests that wait for one model in vain turn none for another one away while one fits."""
    interactive = InteractiveRequests(Lane(redis.Redis()), places)  # which is not asked
    loaded = threading.Event()

    async def fill() -> None:
        waiting = [
            asyncio.create_task(interactive.run(lambda: loaded.wait(60), "cold"))
            for _ in range(2 * places)
        ]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)  # by the first refusal
        assert interactive.waiting == {"cold": most}
        if most < places:
            assert await interactive.run(lambda: "done", "warm") == "done"
        loaded.set()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        refused = [each for each in answers if isinstance(each, HTTPException)]
        assert len(refused) == 2 * places - most
        assert {each.status_code for each in refused} == {429}
        assert not interactive.waiting

    asyncio.run(fill())
