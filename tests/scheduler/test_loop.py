"""Tests of the loop on a real server; the records of workers and jobs are written by the tests."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from embedfarm.contract import wire
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import model_key
from embedfarm.contract.plans import Plans
from embedfarm.contract.records import Plan
from embedfarm.scheduler.loop import Scheduler
from embedfarm.scheduler.state import Draft, FarmState
from tests.scheduler.live import (
    CHUNKS,
    SETTINGS,
    SPEC,
    Start,
    beat,
    completion,
    fill,
    planned,
    remember,
    report,
    share,
)
from tests.support import LiveServer, wait_until


def test_completions_lead_to_plans_in_proportion(farm: FarmClient, start: Start) -> None:
    """Two workers that did 3 to 1 may lease 3 to 1: six tenths of what waits, between them."""
    fill(farm, 64)
    beat(farm, "fast")
    beat(farm, "slow")
    start()
    wait_until(planned(farm, "fast", 1))
    report(farm, "fast", 60_000, 1.0)
    report(farm, "slow", 20_000, 1.0)
    wait_until(planned(farm, "fast", 29))
    wait_until(planned(farm, "slow", 10))


def test_a_worker_without_work_is_told_so(farm: FarmClient, start: Start) -> None:
    """A worker gets an empty plan where there is no job, and none while it drains."""
    beat(farm, "worker")
    beat(farm, "leaving", "draining")
    start()
    wait_until(lambda: farm.plans.plan("worker"))
    assert farm.plans.plan("worker") == Plan(worker="worker", fence=1, shares=[])
    assert farm.plans.plan("leaving") is None


def test_what_was_sent_again_is_planned(farm: FarmClient, start: Start) -> None:
    """A job whose results are at their limit is planned again once a lost block was sent again."""
    job = fill(farm, 4)
    farm.client.hset(job.keys.meta, "result_bytes", SETTINGS.results_bytes_max)
    beat(farm, "worker")
    start()
    wait_until(lambda: (plan := farm.plans.plan("worker")) is not None and not plan.shares)
    farm.client.hset(job.keys.meta, "refilled_upto", CHUNKS)
    wait_until(lambda: share(farm, "worker"), SETTINGS.plan_ttl_seconds)


def test_plans_that_say_the_same_are_written_now_and_then(
    farm: FarmClient, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is written when it is new, and again before it lapses, not at each decision."""
    decisions: list[int] = []
    publish = Plans.publish

    def counted(self: Plans, plans: Sequence[Plan], *others: Any) -> bool:  # noqa: ANN401 # as of it
        decisions.append(len(plans))
        return publish(self, plans, *others)

    monkeypatch.setattr(Plans, "publish", counted)
    fill(farm, 64)
    beat(farm, "worker")
    start()
    wait_until(lambda: 0 in decisions and sum(decisions) > 1)  # on a busy machine, later
    assert decisions[0] == 1
    assert set(decisions) == {0, 1}
    beat(farm, "other")
    wait_until(lambda: farm.plans.plan("other"))


def test_plans_that_say_the_same_are_not_written_all_at_once(server: LiveServer) -> None:
    """Each plan is written again in time, and no decision but the first writes most of them."""
    scheduler = Scheduler(server.url, SETTINGS, threading.Event())
    plans = {f"worker-{place}": () for place in range(100)}
    draft = Draft(FarmState((), (), {}, 0.0), (), shares=plans)
    written = dict.fromkeys(plans, 0.0)
    for at in range(1000):
        now = at / 20
        found = scheduler._to_publish(draft, now)
        scheduler._shares = draft.shares
        assert len(found) == 100 if at == 0 else len(found) < 20
        written |= dict.fromkeys(found, now)
        assert now - min(written.values()) < SETTINGS.plan_ttl_seconds / 4
    scheduler.farm.client.close()


def test_jobs_come_and_go(farm: FarmClient, start: Start) -> None:
    """The plan follows when a job is created, paused, resumed and deleted."""
    beat(farm, "worker")
    start()
    job = fill(farm, 4)
    wait_until(lambda: share(farm, "worker"))
    job.set_state("paused")
    wait_until(lambda: share(farm, "worker") is None)
    job.set_state("closed")
    wait_until(lambda: share(farm, "worker"))
    job.delete()
    wait_until(lambda: share(farm, "worker") is None)


def test_a_job_that_nobody_can_read_stops_nobody(farm: FarmClient, start: Start) -> None:
    """A spec of another program's making goes to the workers, who refuse it and say why."""
    fill(farm, 4, "strange")
    farm.job("strange").note("spec", b"nonsense")
    fill(farm, 4)
    beat(farm, "worker")
    start()
    wait_until(lambda: share(farm, "worker") and share(farm, "worker", "strange"))


def test_the_tail_is_copied_by_an_idle_worker(farm: FarmClient, start: Start) -> None:
    """An idle worker's plan names the blocks that a slow worker has leased to the last."""
    job = fill(farm, 4)
    beat(farm, "slow")
    beat(farm, "idle")
    remember(farm, "slow", 100)
    remember(farm, "idle", 10_000)
    assert len(job.stream.read("slow", 4)) == 4
    start()
    wait_until(lambda: (now := share(farm, "idle")) is not None and len(now.copies) == 4)
    assert (now := share(farm, "slow")) is not None
    assert not now.copies


def test_what_is_repeated_is_not_given_to_a_faster_worker(farm: FarmClient, start: Start) -> None:
    """A worker that comes later gets none of the blocks that another one was told to repeat."""
    job = fill(farm, 4)
    for worker, speed in (("slow", 100), ("idle", 10_000), ("late", 100_000)):
        remember(farm, worker, speed)
    beat(farm, "slow")
    beat(farm, "idle")
    assert len(job.stream.read("slow", 4)) == 4
    start()
    wait_until(lambda: (now := share(farm, "idle")) is not None and len(now.copies) == 4)
    beat(farm, "late")
    wait_until(lambda: share(farm, "late"))
    assert (late := share(farm, "late")) is not None
    assert not late.copies
    assert (idle := share(farm, "idle")) is not None
    assert len(idle.copies) == 4


def test_one_of_two_is_active(server: LiveServer, farm: FarmClient, start: Start) -> None:
    """While one scheduler holds the lock, the other one stands by and publishes nothing."""
    beat(farm, "worker")
    start()
    wait_until(lambda: farm.plans.plan("worker"))
    second = Scheduler(server.url, SETTINGS, threading.Event())
    second._step()
    assert not second.fence
    assert (plan := farm.plans.plan("worker")) is not None
    assert plan.fence == 1
    second.farm.client.close()


def test_a_standby_goes_on_when_the_active_one_stops(farm: FarmClient, start: Start) -> None:
    """A clean stop gives the lock up: the next one has a higher fence, and plans."""
    beat(farm, "worker")
    first = start()
    wait_until(lambda: first.scheduler.fence)
    second = start()
    first.stop()
    wait_until(lambda: second.scheduler.fence)
    assert second.scheduler.fence > 1
    wait_until(lambda: (plan := farm.plans.plan("worker")) is not None and plan.fence > 1)


def test_a_standby_takes_over_from_the_dead(farm: FarmClient, start: Start) -> None:
    """A holder that is gone without a word loses the lock when it is old."""
    assert farm.plans.elect("dead", SETTINGS.scheduler_ttl_seconds) == 1
    beat(farm, "worker")
    second = start()
    wait_until(lambda: second.scheduler.fence == 2)
    wait_until(lambda: (plan := farm.plans.plan("worker")) is not None and plan.fence == 2)


def test_a_fenced_scheduler_publishes_nothing(server: LiveServer, farm: FarmClient) -> None:
    """Plans of a scheduler that lost the lock while it decided are refused; newer ones stay."""

    @dataclass(frozen=True)
    class ThinkTooLong:
        name: str = "think"

        def __call__(self, draft: Draft) -> Draft:
            farm.client.delete(wire.SCHEDULER)
            fence = farm.plans.elect("new", 60)
            assert farm.plans.publish([Plan(worker="worker", fence=fence, shares=[])], fence, 60)
            return draft

    beat(farm, "worker")
    old = Scheduler(server.url, SETTINGS, threading.Event())
    old._step()
    assert old.fence == 1
    old.passes = (*old.passes, ThinkTooLong())
    old._step()
    assert old.fence == 0
    assert (plan := farm.plans.plan("worker")) is not None
    assert plan.fence == 2
    old.farm.client.close()


def test_who_lost_the_lock_reads_the_history_again(server: LiveServer, farm: FarmClient) -> None:
    """A scheduler that gets the lock back uses the rates that another one has learned meanwhile."""
    scheduler = Scheduler(server.url, SETTINGS, threading.Event())
    scheduler._step()
    farm.client.delete(wire.SCHEDULER)
    assert farm.plans.elect("other", 60) == 2
    remember(farm, "worker", 5000)
    farm.client.delete(wire.SCHEDULER)
    scheduler._step()
    assert scheduler.fence == 3
    assert set(scheduler._observer.history.rates(model_key(SPEC), 6)) == {"worker"}
    scheduler.farm.client.close()


def test_what_one_has_learned_the_next_one_knows(farm: FarmClient, start: Start) -> None:
    """A second scheduler does not probe a worker that the first one has measured."""
    fill(farm, 64)
    beat(farm, "worker")
    first = start()
    wait_until(planned(farm, "worker", 1))
    report(farm, "worker", 60_000, 1.0)
    wait_until(planned(farm, "worker", 38))
    first.stop()
    farm.client.delete(wire.plan_key("worker"))
    start()
    wait_until(lambda: share(farm, "worker"))
    assert planned(farm, "worker", 38)()


def test_an_outage_is_waited_out(server: LiveServer, farm: FarmClient, start: Start) -> None:
    """The server is killed and comes back: the same scheduler plans again, for what is there."""
    beat(farm, "worker")
    running = start()
    wait_until(lambda: farm.plans.plan("worker"))
    server.kill()
    wait_until(lambda: not running.scheduler.fence)
    server.start()
    with closing_client(server.url) as client:
        again = FarmClient(client)
        again.client.delete(wire.plan_key("worker"))
        beat(again, "worker")
        wait_until(lambda: again.plans.plan("worker"), 20)
        fill(again, 4)
        wait_until(lambda: share(again, "worker"))


def test_a_clean_stop_leaves_everything_to_the_next(server: LiveServer, farm: FarmClient) -> None:
    """A scheduler that is stopped stores what it has learned, and frees the lock at once."""
    scheduler = Scheduler(server.url, SETTINGS, threading.Event())
    scheduler._step()
    report(farm, "worker", 60_000, 1.0)
    scheduler._listen()
    scheduler._observer.history.learn([completion("worker", 90_000, 1.0)], {}, 2e9)
    scheduler.stop.set()
    scheduler.run()
    (rate,) = farm.statistics.history().values()
    assert rate.tokens_per_second > 60_000
    assert not farm.client.exists(wire.SCHEDULER)
    scheduler.farm.client.close()


def test_it_stops_while_the_server_is_away(server: LiveServer) -> None:
    """A stop is obeyed during an outage, and the lock that cannot be given back is no error."""
    scheduler = Scheduler(server.url, SETTINGS, threading.Event())
    scheduler._step()
    assert scheduler.fence
    server.kill()
    scheduler.stop.set()
    scheduler.run()
    scheduler.farm.client.close()
