"""Tests of who gets how much of a simulated farm, and how long anybody waits."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest

from embedfarm.contract.settings import Settings
from embedfarm.scheduler.policies import POLICIES, make_passes
from embedfarm.scheduler.simulation.scenario import Scenario, Work, spread
from embedfarm.scheduler.simulation.simulated_farm import Outcome, Simulation

AGEING_SECONDS: Final = 5.0
SETTINGS: Final = Settings(ageing_seconds=AGEING_SECONDS)
SEEDS: Final = range(3)


def run(
    work: Sequence[Work],
    policy: str = "fair",
    *,
    workers: int = 8,
    seed: int = 0,
    settings: Settings = SETTINGS,
) -> Outcome:
    """Simulate jobs on a usual farm, and return the outcome."""
    scenario = Scenario("fairness", "", spread(workers), tuple(work))
    return Simulation(scenario, make_passes(POLICIES[policy], settings), settings, seed).run()


def tokens(made: Outcome, since: float, until: float) -> Counter[str]:
    """Return the tokens of each job that were embedded in some span of time."""
    done: Counter[str] = Counter()
    for span in made.spans:
        inside = max(0.0, min(until, span.end) - max(since, span.begin))
        done[span.job] += round(span.tokens * inside / (span.end - span.begin))
    return done


def jain(values: Sequence[float]) -> float:
    """Return the fairness index (Jain, Chiu and Hawe 1984): 1 when all are equal, 1/n at worst."""
    found = np.array(values, dtype=np.float64)
    return float(found.sum() ** 2 / (len(found) * (found**2).sum()))


# Shares.


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [2, 5, 12])
def test_equal_jobs_get_equal_parts(count: int, seed: int) -> None:
    """The index of fairness of equal jobs is 0.95 or more while all run, whatever their number."""
    work = [Work(48.0 / count, f"job-{place}") for place in range(count)]
    done = tokens(run(work, seed=seed), 0.0, 36.0)
    assert len(done) == count
    assert jain(list(done.values())) >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_of_twice_the_weight_gets_twice_as_much(seed: int) -> None:
    """Jobs get tokens by weight to within a fifth, while all of them run on 8 workers."""
    work = [Work(30.0, f"job-{weight}", weight=weight) for weight in (1, 2, 4)]
    done = tokens(run(work, seed=seed), 5.0, 40.0)
    assert done["job-2"] / done["job-1"] == pytest.approx(2, rel=0.2)
    assert done["job-4"] / done["job-1"] == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize("seed", SEEDS)
def test_tenants_get_equal_parts(seed: int) -> None:
    """A tenant with five jobs gets as much as one with a single job."""
    work = [Work(8.0, f"many-{place}", tenant="many") for place in range(5)]
    done = tokens(run([*work, Work(40.0, "one", tenant="one")], seed=seed), 0.0, 60.0)
    one = done.pop("one")
    assert jain([one, sum(done.values())]) >= 0.99
    assert jain(list(done.values())) >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tenant_of_twice_the_weight_gets_twice_as_much(seed: int) -> None:
    """A tenant gets tokens by its own weight, although the other has more and heavier jobs."""
    settings = Settings(tenant_weights={"large": 2})
    work = [Work(20.0, f"usual-{place}", tenant="usual", weight=5) for place in range(3)]
    made = run([*work, Work(50.0, "large", tenant="large")], seed=seed, settings=settings)
    done = tokens(made, 5.0, 60.0)
    assert done.pop("large") / sum(done.values()) == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tenant", ["", "late"])
def test_who_comes_late_gets_its_part_and_no_more(tenant: str, seed: int) -> None:
    """A job that comes after 20 s shares from then on; it does not get the whole farm."""
    work = [Work(50.0, "early"), Work(15.0, "late", arrives_seconds=20.0, tenant=tenant)]
    done = tokens(run(work, seed=seed), 24.0, 40.0)
    assert jain([done["early"], done["late"]]) >= 0.95


def test_first_come_is_first_done() -> None:
    """Under "fcfs" jobs end in the order in which they came, under "sjf" the shortest first.

    The short job comes after 1 s, takes 10 s, and waits for what was leased before it came.
    """
    work = [Work(20.0, "long"), Work(10.0, "short", arrives_seconds=1.0)]
    ended = run(work, "fcfs").job_ended
    assert ended["long"] < ended["short"]
    ended = run(work, "sjf").job_ended
    assert ended["short"] < ended["long"]
    assert ended["short"] <= 11.0 + SETTINGS.micro_batch_seconds_max


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_deadlines_order_jobs_of_a_level(policy: str) -> None:
    """The job of a level whose deadline is first is done first, although it came last."""
    work = [
        Work(20.0, "none"),
        Work(10.0, "late", deadline_seconds=900.0),
        Work(10.0, "soon", arrives_seconds=2.0, deadline_seconds=60.0),
    ]
    ended = run(work, policy).job_ended
    assert ended["soon"] < ended["late"] < ended["none"]


# Waiting.


def stream(name: str, seconds: float, every: float, until: float, priority: int = 2) -> list[Work]:
    """Return jobs of one size that come one after another."""
    return [
        Work(seconds, f"{name}-{place:03}", arrives_seconds=place * every, priority=priority)
        for place in range(int(until / every))
    ]


def begins(made: Outcome, job: str) -> list[float]:
    """Return when the micro-batches of a job began, after 0 for the start of the run."""
    return [0.0, *sorted(span.begin for span in made.spans if span.job == job)]


def longest(made: Outcome, job: str) -> float:
    """Return the longest time in seconds for which a job got nothing."""
    return max(b - a for a, b in itertools.pairwise(begins(made, job)))


# Two levels to rise, and what was leased before: a micro-batch at work, and one in hand.
WAIT_SECONDS: Final = 2 * AGEING_SECONDS + 2 * SETTINGS.micro_batch_seconds_max


@pytest.mark.parametrize("policy", ["fair", "priority"])
@pytest.mark.parametrize("workers", [1, 8])
def test_nobody_starves_beside_urgent_bulk_work(policy: str, workers: int) -> None:
    """A normal job gets a micro-batch each time that it has aged by two levels."""
    work = [Work(60.0, "urgent", priority=2), Work(6.0, "normal")]
    made = run(work, policy, workers=workers)
    assert longest(made, "normal") <= WAIT_SECONDS


@pytest.mark.parametrize("policy", ["fair", "priority"])
@pytest.mark.parametrize("workers", [1, 8])
def test_nobody_starves_beside_a_stream_of_urgent_jobs(policy: str, workers: int) -> None:
    """A normal job is served once it has aged by two levels, though the urgent work never ends.

    It is not served before: nobody jumps the queue.
    """
    made = run([*stream("urgent", 1.2, 1.0, 30.0), Work(6.0, "normal")], policy, workers=workers)
    first = begins(made, "normal")[1]
    assert 2 * AGEING_SECONDS <= first <= WAIT_SECONDS


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_nobody_starves_for_having_been_served(policy: str, workers: int) -> None:
    """A normal job that had a micro-batch gets the next one soon, beside many small urgent jobs."""
    made = run([*stream("urgent", 0.3, 0.25, 40.0), Work(6.0, "normal")], policy, workers=workers)
    assert longest(made, "normal") <= WAIT_SECONDS + AGEING_SECONDS


@pytest.mark.parametrize("workers", [1, 8])
def test_nobody_starves_for_the_letters_of_its_name(workers: int) -> None:
    """Jobs of one level that come and go do not keep one of them waiting, whatever it is called."""
    made = run([*stream("job", 0.6, 0.5, 30.0, priority=0), Work(3.0, "z")], workers=workers)
    assert longest(made, "z") <= WAIT_SECONDS


@pytest.mark.parametrize(("workers", "count"), [(1, 20), (8, 100)])
def test_an_urgent_job_does_not_wait_for_a_crowd(workers: int, count: int) -> None:
    """An urgent job is served after what was in hand, whatever the number of normal jobs.

    In a crowd some jobs have always waited for more than two times `ageing_seconds`.
    """
    crowd = [Work(200.0 / count, f"normal-{place:03}") for place in range(count)]
    urgent = Work(1.0, "urgent", arrives_seconds=20.0, priority=2)
    made = run([*crowd, urgent], workers=workers)
    assert begins(made, "urgent")[1] <= 20.0 + 2 * SETTINGS.micro_batch_seconds_max
