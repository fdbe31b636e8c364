"""Tests of commits whose vectors are stored past the server, on a real one."""

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from numpy.typing import NDArray

from embedfarm.collector.stored_vectors import StoredVectors
from embedfarm.contract import block_stream
from embedfarm.contract.block_stream import Commit
from embedfarm.contract.encoding import decode, encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, Result
from embedfarm.contract.settings import Settings
from embedfarm.contract.stored_results import LocalFiles
from embedfarm.workers import result_storage
from embedfarm.workers.commit import Committer
from embedfarm.workers.embedder import Embedder
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.job_engines import JobEngines
from embedfarm.workers.leases import Holdings, Lease, MicroBatch
from embedfarm.workers.model_store import ModelStore
from embedfarm.workers.watchdog import Watchdog
from tests.workers.support import NULL, block_of, micro_batch, null_vectors, results


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """A farm on the test's server."""
    return FarmClient(client)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory for the vectors of a job."""
    directory = tmp_path / "place"
    directory.mkdir()
    return directory


def committer_on(farm: FarmClient, refused: list[str]) -> Committer:
    """A third stage on a farm, which notes which jobs it refuses, and why."""
    committer = Committer(farm, "w", Holdings(), Settings(), threading.Event(), "1", "a kind")
    committer.refuse = lambda job, reason: refused.append(f"{job}: {reason}")
    return committer


def make(farm: FarmClient, name: str, stored: object, blocks: Sequence[Block]) -> Job:
    """A closed job with these blocks, whose vectors are stored in a place."""
    job = farm.job(name)
    job.create(JobSpec(model=NULL, stored=str(stored)), 0)
    job.push([(block, encode(block)) for block in blocks])
    job.close(sum(block.count for block in blocks))
    return job


def lease_all(stored: object, *jobs: Job) -> MicroBatch:
    """All blocks of some jobs, leased by worker w in one micro-batch."""
    engine, leases, blocks = NullEngine.open(JobSpec(model=NULL)), list[Lease](), list[Block]()
    for job in jobs:
        for entry in job.stream.read("w", 1000):
            block = decode(Block, entry.data)
            place = str(stored) if job.spec().stored else ""
            leases.append(Lease(job.id, entry, block, stored=place))
            blocks.append(block)
    return micro_batch(blocks, engine, JobSpec(model=NULL), leases)


def commit(committer: Committer, batch: MicroBatch) -> None:
    """Embed and store a micro-batch."""
    committer.holdings.add(batch.leases)
    committer.commit(batch, Embedder().embed(batch))


def vectors_of(job: Job, place: Path) -> NDArray[np.float32]:
    """The vectors of all results in order, those that are stored by their receipts."""
    stored = StoredVectors(LocalFiles(place), threading.Event(), lambda _: None)
    return np.concatenate([stored.fill(each).matrix() for each in results(job)])


BLOCKS = [block_of(0, 3), block_of(3, 5), block_of(8, 2)]
WANTED = null_vectors([text for block in BLOCKS for text in block.texts])


def test_receipts_pass_the_server_and_vectors_do_not(farm: FarmClient, place: Path) -> None:
    """A micro-batch is one file of all its blocks, which are counted as they always are."""
    job = make(farm, "j", place, BLOCKS)
    commit(committer_on(farm, []), lease_all(place, job))
    assert len(list(place.iterdir())) == 1
    assert [len(each.vectors) for each in results(job)] == [0, 0, 0]
    assert np.array_equal(vectors_of(job, place), WANTED)
    status = job.status()
    assert (status.chunks_done, status.blocks_done, status.vector_bytes) == (10, 3, 32)
    assert status.receipt_bytes > 0
    assert status.result_bytes < 10 * status.receipt_bytes
    assert status.stored_bytes == 320


def test_jobs_of_one_micro_batch_have_their_own_files(farm: FarmClient, place: Path) -> None:
    """Each of several jobs that are embedded together is stored as it wants to be."""
    jobs = (
        make(farm, "j", place, BLOCKS),
        make(farm, "k", "", BLOCKS),
        make(farm, "l", place, BLOCKS),
    )
    commit(committer_on(farm, []), lease_all(place, *jobs))
    assert len(list(place.iterdir())) == 2
    for job in jobs:
        assert np.array_equal(vectors_of(job, place), WANTED)
    assert [each.receipt for each in results(jobs[1])] == [None] * 3


def test_what_came_too_late_is_taken_back(farm: FarmClient, place: Path) -> None:
    """Once a job is cancelled or gone, a worker leaves no file; of a duplicate it may be needed."""
    for name, end in (("j", Job.cancel), ("k", Job.delete)):
        job = make(farm, name, place, BLOCKS)
        batch = lease_all(place, job)
        end(job)
        commit(committer_on(farm, []), batch)
        assert list(place.iterdir()) == []
    job = make(farm, "l", place, BLOCKS)
    batch = lease_all(place, job)
    commit(committer_on(farm, []), batch)
    commit(committer_on(farm, []), batch)
    assert len(list(place.iterdir())) == 2
    assert np.array_equal(vectors_of(job, place), WANTED)


def test_what_a_lost_answer_has_stored_stays(
    farm: FarmClient, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may have ended with the results of a commit of which its worker heard nothing."""
    job = make(farm, "j", place, BLOCKS)
    batch = lease_all(place, job)
    real, taken = block_stream.commit, list[Result]()

    def lose_the_answer(client: redis.Redis, commits: Sequence[Commit]) -> list[str]:
        real(client, commits)
        taken.extend(results(job))
        farm.end("j", "finished", "", Settings())
        monkeypatch.setattr(block_stream, "commit", real)
        raise redis.ConnectionError("the answer is lost")

    monkeypatch.setattr(block_stream, "commit", lose_the_answer)
    commit(committer_on(farm, []), batch)
    stored = StoredVectors(LocalFiles(place), threading.Event(), lambda _: None)
    assert np.array_equal(np.concatenate([stored.fill(each).matrix() for each in taken]), WANTED)


def test_a_place_that_is_not_here(farm: FarmClient, tmp_path: Path) -> None:
    """A worker that has not mounted the place refuses the job and hands its blocks to others."""
    refused: list[str] = []
    job = make(farm, "j", tmp_path / "gone", BLOCKS)
    commit(committer_on(farm, refused), lease_all(tmp_path / "gone", job))
    (reason,) = refused
    assert "j: its vectors cannot be stored: FileNotFoundError" in reason
    assert results(job) == []
    assert len(job.stream.expired(job.keys.blocks, 3600, 10)) == 3


def test_a_place_that_went_with_its_job(farm: FarmClient, tmp_path: Path) -> None:
    """A job that has ended meanwhile, with its place, is not refused: there is nothing to do."""
    refused: list[str] = []
    job = make(farm, "j", tmp_path / "gone", BLOCKS)
    batch = lease_all(tmp_path / "gone", job)
    farm.end("j", "finished", "", Settings())
    commit(committer_on(farm, refused), batch)
    assert refused == []


def failing(times: int, then: Callable[..., Any]) -> Callable[..., Any]:
    """A function that finds no room so often, and then does what another one does."""
    left = iter(range(times))

    def call(*arguments: object) -> object:
        if next(left, None) is not None:
            raise OSError(errno.ENOSPC, "no room")
        return then(*arguments)

    return call


def test_a_full_storage_is_waited_for(
    farm: FarmClient, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage without room is waited for, and the job says so until there is some."""
    reasons: list[str] = []
    monkeypatch.setattr(result_storage, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(LocalFiles, "put", failing(2, LocalFiles.put))
    note = Job.note

    def say(job: Job, name: str, value: str) -> bytes | None:
        reasons.append(value)
        return note(job, name, value)

    monkeypatch.setattr(Job, "note", say)
    job = make(farm, "j", place, BLOCKS)
    commit(committer_on(farm, []), lease_all(place, job))
    assert reasons == ["waits for its storage: [Errno 28] no room"] * 2 + [""]
    assert np.array_equal(vectors_of(job, place), WANTED)


def test_waiting_for_a_storage_ends(
    farm: FarmClient, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop, or the loss of all leases, ends the waiting, and nothing is committed."""
    monkeypatch.setattr(LocalFiles, "put", failing(1000, LocalFiles.put))
    job = make(farm, "j", place, BLOCKS)
    committer, batch = committer_on(farm, []), lease_all(place, job)
    committer.stop.set()
    commit(committer, batch)
    assert all(lease.lost for lease in batch.leases)
    committer, batch = committer_on(farm, []), lease_all(place, make(farm, "k", place, BLOCKS))

    def lose(*_: object) -> bool:
        for lease in batch.leases:
            lease.lost = True
        return False

    monkeypatch.setattr(threading.Event, "wait", lose)
    commit(committer, batch)
    assert results(job) == []


def test_places_outside_the_roots_are_refused(farm: FarmClient, tmp_path: Path) -> None:
    """A worker prepares a job only if its place is below the roots that its operator allows."""
    settings = Settings(stored_roots=(str(tmp_path / "root"),))
    models = ModelStore(farm, "w", "cpu", settings, Watchdog(settings))
    engines = JobEngines(farm, "w", models)
    make(farm, "j", tmp_path / "root" / "j", BLOCKS)
    make(farm, "k", tmp_path / "other" / "k", BLOCKS)
    assert engines.prepare("j") is not None
    assert engines.prepare("k") is None
    assert "is not below one of stored_roots" in farm.reports.refusals("k")["w"]
