"""Tests of canaries: what is compared, by which bounds, and what workers agree on with a job."""

import msgspec
import numpy as np
import pytest
import redis
from numpy.typing import NDArray

from embedfarm.contract import wire
from embedfarm.contract.canaries import (
    TEXTS,
    Canaries,
    canaries_of,
    cosine_min,
    disagreement,
    likeness,
)
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job


def vectors(seed: int = 0, dimensions: int = 64) -> NDArray[np.float32]:
    """Vectors for all canaries, of length 1."""
    drawn = np.random.default_rng(seed).standard_normal((len(TEXTS), dimensions))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), np.float32)


def turned(matrix: NDArray[np.float32], cosine: float) -> NDArray[np.float32]:
    """Vectors like these, of which the first is turned away until it has this cosine."""
    other = matrix.copy()
    aside = np.roll(matrix[0], 1)
    aside -= (aside @ matrix[0]) * matrix[0]
    aside /= np.linalg.norm(aside)
    other[0] = cosine * matrix[0] + np.sqrt(1 - cosine**2) * aside
    return other


def test_they_are_json_that_any_program_reads() -> None:
    """Canaries survive JSON bit for bit; other sizes than they say are refused."""
    canaries = canaries_of(vectors())
    data = msgspec.json.encode(canaries)
    assert msgspec.json.decode(data, type=Canaries) == canaries
    assert np.array_equal(canaries.matrix(), vectors())
    said = msgspec.json.decode(data)
    with pytest.raises(msgspec.ValidationError, match="bytes of canaries instead of"):
        msgspec.convert(said | {"dimensions": 65}, Canaries)


def test_what_is_not_finite_is_no_vector() -> None:
    """A canary of which the model makes NaN counts as one without a vector, on both sides."""
    broken = vectors()
    broken[2, 3] = np.nan
    canaries = canaries_of(broken)
    assert not canaries.matrix()[2].any()
    assert likeness(canaries.matrix(), canaries.matrix()).least == pytest.approx(1)
    assert likeness(canaries.matrix(), vectors()).least == 0
    nothing = np.zeros((2, 4), np.float32)
    assert likeness(nothing, nothing) == (1.0, 1.0, True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "unheard-of"])
def test_the_bound_is_that_of_the_type(dtype: str) -> None:
    """A canary just within the bound of a type agrees, and one just beyond it does not."""
    known, least = vectors(), cosine_min(dtype)
    for cosine, agrees in ((least + 2e-6, True), (least - 2e-5, False)):
        made = canaries_of(turned(known, cosine))
        words = disagreement(canaries_of(known), made, dtype)
        assert bool(words) is not agrees, (cosine, words)
    assert cosine_min(dtype, "int8") == cosine_min("int8")


def test_other_lengths_and_dimensions_do_not_agree() -> None:
    """Vectors of the same directions that are longer, or have fewer components, are others."""
    known = canaries_of(vectors())
    assert "length" in disagreement(known, canaries_of(vectors() * 1.02), "float32")
    assert not disagreement(known, canaries_of(vectors() * 1.005), "float32")
    assert "32 dimensions" in disagreement(known, canaries_of(vectors(0, 32)), "float32")


def test_canaries_of_another_version_pass() -> None:
    """Workers of two versions, whose texts differ, work on one job."""
    ours = canaries_of(vectors())
    theirs = msgspec.structs.replace(canaries_of(vectors(1)), texts=["other"] * len(TEXTS))
    assert not disagreement(theirs, ours, "float32")


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """A farm with jobs "a" and "b"."""
    for name in ("a", "b"):
        Job(client, name).create(JobSpec(model="m"), 0)
    return FarmClient(client)


def test_the_first_worker_of_each_job_says_what_it_makes(farm: FarmClient) -> None:
    """Others agree with the first one, or are told how they differ; a job that is gone has none."""
    jobs = [(name, farm.job(name).noted("generation")) for name in ("a", "b")]
    first, other = canaries_of(vectors()), canaries_of(vectors(1))
    assert farm.reports.canaries("a") is None
    (agreed,) = farm.reports.agree_on_canaries(jobs[:1], first, "float32").values()
    assert (agreed.difference, agreed.digest) == ("", farm.job("a").noted("canaries_digest"))
    found = farm.reports.agree_on_canaries([*jobs, ("gone", "")], other, "float32")
    assert "cosine" in found[jobs[0]].difference
    assert found[jobs[0]].digest == agreed.digest != found[jobs[1]].digest
    assert (found[jobs[1]].difference, found["gone", ""]) == ("", ("", ""))
    assert farm.reports.canaries("a") == first
    assert farm.reports.canaries("b") == other


def test_a_digest_is_never_there_without_its_canaries(
    farm: FarmClient, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are there, whether a server loses canaries in between or a worker noted them alone."""
    meta, first = wire.JobKeys("a").meta, canaries_of(vectors())

    def lose(*_: object) -> None:
        client.hdel(meta, "canaries", "canaries_digest")

    with monkeypatch.context() as patch:
        patch.setattr(farm.reports, "_canaries", lose)
        (agreed,) = farm.reports.agree_on_canaries([("a", "")], first, "float32").values()
    assert farm.reports.canaries("a") == first
    assert farm.job("a").noted("canaries_digest") == agreed.digest
    client.hdel(meta, "canaries_digest")
    (again,) = farm.reports.agree_on_canaries([("a", "")], first, "float32").values()
    assert again.digest == agreed.digest == farm.job("a").noted("canaries_digest")


def test_those_of_an_earlier_making_do_not_count(farm: FarmClient) -> None:
    """Whoever embedded an earlier job of the name says nothing about this one."""
    assert farm.reports.agree_on_canaries([("a", "earlier")], canaries_of(vectors()), "") == {
        ("a", "earlier"): ("", "")
    }
    assert farm.reports.canaries("a") is None


def test_what_cannot_be_read_stands_in_nobodys_way(farm: FarmClient) -> None:
    """Damaged canaries are reported, and no worker is refused for them."""
    said: dict[str, str] = {}
    farm = FarmClient(farm.client, said.__setitem__)
    farm.job("a").note("canaries", b"{")
    (agreed,) = farm.reports.agree_on_canaries([("a", "")], canaries_of(vectors()), "").values()
    assert not agreed.difference
    assert farm.reports.canaries("a") is None
    assert list(said) == ["canaries of a"]


def test_a_job_that_has_ended_keeps_none(farm: FarmClient) -> None:
    """The record of an ended job, of which there may be many, is as small as before."""
    farm.reports.agree_on_canaries([("a", "")], canaries_of(vectors()), "float32")
    farm.job("a").end("finished", "", 60)
    assert farm.reports.canaries("a") is None
