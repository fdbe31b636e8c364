"""Tests of an output's fingerprint, on servers that know it, have lost it, or never knew it."""

from pathlib import Path

import numpy as np
import pytest
import redis

import embedfarm
from embedfarm.collector.manifest import STATE_DIRECTORY, Part, read_manifest
from embedfarm.collector.output import Output
from embedfarm.contract.canaries import TEXTS, canaries_of
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_reports import ModelRefused
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.status import JobGone
from embedfarm.runs.fingerprint import FINGERPRINT_FILE, Fingerprint, hold_to
from embedfarm.runs.own_job import OwnJob

OWN = OwnJob("j", "")
OURS = {"weights": "1", "revision": "a"}


@pytest.fixture
def job(client: redis.Redis) -> Job:
    """Create a job that no worker has looked at."""
    job = Job(client, "j")
    job.create(JobSpec(model="m"), 0)
    return job


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Make an unfinished output."""
    (tmp_path / STATE_DIRECTORY).mkdir()
    return tmp_path


def test_a_server_that_has_lost_it_is_reminded(job: Job, out: Path) -> None:
    """A server that has lost the fingerprint gets it back from the run."""
    farm, fingerprint = FarmClient(job.client), Fingerprint(out)
    assert not fingerprint.settle(farm, OWN)
    assert not (out / STATE_DIRECTORY / FINGERPRINT_FILE).exists()
    farm.reports.agree("j", OURS)
    fingerprint.learn(farm, OWN)
    job.client.hdel(job.keys.meta, "fingerprint")
    fingerprint.learn(farm, OWN)
    assert farm.reports.fingerprint("j") == fingerprint.known == OURS
    job.delete()
    fingerprint.learn(farm, OWN)
    assert fingerprint.known == OURS


def test_another_server_learns_it(job: Job, out: Path) -> None:
    """A fingerprint that was kept with the output is set on the server of a later run."""
    farm, first = FarmClient(job.client), Fingerprint(out)
    farm.reports.agree("j", OURS)
    assert first.settle(farm, OWN)
    job.client.hdel(job.keys.meta, "fingerprint")
    Fingerprint(out).recall(farm, OWN, lambda: pytest.fail("the job is there"))
    assert farm.reports.fingerprint("j") == OURS
    with pytest.raises(ModelRefused, match="weights"):
        farm.reports.agree("j", OURS | {"weights": "2"})


def test_a_job_that_is_lost_meanwhile_is_made_again(job: Job, out: Path) -> None:
    """A job that the server loses before the fingerprint is set is created again."""
    farm, first = FarmClient(job.client), Fingerprint(out, OURS)
    first.settle(farm, OWN)
    job.delete()
    Fingerprint(out).recall(farm, OWN, lambda: job.create(JobSpec(model="m"), 0))
    assert farm.reports.fingerprint("j") == OURS


def test_another_model_is_refused_while_the_job_runs(job: Job, out: Path) -> None:
    """Workers with another model on a server that lost the job end the run."""
    farm, fingerprint = FarmClient(job.client), Fingerprint(out, OURS)
    farm.reports.agree("j", OURS | {"weights": "2"})
    with pytest.raises(ModelRefused, match="weights"):
        fingerprint.learn(farm, OWN)


def test_an_earlier_job_of_the_name_teaches_nothing(job: Job, out: Path) -> None:
    """What workers said about a job that another output had is neither believed nor changed."""
    farm, own = FarmClient(job.client), OwnJob("j", "mine")
    job.note("owner", "theirs")
    farm.reports.agree("j", OURS | {"weights": "2"})
    farm.reports.refuse("j", "one", "no such model")
    fingerprint = Fingerprint(out)
    fingerprint.learn(farm, own)
    assert fingerprint.known == farm.reports.refusals(*own) == {}
    assert farm.reports.accounts(*own) == {}
    fingerprint = Fingerprint(out, OURS)
    fingerprint.learn(farm, own)
    with pytest.raises(JobGone):
        farm.reports.agree("j", OURS, "mine")
    assert farm.job(*own).note("reason", "mine") is None
    assert (farm.reports.fingerprint("j")["weights"], job.status().reason) == ("2", "")
    assert farm.reports.refusals("j") == {"one": "no such model"}


def test_it_is_on_the_disk_before_any_vector_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed as soon as a part is on the disk leaves its model there, too."""
    out, write = tmp_path / "out", Output.write
    there = []

    def look_and_write(output: Output, *, early: bool = False) -> Part | None:
        there.append((output.directory / STATE_DIRECTORY / FINGERPRINT_FILE).exists())
        return write(output, early=early)

    monkeypatch.setattr(Output, "write", look_and_write)
    with embedfarm.Farm(devices="cpu", workers=1) as farm:
        embedfarm.embed(["a", "b"], out=out, model="null:4", farm=farm, progress=False)
    assert set(there) == {True}
    assert read_manifest(out).fingerprint


CANARIES = canaries_of(np.eye(len(TEXTS), 8, dtype=np.float32))


def test_canaries_go_with_it(job: Job, out: Path) -> None:
    """Canaries are learned, kept and set again as the fingerprint is, if they come later, too."""
    farm, first = FarmClient(job.client), Fingerprint(out)
    farm.reports.agree("j", OURS)
    first.settle(farm, OWN)
    assert (first.known, first.canaries, first.read_canaries()) == (OURS, None, None)
    farm.reports.agree_on_canaries([("j", "")], CANARIES, "")
    first.settle(farm, OWN)
    job.client.hdel(job.keys.meta, "fingerprint", "canaries")
    Fingerprint(out).recall(farm, OWN, lambda: pytest.fail("the job is there"))
    assert (farm.reports.fingerprint("j"), farm.reports.canaries("j")) == (OURS, CANARIES)
    job.client.hdel(job.keys.meta, "canaries")
    first.learn(farm, OWN)
    assert farm.reports.canaries("j") == CANARIES


def test_a_server_with_other_canaries_is_refused(job: Job, out: Path) -> None:
    """A job whose workers have agreed on other vectors does not go on with an output."""
    farm = FarmClient(job.client)
    hold_to(out, OURS, CANARIES)
    other = canaries_of(CANARIES.matrix()[:, ::-1])
    farm.reports.agree_on_canaries([("j", "")], other, "")
    with pytest.raises(ModelRefused, match="the workers make other vectors than before: a cosine"):
        Fingerprint(out).recall(farm, OWN, lambda: pytest.fail("the job is there"))
