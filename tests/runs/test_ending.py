"""Tests of the end of a job, which the server must know when its command is gone."""

import errno
import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import redis

from embedfarm.collector.manifest import STATE_DIRECTORY, Manifest
from embedfarm.collector.output_directory import locked
from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.runs import ending
from embedfarm.runs.disk_room import with_room
from embedfarm.runs.ending import end_job, tidy
from embedfarm.runs.own_job import JOB_ID_FILE
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
    """A server that lost the end of a job is told it again, even if no error showed its crash."""
    farm = FarmClient(client)
    farm.job("j").create(JobSpec(model="null"), 0)
    end, ends = FarmClient.end, 0

    def end_and_crash(self: FarmClient, *arguments: Any, **counters: Any) -> None:  # noqa: ANN401 # those of `end`
        nonlocal ends
        before = log_bytes(server)
        end(self, *arguments, **counters)
        ends += 1
        if ends == 1:
            crash(server, before)
            client.connection_pool.disconnect()

    monkeypatch.setattr(FarmClient, "end", end_and_crash)
    assert end_job(farm, MANIFEST, "", Settings())
    assert ends == 2
    assert farm.job("j").status().state == "finished"
    keys = wire.JobKeys("j")
    assert not client.exists(keys.blocks, keys.retry)


def test_what_was_deleted_stays_deleted(client: redis.Redis) -> None:
    """Ending a job that was deleted does nothing, and is no failure."""
    assert end_job(FarmClient(client), MANIFEST, "", Settings())
    assert not client.exists(wire.JobKeys("j").meta)


def test_the_id_of_the_job_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tidying an output removes the job's id last, so that the next run can go on with it."""
    private = tmp_path / STATE_DIRECTORY
    (private / "parts").mkdir(parents=True)
    for number in range(20):  # in whatever order the disk has them, it is not last by chance
        (private / f"file-{number}").touch()
        (private / "parts" / str(number)).touch()
        (tmp_path / JOB_ID_FILE).touch()
    unlink, names = os.unlink, []

    def note(path: str | Path, **options: Any) -> None:  # noqa: ANN401 # those of `unlink`
        names.append(Path(path).name)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", note)
    tidy(tmp_path, MANIFEST, Settings(redis_url=""), threading.Event())
    assert not private.exists()
    assert names[-1] == Path(JOB_ID_FILE).name
    assert len(names) == 42  # with that of the lock


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """A finished output is tidied up when there is room for its lock again."""
    (tmp_path / STATE_DIRECTORY).mkdir()
    (tmp_path / JOB_ID_FILE).touch()
    errors = [OSError(error, os.strerror(error))] * 2

    def lock_if_there_is_room(private: Path) -> AbstractContextManager[None]:
        if errors:
            raise errors.pop()
        return locked(private)

    monkeypatch.setattr(ending, "locked", lock_if_there_is_room)
    tidy(tmp_path, MANIFEST, Settings(redis_url="", full_disk_seconds=0.01), threading.Event())
    assert not errors
    assert not (tmp_path / STATE_DIRECTORY).exists()


def test_a_full_disk_is_not_waited_for_after_stop(tmp_path: Path) -> None:
    """Waiting for room ends by the error of the disk when the program is to stop."""
    stop = threading.Event()
    stop.set()

    def begin() -> None:
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(OSError, match="no space"):
        with_room(begin, tmp_path, 60.0, stop)
