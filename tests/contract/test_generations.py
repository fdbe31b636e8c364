"""Tests of owners and generations of a job: who comes late or from elsewhere changes nothing."""

import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.coverage import reconcile
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import Job, JobTaken
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from tests.contract.little_job import SPEC, block, embed, make_job, push


def test_a_late_commit_does_not_reach_the_next_generation(client: redis.Redis) -> None:
    """A worker that was stopped while its job failed and was made anew changes nothing there."""
    job = make_job(client, 1)
    zombie = job.stream.read("one", 1)[0]
    FarmClient(client).end(job.id, "failed", "a bad row", Settings())
    make_job(client, 1)
    anew = job.stream.read("two", 1)[0]
    assert (anew.id, anew.data) == (zombie.id, zombie.data)
    assert anew.generation != zombie.generation
    assert job.stream.commit([embed(zombie)]) == ["duplicate"]
    assert job.stream.split(zombie, [block(0)]) == "duplicate"
    job.stream.discard(zombie)
    assert job.stream.backlog() == (0, 1)
    assert job.results.at(0) is None
    assert job.stream.commit([embed(anew)]) == ["committed"]


def test_a_late_commit_does_not_reach_what_was_sent_again(client: redis.Redis) -> None:
    """A lease from before a loss counts no more: the block may come again with other texts."""
    job = make_job(client, 1)
    zombie = job.stream.read("one", 1)[0]
    assert job.results.lose(0) == "open"
    assert push(job, 0) == ["added"]
    assert job.stream.read("two", 1)[0].id == zombie.id
    assert job.stream.commit([embed(zombie)]) == ["duplicate"]


def test_pieces_and_refilled_blocks_are_of_the_generation(client: redis.Redis) -> None:
    """Pieces of a split block and refilled blocks can be committed."""
    job = make_job(client, 2)
    one, two = job.stream.read("one", 2)
    job.stream.split(one, [block(0).piece(0, 1), block(0).piece(1, 2)])
    client.xack(two.stream, wire.GROUP, two.id)
    client.xdel(two.stream, two.id)
    reconcile(job, [block(2)])
    found = job.stream.read("one", 9)
    assert [entry.generation for entry in found] == [one.generation] * 3
    assert job.stream.commit([embed(entry) for entry in found]) == ["committed"] * 3


def test_two_outputs_do_not_share_a_job(client: redis.Redis) -> None:
    """A second output is told whose the job is, and changes nothing of it."""
    ours, theirs = Job(client, "j", "ours"), Job(client, "j", "theirs")
    ours.create(SPEC, 0, notes={"out": "/ours"})
    push(ours, 0)
    before = client.hgetall(ours.keys.meta)
    with pytest.raises(JobTaken, match="/ours"):
        theirs.create(SPEC, 7, notes={"out": "/theirs"})
    assert push(theirs, 2) == ["gone"]
    assert theirs.close(2) == theirs.results.lose(0) == "gone"
    theirs.results.drain(2, [0])
    with pytest.raises(JobGone):
        theirs.status()
    with pytest.raises(JobGone):
        theirs.end("failed", "", 60)
    assert client.hgetall(ours.keys.meta) == before
    assert ours.create(SPEC, 0, notes={"out": "/ours"}) == "open"
    entry = ours.stream.read("one", 1)[0]
    assert ours.stream.commit([embed(entry)]) == ["committed"]
    assert theirs.results.at(0) is None
    assert ours.results.at(0) is not None


def test_a_job_made_by_a_door_is_taken_by_its_output_alone(client: redis.Redis) -> None:
    """A job without an owner is taken by the output in its directory, and by no other."""
    Job(client, "j").create(SPEC, 0, notes={"out": "/ours"})
    with pytest.raises(JobTaken):
        Job(client, "j", "theirs").create(SPEC, 0, notes={"out": "/theirs"})
    assert Job(client, "j", "ours").create(SPEC, 0, notes={"out": "/ours"}) == "open"
    with pytest.raises(JobTaken):
        Job(client, "j", "other").create(SPEC, 0, notes={"out": "/ours"})


def test_a_job_without_its_meta_is_made_anew(client: redis.Redis) -> None:
    """A job that has lost its `meta` is made anew, without what is left of it."""
    job = make_job(client, 2)
    job.stream.commit([embed(job.stream.read("one", 1)[0])])
    client.unlink(job.keys.meta)
    assert job.create(SPEC, 0) == "open"
    assert job.results.starts() == []
    assert job.stream.backlog() == (0, 0)
    assert push(job, 0) == ["added"]
