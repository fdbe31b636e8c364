"""Requests of the farm's programs, in any order, sent to a real server and its model."""

import contextlib
from functools import partial
from typing import Final

import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from embedfarm.contract import wire
from embedfarm.contract.backlog import read_backlogs
from embedfarm.contract.encoding import encode
from embedfarm.contract.entries import Entry
from embedfarm.contract.farm_client import FarmClient, FarmFull, engine_key
from embedfarm.contract.job_reports import ModelRefused
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import BlocksLost, ChangeRefused, Job
from embedfarm.contract.lane import Lane, LaneError, Taken
from embedfarm.contract.records import (
    Block,
    Heartbeat,
    LaneAnswer,
    LanePiece,
    Plan,
    Rate,
    TokenisationSettings,
)
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone, JobStatus
from embedfarm.contract.usage import Account
from embedfarm.contract.window import Count, FarmWindow
from tests.contract.little_job import COMPLETION, DECISION, SAMPLE, SPEC, STATS, block, embed
from tests.simulation.both import BothServers
from tests.support import LiveServer

REFUSED: Final = (
    redis.ResponseError, JobGone, BlocksLost, ChangeRefused, FarmFull, LaneError, ModelRefused,
)  # fmt: skip
WORKERS: Final = st.sampled_from(["one", "one", "two"])
JOBS: Final = st.sampled_from(["little", "little", "little", "second"])
SEVERAL: Final = st.integers(1, 3)
PICKS: Final = st.lists(st.integers(0, 5), min_size=1, max_size=3)
ENDINGS: Final = ["cancel", "delete", "end", "fail"]
MOMENT: Final = 0.002
LIMITS: Final = Settings(
    lane_pieces_max=4, lanes_max=2, lanes_bytes_max=400, lane_seconds_max=1.0,
    lane_lease_seconds=0.003, ended_jobs_max=1,
)  # fmt: skip


class Window(FarmWindow):
    """A farm window with fixed counts, since servers differ in what they say of their memory."""

    def _count(self) -> Count:
        return Count(20, 12, 5, {"a": 2})


class Steps(RuleBasedStateMachine):
    """A state machine of the production code's methods, whose commands go to both servers."""

    def __init__(self, live: LiveServer) -> None:
        super().__init__()
        self.both = BothServers(live)
        self.farm = FarmClient(self.both.client())

    def teardown(self) -> None:
        """Close the connection to the real server."""
        self.both.close()

    def refused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that goes on where both servers refuse a step."""
        return contextlib.suppress(*REFUSED)

    @rule(full=st.booleans())
    def fill(self, *, full: bool) -> None:
        """Make the servers' memory full, or give it room again."""
        self.both.fill(full=full)


class JobSteps(Steps):
    """A state machine of what producers, workers and collectors do with two jobs."""

    def __init__(self, live: LiveServer) -> None:
        super().__init__(live)
        self.held: list[Entry] = []
        for _ in range(3):  # so that no step is in vain
            self.push("little", 0, 1)
            self.read("little", "one", 1)

    def job(self, name: str) -> Job:
        """Return one of the jobs by its name."""
        return self.farm.job(name)

    def entries(self, picks: list[int]) -> list[Entry]:
        """Return entries that were leased at some time; pick 0 is the newest one."""
        return [self.held[-1 - pick % len(self.held)] for pick in picks]

    # The producer.

    @rule(name=JOBS, start=st.sampled_from([0, 0, 4]))
    def create(self, name: str, start: int) -> None:
        """Create a job, or find that it exists."""
        with self.refused():
            self.farm.admit(name, 1)
            self.job(name).create(SPEC, start)

    @rule(name=JOBS, skipped=st.sampled_from([0] * 8 + [2, -2]), count=SEVERAL)
    def push(self, name: str, skipped: int, count: int) -> None:
        """Push blocks, or push them again, or leave a gap."""
        if not self.farm.exists(name):
            self.create(name, 0)
        with self.refused():
            first = max(0, self.job(name).status().pushed_upto + skipped)
            blocks = [block(first + 2 * place) for place in range(count)]
            self.job(name).push([(each, encode(each)) for each in blocks])

    @rule(name=JOBS, verb=st.sampled_from(["pause", "resume", "resume", "close", *ENDINGS]))
    def steer(self, name: str, verb: str) -> None:
        """Pause, resume or end a job, in one of several ways."""
        job = self.job(name)
        with self.refused():
            match verb:
                case "close":
                    job.close(job.status().pushed_upto)
                case "end":
                    self.farm.end(name, "finished", "", LIMITS, chunks_failed=1)
                case "fail":
                    self.farm.end(name, "failed", "no", LIMITS)
                case _:
                    getattr(job, verb)()

    @rule(name=JOBS, weight=SEVERAL)
    def look(self, name: str, weight: int) -> None:
        """Read what people, the scheduler and the producer read of a job, and set its weight."""
        job = self.job(name)
        with self.refused():
            job.spec()
        with self.refused():
            job.set_terms(weight=weight)
        with self.refused():
            job.stream.backlog()
        read_backlogs(self.farm.client, [*self.farm.job_ids(), "nowhere"])
        self.farm.ended(["little", "second"])
        self.farm.ended_ids(5)
        job.results.failures(2)
        job.noted("command")

    # The worker.

    @rule(name=JOBS, worker=WORKERS, count=SEVERAL)
    def read(self, name: str, worker: str, count: int) -> None:
        """Lease new blocks."""
        with self.refused():
            self.held += self.job(name).stream.read(worker, count)
            self.job(name).stream.begin()

    @rule(name=JOBS, worker=WORKERS, seconds=st.sampled_from([0.0, MOMENT]), count=SEVERAL)
    def rescue(self, name: str, worker: str, seconds: float, count: int) -> None:
        """Take over expired leases."""
        job = self.job(name)
        for stream in (job.keys.blocks, job.keys.retry):
            with self.refused():
                found = job.stream.expired(stream, seconds, count)
                self.held += job.stream.claim(stream, worker, [each.id for each in found], seconds)

    @rule(picks=PICKS, worker=WORKERS, verb=st.sampled_from(["renew", "release"]))
    def hold(self, picks: list[int], worker: str, verb: str) -> None:
        """Renew or release leases, whoever holds them."""
        for each in self.entries(picks):
            with self.refused():
                getattr(self.job("little").stream, verb)(each.stream, worker, [each.id, "1-1"])

    @rule(picks=PICKS, failed=st.booleans())
    def commit(self, picks: list[int], *, failed: bool) -> None:
        """Commit results of blocks, of which some may be leased by somebody else by now."""
        rows = [embed(each) for each in self.entries(picks)]
        if failed:
            rows = [embed(each, result.start) for each, result in rows]
        with self.refused():
            self.job("little").stream.commit(rows)

    @rule(picks=PICKS)
    def split(self, picks: list[int]) -> None:
        """Split a block into two pieces."""
        for each in self.entries(picks[:1]):
            pieces = [Block(start=0, texts=["a"]), Block(start=1, texts=["b" * len(picks)])]
            with self.refused():
                self.job("little").stream.split(each, pieces)

    @rule(picks=PICKS)
    def copy(self, picks: list[int]) -> None:
        """Read copies of blocks that others may hold."""
        self.job("little").stream.copies([each.id for each in self.entries(picks)])

    @rule(name=JOBS, worker=WORKERS)
    def say(self, name: str, worker: str) -> None:
        """Write and read what workers note about a job: accounts, refusals, fingerprint."""
        tokenisation = TokenisationSettings(tokenizer=worker, prompt="", tokens_max=8)
        with self.refused():
            self.farm.reports.account(worker, "1", {(name, ""): Account(chunks=1)})
        with self.refused():
            self.farm.reports.refuse(name, worker, "no")
        with self.refused():
            self.farm.reports.agree(name, {"weights": worker})
        with self.refused():
            self.farm.reports.agree_on_tokens(name, tokenisation)
        self.farm.reports.accounts(name)
        self.farm.reports.refusals(name)
        self.farm.reports.fingerprint(name)

    # The collector.

    @rule(name=JOBS, few=st.integers(0, 2))
    def drain(self, name: str, few: int) -> None:
        """Read some results, and delete them as a collector does."""
        with self.refused():
            starts = sorted(self.job(name).results.starts())[:few]
            for start in starts:
                self.job(name).results.at(start)
            self.job(name).results.drain(2 * few, starts)

    @rule(name=JOBS)
    def wait(self, name: str) -> None:
        """Wait for a block, a result and room."""
        job = self.job(name)
        job.stream.wait_for_block(MOMENT)
        job.wait(job.keys.result_wakeup, MOMENT)
        job.wait(job.keys.room, MOMENT)


class FarmSteps(Steps):
    """A state machine of what schedulers, workers and askers do with the farm's own keys."""

    def __init__(self, live: LiveServer) -> None:
        super().__init__(live)
        self.lane = Lane(self.farm.client, LIMITS)
        self.taken: list[Taken] = []
        self.sent = 0
        while len(self.taken) < 2:  # so that no step is in vain
            self.ask(1, 2, 1)
            self.take(1, "one", 1)

    # The scheduler, and who it speaks with.

    @rule(tenant=st.sampled_from(["", "a"]), held=SEVERAL, costs=PICKS, idle=st.booleans())
    def take_room(self, tenant: str, held: int, costs: list[int], *, idle: bool) -> None:
        """Reserve room of the farm's window, of which there is little."""
        pushed = JobStatus(tenant=tenant, result_bytes=held, pushed_upto=int(not idle))
        window = Window(self.farm.client, LIMITS)
        window.reserve(pushed, 0, costs)
        window.seen()

    @rule(worker=WORKERS, incarnation=st.sampled_from("12"), seconds=st.sampled_from([0.02, 6.0]))
    def beat(self, worker: str, incarnation: str, seconds: float) -> None:
        """Send a worker's heartbeat, and read all workers' heartbeats."""
        beat = Heartbeat(
            worker=worker, incarnation=incarnation, host="h", pid=1, device="cpu-0", state="idle"
        )
        with self.refused():
            self.farm.beat(beat, seconds)
        self.farm.call_roll()
        if seconds > 1:
            self.farm.leave("two")

    @rule(token=st.sampled_from("ab"), fence=SEVERAL, seconds=st.sampled_from([0.02, 5.0]))
    def schedule(self, token: str, fence: int, seconds: float) -> None:
        """Take the scheduler's lock and publish a plan, or be refused as too late."""
        with self.refused():
            fence = self.farm.plans.elect(token, seconds) or fence
            plan = Plan(worker="one", fence=fence, shares=[])
            self.farm.plans.publish([plan], fence, seconds, ["one"])
        self.farm.plans.plan("one")
        self.farm.plans.has_scheduler()
        self.farm.plans.wait_for_plan("one", MOMENT)

    @rule(fence=SEVERAL)
    def abdicate(self, fence: int) -> None:
        """Give the scheduler's lock up, which works for the active scheduler only."""
        self.farm.plans.abdicate(fence)

    @rule(passes=st.lists(st.just("size"), max_size=1), budget=SEVERAL)
    def remember(self, passes: list[str], budget: int) -> None:
        """Write and read the farm's records: rates, samples, policy, decisions, budgets, events."""
        rate = Rate(tokens_per_second=1.0, overhead_seconds=0.1, updated=1.0, samples=budget)
        with self.refused():
            self.farm.statistics.report(COMPLETION, 1000)
            self.farm.statistics.sample(SAMPLE)
            self.farm.plans.set_policy(passes)
            self.farm.plans.tell(DECISION, STATS)
            self.farm.statistics.remember({f"one|{budget}": rate}, ["one|2"])
            self.farm.statistics.learn_budget("cpu", "m", budget)
        self.farm.plans.policy()
        self.farm.plans.decisions(2)
        self.farm.plans.scheduler_stats()
        self.farm.statistics.history()
        self.farm.statistics.budget("cpu", "m")
        self.farm.statistics.samples(10)
        self.farm.statistics.recent_batches(10)
        self.farm.statistics.events("$", MOMENT)
        self.farm.statistics.events("0", MOMENT)

    # Interactive requests.

    @rule(dimensions=SEVERAL, pieces=SEVERAL, size=st.sampled_from([1, 100]))
    def ask(self, dimensions: int, pieces: int, size: int) -> None:
        """Send an interactive request, if there is room."""
        self.sent += 1
        make = partial(
            LanePiece,
            id=f"r{self.sent}",
            spec=JobSpec(model=f"null:{dimensions}"),
            texts=["t" * size],
            timeout_seconds=1.0,
        )
        with self.refused():
            self.lane.send([make(place=place) for place in range(pieces)])

    @rule(dimensions=SEVERAL, worker=WORKERS, enough=st.sampled_from([1, 150]))
    def take(self, dimensions: int, worker: str, enough: int) -> None:
        """Lease pieces of interactive requests, and read the lane's figures."""
        engine = engine_key(JobSpec(model=f"null:{dimensions}"))
        with self.refused():
            self.taken += self.lane.take(engine, worker, enough)
        with self.refused():  # the lane may expire while one looks
            self.lane.oldest(engine)
        self.lane.waiting(engine)
        self.lane.wakeups(self.lane.now(), MOMENT)
        self.lane.wakeups("0", MOMENT)
        self.lane.asked()

    @rule(dimensions=SEVERAL, worker=WORKERS, picks=PICKS)
    def answer(self, dimensions: int, worker: str, picks: list[int]) -> None:
        """Renew the leases of pieces, answer them, and read one answer."""
        engine = engine_key(JobSpec(model=f"null:{dimensions}"))
        chosen = [self.taken[-1 - pick % len(self.taken)] for pick in picks]
        with self.refused():
            self.lane.renew(engine, worker, [each.entry for each in chosen])
        with self.refused():
            self.lane.answer(engine, [(each.entry, each.id, LaneAnswer()) for each in chosen])
        for each in chosen[:1]:
            self.farm.client.blpop([wire.reply_key(each.id)], timeout=MOMENT)

    @rule(dimensions=SEVERAL, picks=PICKS)
    def withdraw(self, dimensions: int, picks: list[int]) -> None:
        """Withdraw a piece as a caller does that gives up."""
        spec = JobSpec(model=f"null:{dimensions}")
        chosen = [self.taken[-1 - pick % len(self.taken)] for pick in picks]
        piece = LanePiece(id=chosen[0].id, spec=spec, place=0, texts=["t"], timeout_seconds=1.0)
        self.lane._withdraw([piece], [each.entry for each in chosen])

    @rule(worker=WORKERS)
    def load(self, worker: str) -> None:
        """Claim and end the loading of an engine, and note a worker that cannot load it."""
        with self.refused():
            self.lane.claim_loading("e", worker)
        with self.refused():
            self.lane.refuse("e", worker, "no")
        self.lane.unloaded("e")
        self.lane.end_loading("e")
