"""Tests of who has had how much of the farm, and who is next by that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.scheduler.ledger import Demand, Ledger, Service

SPEED = 1000.0
SLICE_SECONDS = 1.0  # that the farm gives to a job at a time


def demand(
    name: str, leased_seconds: float, *, tenant: str = "", weight: int = 1, wants: bool = True
) -> Demand:
    """Return a job's demand, with what it has leased in seconds of the whole farm."""
    return Demand(name, tenant, weight, leased_seconds * SPEED, SPEED, wants)


def next_job(demands: Sequence[Demand], services: Mapping[str, Service]) -> str:
    """Return the job that a fair farm serves: of the least served tenant, the least served job."""

    def had(each: Demand) -> tuple[float, float, str]:
        service = services[each.job]
        return service.tenant_seconds, service.job_seconds, each.job

    return min((each for each in demands if each.wants), key=had).job


@dataclass
class FairFarm:
    """A farm that gives a second at a time to the job that is next.

    Attributes:
        had: Seconds that each job got.
    """

    ledger: Ledger = field(default_factory=Ledger)
    had: dict[str, float] = field(default_factory=dict)
    now: float = 100.0

    def step(self, jobs: Mapping[str, tuple[str, int]], wanting: set[str]) -> str | None:
        """Serve the next of the wanting jobs, of which tenant and weight are given; return it."""
        demands = [
            demand(
                name, self.had.get(name, 0.0), tenant=tenant, weight=weight, wants=name in wanting
            )
            for name, (tenant, weight) in jobs.items()
        ]
        services = self.ledger.charge(demands, self.now)
        self.now += SLICE_SECONDS
        if not wanting:
            return None
        name = next_job(demands, services)
        self.had[name] = self.had.get(name, 0.0) + SLICE_SECONDS
        return name

    def run(
        self, jobs: Mapping[str, tuple[str, int]], wanting: set[str], steps: int
    ) -> dict[str, int]:
        """Serve for some steps; return how often each job was served."""
        came = dict.fromkeys(jobs, 0)
        for _ in range(steps):
            if name := self.step(jobs, wanting):
                came[name] += 1
        return came


def test_a_job_is_charged_for_what_it_leased() -> None:
    """A job and its tenant are charged the seconds that the whole farm needs for its leases."""
    ledger = Ledger()
    ledger.charge([demand("job", 0)], 1.0)
    assert ledger.charge([demand("job", 3)], 2.0)["job"] == Service(3.0, 3.0, 0.0)
    assert ledger.charge([demand("job", 5)], 3.0)["job"] == Service(5.0, 5.0, 0.0)


def test_a_heavy_model_pays_what_it_costs() -> None:
    """A job that the farm does at half the speed is charged double for as many tokens."""
    ledger = Ledger()
    for tokens in (0, 1000):
        services = ledger.charge(
            [Demand("light", "", 1, tokens, 1000, True), Demand("heavy", "", 1, tokens, 500, True)],
            1.0,
        )
    assert services["light"].job_seconds == 1.0
    assert services["heavy"].job_seconds == 2.0


def test_nothing_is_charged_until_a_speed_is_known() -> None:
    """Tokens that were leased before any speed was known are charged once it is."""
    ledger = Ledger()
    ledger.charge([Demand("job", "", 1, 0, 0, True)], 1.0)
    assert ledger.charge([Demand("job", "", 1, 1000, 0, True)], 2.0)["job"].job_seconds == 0
    assert ledger.charge([Demand("job", "", 1, 2000, 1000, True)], 3.0)["job"].job_seconds == 2.0


def test_waiting_is_counted_since_the_last_lease() -> None:
    """A job waits since its last lease; one that wants nothing does not wait."""
    ledger = Ledger()
    jobs = [demand("served", 0), demand("waits", 0), demand("leased", 0, wants=False)]
    ledger.charge(jobs, 10.0)
    services = ledger.charge([demand("served", 1), *jobs[1:]], 15.0)
    assert [each.waited_seconds for each in services.values()] == [0.0, 5.0, 0.0]
    services = ledger.charge([demand("served", 1), demand("waits", 1), jobs[2]], 18.0)
    assert [each.waited_seconds for each in services.values()] == [3.0, 0.0, 0.0]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_service_goes_by_weight(weights: list[int]) -> None:
    """Service per weight differs by 1 s at most among jobs of a tenant that always want more."""
    farm = FairFarm()
    jobs = {f"job-{place}": ("", weight) for place, weight in enumerate(weights)}
    came = farm.run(jobs, set(jobs), 60)
    per_weight = [came[name] / weight for name, (_, weight) in jobs.items()]
    assert max(per_weight) - min(per_weight) <= 1.0 + 1e-9


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_tenants_get_the_same(counts: list[int]) -> None:
    """Tenants of one weight are served the same, whatever the number and weights of their jobs."""
    jobs = {
        f"{tenant}-{place}": (f"tenant-{tenant}", place + 1)
        for tenant, count in enumerate(counts)
        for place in range(count)
    }
    came = FairFarm().run(jobs, set(jobs), 20 * len(counts))
    for tenant in range(len(counts)):
        assert sum(n for name, n in came.items() if name.startswith(f"{tenant}-")) == 20


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_tenants_get_their_weight(weights: list[int]) -> None:
    """Service per weight differs by 1 s at most among tenants, whatever their jobs' weights."""
    tenants = {f"tenant-{place}": weight for place, weight in enumerate(weights)}
    jobs = {f"{tenant}-{job}": (tenant, job) for tenant in tenants for job in (1, 3)}
    came = FairFarm(Ledger(tenants)).run(jobs, set(jobs), 60)
    per_weight = [
        (came[f"{tenant}-1"] + came[f"{tenant}-3"]) / weight for tenant, weight in tenants.items()
    ]
    assert max(per_weight) - min(per_weight) <= 1.0 + 1e-9


def test_who_comes_later_begins_at_the_least_served() -> None:
    """A new job does not get the farm for as long as the others have had it; they share."""
    farm = FairFarm()
    farm.run({"old": ("", 1)}, {"old"}, 50)
    jobs = {"old": ("", 1), "new": ("", 1)}
    came = farm.run(jobs, set(jobs), 10)
    assert abs(came["old"] - came["new"]) <= 2


def test_a_tenant_that_comes_later_begins_at_the_least_served() -> None:
    """A new tenant begins where the least served one stands, and shares with it from then on."""
    farm = FairFarm()
    farm.run({"old": ("a", 1)}, {"old"}, 50)
    jobs = {"old": ("a", 1), "new": ("b", 1), "third": ("b", 1)}
    came = farm.run(jobs, set(jobs), 20)
    assert came["old"] == pytest.approx(10, abs=1)
    assert abs(came["new"] - came["third"]) <= 1


def test_who_wanted_nothing_for_long_gets_no_more_than_others() -> None:
    """A job that comes back begins where the others stand: nobody saves up for later."""
    farm = FairFarm()
    jobs = {"steady": ("", 1), "idle": ("", 1)}
    farm.run(jobs, set(jobs), 4)
    farm.run(jobs, {"steady"}, 50)
    came = farm.run(jobs, set(jobs), 10)
    assert abs(came["steady"] - came["idle"]) <= 2


def test_who_comes_while_another_has_just_nothing_to_lease_shares_with_it() -> None:
    """A producer that is slower than the farm is not punished for what it had while alone."""
    farm = FairFarm()
    jobs = {"slow": ("", 1)}
    farm.run(jobs, {"slow"}, 50)
    farm.run(jobs, set(), 1)
    jobs["new"] = ("", 1)
    farm.run(jobs, {"new"}, 1)
    came = farm.run(jobs, set(jobs), 10)
    assert abs(came["slow"] - came["new"]) <= 2


def test_a_new_scheduler_holds_the_past_against_nobody() -> None:
    """A new ledger, which saw no earlier leases, serves old and new jobs the same."""
    farm = FairFarm()
    farm.run({"old": ("", 1)}, {"old"}, 50)
    jobs = {"old": ("", 1), "new": ("", 1)}
    farm.run(jobs, set(jobs), 2)
    farm.ledger = Ledger()
    came = farm.run(jobs, set(jobs), 10)
    assert abs(came["old"] - came["new"]) <= 1


def test_a_job_that_is_gone_is_forgotten() -> None:
    """A name that comes again is a new job, and the ledger does not grow for ever."""
    ledger = Ledger()
    for number in range(100):
        services = ledger.charge([demand(f"job-{number}", 0, tenant=f"t-{number}")], number + 1.0)
    assert list(services) == ["job-99"]
    assert len(ledger._jobs) == 1
    assert len(ledger._tenants) == 1


JOBS = {f"job-{place}": (f"tenant-{place % 2}", 1) for place in range(4)}


@pytest.mark.parametrize("jobs", [JOBS, {name: ("", weight) for name, (_, weight) in JOBS.items()}])
@given(
    breaks=st.lists(
        st.tuples(st.sets(st.sampled_from(sorted(JOBS))), st.integers(1, 20)), max_size=8
    )
)
def test_nobody_saves_up(
    jobs: Mapping[str, tuple[str, int]], breaks: list[tuple[set[str], int]]
) -> None:
    """Jobs that always want something get the same from now on, whatever they wanted before.

    The counts differ by at most two turns, of the tenant's and of the job's own.
    """
    farm = FairFarm()
    for wanting, steps in breaks:
        farm.run(jobs, wanting, steps)
    farm.run(jobs, set(jobs), 1)
    came = farm.run(jobs, set(jobs), 40)
    assert max(came.values()) - min(came.values()) <= 4
