"""The end of a job, which the server must know when its command is gone."""

from typing import Any

import pytest
import redis

from collector.manifest import Manifest
from embedfarm import wire
from embedfarm.cli.ending import end_job
from embedfarm.farm import Farm
from embedfarm.records import JobSpec
from embedfarm.settings import Settings
from tests.hash_worker import crash, log_bytes
from tests.support import LiveServer

MANIFEST = Manifest(
    job="j", model="null", fingerprint={}, source={},
    format="npy", dimensions=4, dtype="float32", ids=False,
    count=0, failed=0, tokens=0, errors_sha256="", parts=[], workers={},
)  # fmt: skip


def test_a_server_that_lost_the_end_is_told_again(
    server: LiveServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose crash nobody met as an error, since the client had no connection just then."""
    farm = Farm(client)
    farm.job("j").create(JobSpec(model="null"), 0)
    end, ends = Farm.end, 0

    def end_and_crash(self: Farm, *arguments: Any, **counters: Any) -> None:  # noqa: ANN401 # those of `end`
        nonlocal ends
        before = log_bytes(server)
        end(self, *arguments, **counters)
        ends += 1
        if ends == 1:
            crash(server, before)
            client.connection_pool.disconnect()

    monkeypatch.setattr(Farm, "end", end_and_crash)
    assert end_job(farm, MANIFEST, Settings())
    assert ends == 2
    assert farm.job("j").status().state == "finished"
    keys = wire.JobKeys("j")
    assert not client.exists(keys.blocks, keys.retry)


def test_what_was_deleted_stays_deleted(client: redis.Redis) -> None:
    """There is nothing to end, and that is no failure."""
    assert end_job(Farm(client), MANIFEST, Settings())
    assert not client.exists(wire.JobKeys("j").meta)
