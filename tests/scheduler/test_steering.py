"""Tests of a running scheduler: policies that change, passes that fail, figures that it keeps."""

import json
import threading
import time
from typing import Final

import pytest

from embedfarm.contract import wire
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.plans import DECISIONS_MAX, STATS_SECONDS
from embedfarm.contract.records import Decision, SchedulerStats
from embedfarm.scheduler.loop import NOTES_MAX, TELL_SECONDS
from embedfarm.scheduler.policies import DEFAULT_POLICY, POLICIES
from tests.farm.harness import run
from tests.scheduler.conftest import Install
from tests.scheduler.live import Start, at, beat, fill, planned, remember, report, share
from tests.support import LiveServer, wait_until

FIXED_BLOCKS: Final = 12  # 100 chunks in blocks of 8

RAISING = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Own:
    settings: object
    name: str = "broken"

    def __call__(self, draft):
        if draft.tiers:
            raise RuntimeError("no such thing")
        return draft
"""
SILENT = RAISING.replace('raise RuntimeError("no such thing")', "return None")
TALKING = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Own:
    settings: object
    name: str = "talking"

    def __call__(self, draft):
        return draft.note("talking", map(str, range(5000)))
"""


def stats(farm: FarmClient) -> SchedulerStats:
    """Wait for the figures of the active scheduler, and return them."""
    wait_until(farm.plans.scheduler_stats)
    found = farm.plans.scheduler_stats()
    assert found is not None
    return found


def follows(farm: FarmClient, passes: list[str]) -> bool:
    """Tell whether the active scheduler says that it follows these passes."""
    found = farm.plans.scheduler_stats()
    return found is not None and found.passes == passes


def test_a_policy_is_followed_at_the_next_decision(farm: FarmClient, start: Start) -> None:
    """A running scheduler follows a policy once it is chosen, and the default once it is not."""
    fill(farm, 64)
    beat(farm, "new")
    start()
    wait_until(planned(farm, "new", 1))
    farm.plans.set_policy(POLICIES["fixed"])
    wait_until(planned(farm, "new", FIXED_BLOCKS))
    wait_until(lambda: follows(farm, list(POLICIES["fixed"])))
    farm.plans.set_policy([])
    wait_until(planned(farm, "new", 1))
    wait_until(lambda: follows(farm, list(POLICIES[DEFAULT_POLICY])))


def test_a_deadline_that_will_be_missed_is_told_once(
    farm: FarmClient, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A late job is warned of once, and stays in the figures until it is given more time."""
    deadline = int(1000 * time.time()) + 60_000
    job = fill(farm, 256)  # 204.8 s
    job.set_terms(deadline_ms=deadline)
    beat(farm, "one")
    remember(farm, "one", 1000.0)
    began = time.time()
    start()
    wait_until(lambda: stats(farm).late)
    late = stats(farm).late["job"]
    assert began <= late + deadline / 1000 - 204.8 <= time.time()
    [row] = json.loads(run("jobs", "ls", "--json", environment=at(farm)).stdout)
    assert late <= row["late_seconds"] <= stats(farm).late["job"], "it grows with time"
    assert "too little" in run("jobs", "ls", environment=at(farm)).stdout
    job.set_terms(deadline_ms=deadline + 300_000)
    wait_until(lambda: not stats(farm).late)
    [told] = [entry for entry in farm.timeline.newest(99, "job") if entry.kind == "late"]
    assert told.sentence in caplog.text


def test_a_policy_outlives_the_scheduler(farm: FarmClient, start: Start) -> None:
    """A scheduler follows the policy that was chosen before it started."""
    farm.plans.set_policy(POLICIES["fixed"])
    fill(farm, 64)
    beat(farm, "new")
    start()
    wait_until(planned(farm, "new", FIXED_BLOCKS))


def test_a_policy_that_cannot_be_had_is_not_followed(farm: FarmClient, start: Start) -> None:
    """A policy with an unknown pass is not followed, and the figures say what was wrong."""
    farm.plans.set_policy(POLICIES["fixed"])
    fill(farm, 64)
    beat(farm, "new")
    start()
    wait_until(planned(farm, "new", FIXED_BLOCKS))
    farm.plans.set_policy(["defer", "nonsense"])
    wait_until(lambda: "defer, nonsense" in stats(farm).dropped)
    assert "no pass is called 'nonsense'" in stats(farm).dropped["defer, nonsense"]
    assert stats(farm).passes == list(POLICIES["fixed"])
    farm.client.delete(wire.plan_key("new"))
    wait_until(planned(farm, "new", FIXED_BLOCKS))
    farm.plans.set_policy([])
    wait_until(lambda: follows(farm, list(POLICIES[DEFAULT_POLICY])))
    assert stats(farm).dropped == {}


def test_the_first_policy_that_cannot_be_had_leaves_the_default(
    farm: FarmClient, start: Start
) -> None:
    """A scheduler that starts with a policy that it cannot follow follows the default."""
    farm.plans.set_policy(["nonsense"])
    fill(farm, 64)
    beat(farm, "new")
    start()
    wait_until(planned(farm, "new", 1))
    wait_until(lambda: follows(farm, list(POLICIES[DEFAULT_POLICY])))


def test_a_pass_that_raises_is_left_out(farm: FarmClient, start: Start, install: Install) -> None:
    """A pass that raises is left out from that decision on, and the figures say what was wrong."""
    install("own", RAISING)
    farm.plans.set_policy(["defer", "own", "fcfs", "fixed"])
    beat(farm, "new")
    running = start()
    wait_until(lambda: follows(farm, ["defer", "broken", "fcfs", "fixed"]))
    fill(farm, 64)
    wait_until(planned(farm, "new", FIXED_BLOCKS))
    wait_until(lambda: follows(farm, ["defer", "fcfs", "fixed"]))
    assert stats(farm).dropped == {"broken": "RuntimeError: no such thing"}
    assert not running.failures


def test_a_last_pass_that_gives_nothing_is_left_out(
    farm: FarmClient, start: Start, install: Install
) -> None:
    """A last pass that returns no draft is left out, and the scheduler goes on."""
    install("own", SILENT)
    farm.plans.set_policy(["defer", "fixed", "own"])
    fill(farm, 64)
    beat(farm, "new")
    running = start()
    wait_until(planned(farm, "new", FIXED_BLOCKS))
    wait_until(lambda: follows(farm, ["defer", "fixed"]))
    assert stats(farm).dropped == {"broken": "TypeError: it gives NoneType, no draft"}
    assert not running.failures


def test_a_pass_that_was_left_out_is_tried_again_when_chosen(
    farm: FarmClient, start: Start, install: Install
) -> None:
    """A new choice of passes forgets the failures of the last one."""
    install("own", RAISING)
    farm.plans.set_policy(["own", "fixed"])
    fill(farm, 64)
    beat(farm, "new")
    start()
    wait_until(planned(farm, "new", FIXED_BLOCKS))
    wait_until(lambda: stats(farm).dropped)
    farm.plans.set_policy(["defer", "size"])
    wait_until(planned(farm, "new", 1))
    wait_until(lambda: follows(farm, ["defer", "size"]))
    assert stats(farm).dropped == {}


# What it keeps for people.


def test_decisions_are_kept_with_their_reasons(farm: FarmClient, start: Start) -> None:
    """About one decision in a second is kept with passes, time and notes, the newest first."""
    fill(farm, 64)
    fill(farm, 8, "paused").set_state("paused")
    beat(farm, "new")
    began = time.time()
    start()
    wait_until(lambda: len(farm.plans.decisions(9)) >= 3)
    newest, *older = farm.plans.decisions(9)
    assert newest.passes == list(POLICIES[DEFAULT_POLICY])
    assert ("defer", "paused deferred: paused") in newest.notes
    assert any(name == "size" and "new may lease" in words for name, words in newest.notes)
    assert 0 < newest.seconds < 1
    assert began <= older[-1].time < newest.time
    assert newest.time - older[0].time >= 0.9 * TELL_SECONDS


def test_kept_decisions_are_bounded(farm: FarmClient) -> None:
    """Only the newest hundred decisions are kept, however long the farm runs."""
    figures = SchedulerStats([], {}, 0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for number in range(DECISIONS_MAX + 5):
        farm.plans.tell(Decision(time=number, seconds=0.0, passes=[], notes=[]), figures)
    kept = farm.plans.decisions(10 * DECISIONS_MAX)
    assert [each.time for each in kept] == list(range(DECISIONS_MAX + 4, 4, -1))
    assert [each.time for each in farm.plans.decisions(2)] == [DECISIONS_MAX + 4, DECISIONS_MAX + 3]
    assert 0 < int(str(farm.client.ttl(wire.STATS))) <= STATS_SECONDS


def test_notes_are_bounded(farm: FarmClient, start: Start, install: Install) -> None:
    """A decision keeps a limited number of notes, however much a pass talks."""
    install("talking", TALKING)
    farm.plans.set_policy(["talking"])
    start()
    wait_until(lambda: farm.plans.decisions(1))
    assert len(farm.plans.decisions(1)[0].notes) == NOTES_MAX


def test_figures_follow_the_completions(farm: FarmClient, start: Start) -> None:
    """The figures count micro-batches, tokens, their time, and how far the predictions were off."""
    fill(farm, 64)
    beat(farm, "worker")
    start()
    wait_until(planned(farm, "worker", 1))
    report(farm, "worker", 10_000, 1.0)
    wait_until(lambda: stats(farm).micro_batches == 1)
    assert stats(farm).prediction_error == 0.0
    report(farm, "worker", 20_000, 4.0)
    wait_until(lambda: stats(farm).micro_batches == 2)
    found = stats(farm)
    assert found.tokens == 30_000
    assert found.micro_batch_seconds_mean == 2.5
    assert 1.0 < found.micro_batch_seconds_p99 <= 4.0
    assert found.prediction_error == 1.0  # at 10,000 tokens/s it should have taken 2 s
    assert found.decisions > 2
    assert 0 < found.decision_seconds_mean <= found.decision_seconds_p99 < 1
    assert found.tokens_per_second > 0


def test_nobody_schedules_nobody_says_so(farm: FarmClient) -> None:
    """There are no figures without an active scheduler."""
    assert farm.plans.scheduler_stats() is None
    assert farm.plans.decisions(5) == []


# Waking.


def wait_in_thread(server: LiveServer, worker: str) -> threading.Thread:
    """Start a thread in which a worker waits until it is woken."""

    def wait() -> None:
        with closing_client(server.url) as client:
            farm, until = FarmClient(client), time.monotonic() + 60
            while not farm.plans.wait_for_plan(worker, 60) and time.monotonic() < until:
                pass

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_an_idle_worker_wakes_when_its_plan_changes(
    server: LiveServer, farm: FarmClient, start: Start
) -> None:
    """A worker that waits without work is woken as soon as its plan has a new job."""
    beat(farm, "idle")
    start()
    wait_until(lambda: farm.plans.plan("idle"))
    waiting = wait_in_thread(server, "idle")
    fill(farm, 4)
    waiting.join(30)
    assert not waiting.is_alive()
    assert share(farm, "idle")


def test_an_idle_worker_wakes_for_copies(
    server: LiveServer, farm: FarmClient, start: Start
) -> None:
    """An idle worker is woken when it may repeat the blocks of one that hangs."""
    job = fill(farm, 4)
    beat(farm, "slow")
    beat(farm, "idle")
    remember(farm, "slow", 100_000)
    remember(farm, "idle", 100_000)
    assert len(job.stream.read("slow", 4)) == 4
    start()
    wait_until(lambda: share(farm, "idle"))
    farm.client.delete(wire.wake_key("idle"))
    waiting = wait_in_thread(server, "idle")
    report(farm, "slow", 100, 10.0)
    waiting.join(30)
    assert not waiting.is_alive()
    assert (now := share(farm, "idle")) is not None
    assert now.copies


def test_a_worker_at_work_is_not_woken(farm: FarmClient, start: Start) -> None:
    """A busy worker's changed plan does not ring: it would end the next wait for nothing."""
    job = fill(farm, 8)
    beat(farm, "busy")
    assert len(job.stream.read("busy", 2)) == 2
    start()
    wait_until(lambda: share(farm, "busy"))
    report(farm, "busy", 60_000, 1.0)
    wait_until(planned(farm, "busy", 4))
    assert not farm.client.exists(wire.wake_key("busy"))


def test_a_paused_job_does_not_keep_stragglers_from_being_repeated(
    farm: FarmClient, start: Start
) -> None:
    """Blocks that wait in a paused job do not keep another job's tail from being copied."""
    fill(farm, 8, "paused").set_state("paused")
    job = fill(farm, 4)
    beat(farm, "slow")
    beat(farm, "idle")
    remember(farm, "slow", 100)
    remember(farm, "idle", 10_000)
    assert len(job.stream.read("slow", 4)) == 4
    start()
    wait_until(lambda: (now := share(farm, "idle")) is not None and len(now.copies) == 4)
