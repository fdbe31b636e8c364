"""Tests of the timeline: what happened on a farm, and who did it."""

import getpass
from typing import Final

import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.broker import closing_client, host_name
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.farm_timeline import NOTE_CHARACTERS_MAX, STEP, TIMELINE_MAX, FarmEvent
from embedfarm.contract.jobs import ChangeRefused
from embedfarm.contract.settings import Settings
from embedfarm.contract.tenants import TenantFarm
from tests.contract.little_job import SPEC, make_job
from tests.support import LiveServer

LATER: Final = "tenant alpha, deadline 1970-01-02 00:00:00 UTC"
ACCOUNT: Final = f"{getpass.getuser()}@{host_name()}"


def kinds(farm: FarmClient, job: str = "") -> list[str]:
    """Return what happened to a job, oldest first."""
    return [entry.kind for entry in reversed(farm.timeline.newest(TIMELINE_MAX, job))]


def test_what_is_done_to_a_job_and_by_whom(client: redis.Redis) -> None:
    """Each change of a job is told once, with who made it: a key by HTTP, or an account."""
    farm, operator = FarmClient(client), FarmClient(client, actor="key ops")
    make_job(client, 1)
    assert farm.job("little").create(SPEC, 0) == "open"  # a second call makes nothing
    operator.job("little").pause()
    operator.job("little").resume()
    farm.job("little").set_terms(priority=2, deadline_ms=86_400_000, tenant="alpha")
    farm.job("little").cancel()
    with pytest.raises(ChangeRefused):
        farm.job("little").resume()
    farm.job("little").delete()
    farm.job("little").delete()
    assert [entry.sentence for entry in reversed(farm.timeline.newest(99, "little"))] == [
        f"job little was submitted by {ACCOUNT}",
        "job little was paused by key ops",
        "job little was resumed by key ops",
        f"job little has other terms by {ACCOUNT}: priority urgent, {LATER}",
        f"job little was cancelled by {ACCOUNT}",
        f"job little was deleted by {ACCOUNT}",
    ]


def test_how_a_job_ended_is_told_once(client: redis.Redis) -> None:
    """A job's end is told with its reason, however often it is asked for, and its next life too."""
    farm, settings = FarmClient(client), Settings()
    make_job(client, 1)
    for _ in range(2):
        farm.end("little", "failed", "no memory", settings)
    [entry] = farm.timeline.newest(1, "little")
    assert (entry.sentence, entry.by) == ("job little has failed: no memory", "")
    make_job(client, 1)
    farm.end("little", "finished", "", settings)
    assert kinds(farm, "little") == ["submitted", "failed", "submitted", "finished"]


def test_the_newest_are_kept(client: redis.Redis) -> None:
    """About 2,000 events are kept; those of one job are found among all, and after a place."""
    farm = FarmClient(client)
    for place in range(TIMELINE_MAX + 2 * STEP):
        job = "rare" if place % STEP == 1 else "often"
        farm.timeline.add(FarmEvent(kind="paused", job=job, note=str(place)))
    assert TIMELINE_MAX <= client.xlen(wire.TIMELINE) < TIMELINE_MAX + STEP
    places = [int(entry.note) for entry in farm.timeline.newest(99, "rare")]
    assert places == [5 * STEP + 1, 4 * STEP + 1, 3 * STEP + 1, 2 * STEP + 1]
    everything = farm.timeline.newest(2 * TIMELINE_MAX)
    assert len(everything) == client.xlen(wire.TIMELINE)
    assert len({entry.id for entry in everything}) == len(everything)
    assert farm.timeline.newest(99, after=everything[3].id) == everything[:3]


def test_a_tenant_sees_its_own_jobs(client: redis.Redis) -> None:
    """A tenant sees what happened to its own job, and neither another's nor the farm's events."""
    farm = FarmClient(client)
    for name in ("alpha", "beta"):
        make_job(client, 1, f"of-{name}").set_terms(tenant=name)
    farm.timeline.add(FarmEvent(kind="joined", worker="one"))
    alpha = TenantFarm(client, tenant="alpha")
    assert kinds(alpha, "of-alpha") == ["submitted", "changed"]
    assert (kinds(alpha, "of-beta"), kinds(alpha)) == ([], [])


def test_what_cannot_be_read_hides_nothing(client: redis.Redis) -> None:
    """An entry that no program of ours wrote is left out and reported; a long note is cut."""
    seen: dict[str, str] = {}
    farm = FarmClient(client, seen.__setitem__)
    client.xadd(wire.TIMELINE, {"event": b"\x01\x91\xa3odd"})
    client.xadd(wire.TIMELINE, {"other": b"x"})
    farm.timeline.add(FarmEvent(kind="failed", job="a", note="\x1b[2J" + 2000 * "x"))
    [entry] = farm.timeline.newest(9)
    assert (entry.job, len(entry.sentence)) == ("a", NOTE_CHARACTERS_MAX)
    assert "\x1b" not in entry.sentence
    assert list(seen) == [wire.TIMELINE]


def test_a_user_of_an_earlier_release(
    server: LiveServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A user that may not write the timeline steers jobs all the same, and is warned once."""
    make_job(client, 1)
    rights = ("on", "nopass", "+@all", "~ef:{little}:*", "~ef:{farm}:events")
    client.execute_command("ACL", "SETUSER", "old", *rights)
    with closing_client(server.url.replace("unix://", "unix://old:x@")) as old:
        job = FarmClient(old).job("little")
        job.pause()
        assert job.resume() == "open"
    assert kinds(FarmClient(client)) == ["submitted"]
    assert len([each for each in caplog.messages if "is not written" in each]) == 1


def test_a_full_server_loses_events_only(client: redis.Redis) -> None:
    """A server without room takes no events, and what they are about happens all the same."""
    job = make_job(client, 1)
    client.config_set("maxmemory", 1)
    try:
        job.pause()
    finally:
        client.config_set("maxmemory", 0)
    assert job.status().state == "paused"
    assert kinds(FarmClient(client)) == ["submitted"]
