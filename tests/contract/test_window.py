"""Tests of the farm's window: who may push how much, so that all jobs fit on the server."""

import redis

from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.scheduling_terms import Terms
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import ROOMY
from embedfarm.contract.status import JobStatus
from embedfarm.contract.window import FarmWindow
from tests.contract.little_job import SPEC
from tests.support import wait_until

WINDOW = 1000
SETTINGS = Settings(farm_window_bytes_max=WINDOW)
NEW = JobStatus(state="open")


def job_of(client: redis.Redis, name: str, tenant: str, size: int) -> JobStatus:
    """Make a job that has so many bytes of results on the server."""
    job = FarmClient(client).job(name)
    job.create(SPEC, 0, Terms(tenant=tenant))
    client.hset(job.keys.meta, mapping={"result_bytes": size, "pushed_upto": 1})
    return job.status()


def count_again(client: redis.Redis) -> None:
    """Make the next one who asks count again, with nothing on its way."""
    client.hdel(wire.WINDOW, "counted", "turn", "taken", "before")


def test_what_all_jobs_hold_is_counted(client: redis.Redis) -> None:
    """Text, vectors to be and results of every job; what no program of ours wrote is left out."""
    window = FarmWindow(client, SETTINGS)
    assert window.seen() == ROOMY  # nobody asks for room
    job_of(client, "a", "", 100)
    for name, value in {
        "bytes_in": 50, "bytes_done": 20, "chunks_in": 3, "chunks_done": 1, "vector_bytes": 10,
    }.items():  # fmt: skip
        client.hset(wire.JobKeys("a").meta, name, value)
    job_of(client, "b", "t", 200)
    job_of(client, "broken", "t", 0)
    client.hset(wire.JobKeys("broken").meta, "chunks_in", "many")
    room = window.look()
    assert (room.bytes_max, room.used_bytes, room.result_bytes) == (WINDOW, 350, 300)
    assert (room.shares, room.share) == ({"": 500, "t": 500}, 333)
    assert window.seen() == room


def test_the_window_follows_the_server(client: redis.Redis) -> None:
    """The window is half of the server's memory limit; without a limit, half of the setting."""
    window = FarmWindow(client, Settings())
    assert window.look().bytes_max == Settings().redis_bytes_max // 2
    client.config_set("maxmemory", 100 << 20)
    count_again(client)
    assert window.look().bytes_max == 50 << 20
    client.config_set("maxmemory", 0)
    count_again(client)
    assert window.look().bytes_max == Settings().redis_bytes_max // 2


def test_room_is_taken_between_counts(client: redis.Redis) -> None:
    """Producers that ask between two counts get no more than was free."""
    job_of(client, "a", "", 400)
    windows = [FarmWindow(client, SETTINGS) for _ in range(3)]
    windows[0].look()
    held = JobStatus(pushed_upto=1)
    assert [each.reserve(held, 0, [100, 100]) for each in windows] == [2, 2, 2]
    assert windows[0].reserve(held, 0, [1]) == 0
    assert windows[0].seen().refusing


def test_what_was_taken_lapses(client: redis.Redis) -> None:
    """Room that a producer took and never used is free again, two counts later."""
    window, held = FarmWindow(client, SETTINGS), JobStatus(pushed_upto=1)
    assert window.reserve(held, 0, [WINDOW]) == 1
    assert window.reserve(held, 0, [WINDOW]) == 0
    wait_until(lambda: window.reserve(held, 0, [WINDOW]) == 1, 5)


def test_a_late_count_changes_nothing(client: redis.Redis) -> None:
    """A count that comes late does not overwrite what others counted since.

    Only one counts at a time, and a turn that has lapsed goes to the next.
    """
    window = FarmWindow(client, SETTINGS)
    script = client.register_script(wire.script("count"))
    reserve = client.register_script(wire.script("reserve"))
    (_, turn), *others = (
        reserve(keys=[wire.WINDOW], args=["", 0, 0, 0, 60_000, 60_000]) for _ in range(3)
    )
    assert turn
    assert others == [[0, 0]] * 2
    assert reserve(keys=[wire.WINDOW], args=["", 0, 0, 0, 0, 60_000])[1] >= turn
    client.hdel(wire.WINDOW, "turn")
    room = window.look()
    assert script(keys=[wire.WINDOW], args=[1, 9, 9, 9, 1000, 9]) == b"late"
    assert window.seen() == room


def test_scarce_room_is_for_those_below_their_share(client: redis.Redis) -> None:
    """Tenants share alike, and the last quarter is for jobs below their share."""
    hogs = [job_of(client, f"hog-{place}", "many", 200) for place in range(4)]
    small = job_of(client, "small", "few", 0)
    window = FarmWindow(client, SETTINGS)
    assert window.look().shares == {"many": 250}
    assert window.reserve(hogs[0], 0, [100]) == 0  # 200 are free, less than a quarter
    assert window.reserve(small, 0, [100, 50, 100]) == 2
    assert window.reserve(hogs[0], 0, [50]) == 1  # up to its share


def test_every_job_gets_one_block_through(client: redis.Redis) -> None:
    """A job of which all was collected is let one block through, whatever others hold."""
    job_of(client, "hog", "", 5 * WINDOW)
    window = FarmWindow(client, SETTINGS)
    for place in range(20):
        drained = JobStatus(pushed_upto=place, drained_upto=place)
        assert window.reserve(drained, 0, [70, 70]) == 1
    assert window.reserve(JobStatus(pushed_upto=1), 0, [70]) == 0


def test_a_cancelled_job_holds_what_it_left(client: redis.Redis) -> None:
    """A cancelled job's results count until it is deleted, and it has no share."""
    job_of(client, "a", "one", 300)
    job = FarmClient(client).job("a")
    job.cancel()
    window = FarmWindow(client, SETTINGS)
    room = window.look()
    assert (room.used_bytes, room.shares) == (300, {})
    job.delete()
    count_again(client)
    assert window.look().used_bytes == 0


def test_a_record_that_others_damaged(client: redis.Redis) -> None:
    """A window whose fields are no numbers is counted anew."""
    window = FarmWindow(client, SETTINGS)
    window.look()
    client.hset(wire.WINDOW, mapping={"turn": "x", "free": "y", "taken": "z", "refused": "\xff"})
    assert window.reserve(NEW, 0, [10]) == 1
    assert window.seen().used_bytes == 0
