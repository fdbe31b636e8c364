"""Test of the short form of `make chaos`: a model that costs nothing, and cheap faults."""

from pathlib import Path

import pytest

from tests.chaos.faults import CHEAP, SHORT
from tests.chaos.run import Chaos, Orders
from tests.farm.harness import texts_of

RECOVERY_SECONDS_MAX = 20.0
SEED = 74  # with it faults of corpora, ids, disks and `ingest`'s children come early


@pytest.mark.slow  # half a minute; every fault of it is tried in the simulation, or by itself
@pytest.mark.alone
def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """Every job ends complete with the vectors of a quiet run, soon after each fault."""
    orders = Orders(
        model="null:16:10000",
        texts=list(texts_of(2_000)),
        seconds=26,
        every_seconds=0.5,
        faults=CHEAP,
        seed=SEED,
        stretch=SHORT,
        disks=False,
    )
    said: list[str] = []
    outcome = Chaos(orders, tmp_path, said.append).run()
    assert not outcome.problems, said
    assert outcome.lost == outcome.doubled == 0
    assert len(outcome.recoveries) >= len(CHEAP) / 4, said
    assert max(seconds for _, seconds in outcome.recoveries) <= RECOVERY_SECONDS_MAX, said
