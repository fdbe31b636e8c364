"""Tests of what the backlog of a farm leaves out."""

import pytest
import redis

from embedfarm.contract.backlog import read_backlogs
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.unreadable_records import read_words


def test_jobs_that_cannot_be_read(client: redis.Redis) -> None:
    """A job that is gone is left out, and so is one whose blocks are none, which is reported."""
    farm = FarmClient(client)
    for name in ("right", "wrong"):
        farm.job(name).create(JobSpec(model="null:8"), 0)
    wrong = farm.job("wrong").keys.blocks
    client.delete(wrong)
    client.set(wrong, "of another program")
    reported: list[str] = []
    found = read_backlogs(
        client, ["right", "gone", "wrong"], lambda place, _reason: reported.append(place)
    )
    assert [each.job for each in found] == ["right"]
    assert reported == ["job wrong"]


@pytest.mark.parametrize("data", [b"", b"\xff", b"[1]", b'{"a": 1}', b"[" * 100_000])
def test_words_that_cannot_be_read(data: bytes) -> None:
    """What is no JSON of words is reported with its place, and taken for none."""
    reported: list[str] = []
    assert not read_words(data, "here", lambda place, _reason: reported.append(place))
    assert reported == ["here"]
