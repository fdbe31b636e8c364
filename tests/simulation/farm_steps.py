"""What the farm's programs ask of a server, in any order, asked of a real one and its model."""

import contextlib
from functools import partial
from typing import Final

import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from embedfarm import wire
from embedfarm.accounts import Account
from embedfarm.backlog import read_backlogs
from embedfarm.entries import Entry
from embedfarm.farm import Farm, FarmFull, ModelRefused, engine_key
from embedfarm.jobs import BlocksLost, ChangeRefused, Job
from embedfarm.lane import Lane, LaneError, Taken
from embedfarm.records import (
    Block,
    Heartbeat,
    JobSpec,
    LaneAnswer,
    LanePiece,
    Plan,
    Rate,
    TokenRecipe,
    encode,
)
from embedfarm.settings import Settings
from embedfarm.status import JobGone
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


class Steps(RuleBasedStateMachine):
    """The production code's own methods, each of whose commands goes to both servers."""

    def __init__(self, live: LiveServer) -> None:
        super().__init__()
        self.both = BothServers(live)
        self.farm = Farm(self.both.client())

    def teardown(self) -> None:
        """Let go of the real server."""
        self.both.close()

    def refused(self) -> contextlib.AbstractContextManager[None]:
        """Go on where both servers refuse a step."""
        return contextlib.suppress(*REFUSED)

    @rule(full=st.booleans())
    def fill(self, *, full: bool) -> None:
        """Memory is full, or is no more."""
        self.both.fill(full=full)


class JobSteps(Steps):
    """What producers, workers and collectors do with two jobs."""

    def __init__(self, live: LiveServer) -> None:
        super().__init__(live)
        self.held: list[Entry] = []
        for _ in range(3):  # so that no step is in vain
            self.push("little", 0, 1)
            self.read("little", "one", 1)

    def job(self, name: str) -> Job:
        """One of the jobs."""
        return self.farm.job(name)

    def entries(self, picks: list[int]) -> list[Entry]:
        """Some of those that were leased at some time; the newest ones have low numbers."""
        return [self.held[-1 - pick % len(self.held)] for pick in picks]

    # The producer.

    @rule(name=JOBS, start=st.sampled_from([0, 0, 4]))
    def create(self, name: str, start: int) -> None:
        """Make a job, or find it."""
        with self.refused():
            self.farm.admit(name, 1)
            self.job(name).create(SPEC, start)

    @rule(name=JOBS, skipped=st.sampled_from([0] * 8 + [2, -2]), count=SEVERAL)
    def push(self, name: str, skipped: int, count: int) -> None:
        """Append blocks, or send them again, or leave some out."""
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
        """What people, the scheduler and the submitter read."""
        job = self.job(name)
        with self.refused():
            job.spec()
        with self.refused():
            job.set_terms(weight=weight)
        with self.refused():
            job.backlog()
        read_backlogs(self.farm.client, [*self.farm.job_ids(), "nowhere"])
        self.farm.ended(["little", "second"])
        self.farm.ended_ids(5)
        job.failures(2)
        job.noted("command")

    # The worker.

    @rule(name=JOBS, worker=WORKERS, count=SEVERAL)
    def read(self, name: str, worker: str, count: int) -> None:
        """Lease what is new."""
        with self.refused():
            self.held += self.job(name).read(worker, count)
            self.job(name).begin()

    @rule(name=JOBS, worker=WORKERS, seconds=st.sampled_from([0.0, MOMENT]), count=SEVERAL)
    def rescue(self, name: str, worker: str, seconds: float, count: int) -> None:
        """Take over what others let lie."""
        job = self.job(name)
        for stream in (job.keys.blocks, job.keys.retry):
            with self.refused():
                found = job.expired(stream, seconds, count)
                self.held += job.claim(stream, worker, [each.id for each in found], seconds)

    @rule(picks=PICKS, worker=WORKERS, verb=st.sampled_from(["renew", "release"]))
    def hold(self, picks: list[int], worker: str, verb: str) -> None:
        """Keep leases, or hand them back, whoever has them."""
        for each in self.entries(picks):
            with self.refused():
                getattr(self.job("little"), verb)(each.stream, worker, [each.id, "1-1"])

    @rule(picks=PICKS, failed=st.booleans())
    def commit(self, picks: list[int], *, failed: bool) -> None:
        """Store results, of blocks that may be somebody else's by now."""
        rows = [embed(each) for each in self.entries(picks)]
        if failed:
            rows = [embed(each, result.start) for each, result in rows]
        with self.refused():
            self.job("little").commit(rows)

    @rule(picks=PICKS)
    def split(self, picks: list[int]) -> None:
        """Replace blocks by pieces."""
        for each in self.entries(picks[:1]):
            pieces = [Block(start=0, texts=["a"]), Block(start=1, texts=["b" * len(picks)])]
            with self.refused():
                self.job("little").split(each, pieces)

    @rule(picks=PICKS)
    def copy(self, picks: list[int]) -> None:
        """Read what others hold."""
        self.job("little").copies([each.id for each in self.entries(picks)])

    @rule(name=JOBS, worker=WORKERS)
    def say(self, name: str, worker: str) -> None:
        """What a worker notes about a job."""
        recipe = TokenRecipe(tokenizer=worker, prompt="", tokens_max=8)
        with self.refused():
            self.farm.account(name, worker, "1", Account(chunks=1))
        with self.refused():
            self.farm.refuse(name, worker, "no")
        with self.refused():
            self.farm.agree(name, {"weights": worker})
        with self.refused():
            self.farm.agree_on_tokens(name, recipe)
        self.farm.accounts(name)
        self.farm.refusals(name)
        self.farm.fingerprint(name)

    # The collector.

    @rule(name=JOBS, few=st.integers(0, 2))
    def drain(self, name: str, few: int) -> None:
        """Forget results."""
        with self.refused():
            starts = sorted(self.job(name).result_starts())[:few]
            for start in starts:
                self.job(name).result(start)
            self.job(name).drain(2 * few, starts)

    @rule(name=JOBS)
    def wait(self, name: str) -> None:
        """Wait for what may come."""
        job = self.job(name)
        job.wait_for_block(MOMENT)
        job.wait(job.keys.bell, MOMENT)
        job.wait(job.keys.room, MOMENT)


class FarmSteps(Steps):
    """What schedulers, workers and askers do with the farm's own keys."""

    def __init__(self, live: LiveServer) -> None:
        super().__init__(live)
        self.lane = Lane(self.farm.client, LIMITS)
        self.taken: list[Taken] = []
        self.sent = 0
        while len(self.taken) < 2:  # so that no step is in vain
            self.ask(1, 2, 1)
            self.take(1, "one", 1)

    # The scheduler, and who it speaks with.

    @rule(worker=WORKERS, incarnation=st.sampled_from("12"), seconds=st.sampled_from([0.02, 6.0]))
    def beat(self, worker: str, incarnation: str, seconds: float) -> None:
        """A worker says that it lives."""
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
        """A scheduler takes the lock and says what is to be done, or is too late."""
        with self.refused():
            fence = self.farm.elect(token, seconds) or fence
            plan = Plan(worker="one", fence=fence, shares=[])
            self.farm.publish([plan], fence, seconds, ["one"])
        self.farm.plan("one")
        self.farm.has_scheduler()
        self.farm.wait_for_plan("one", MOMENT)

    @rule(fence=SEVERAL)
    def abdicate(self, fence: int) -> None:
        """A scheduler gives its lock up, if it is its own."""
        self.farm.abdicate(fence)

    @rule(passes=st.lists(st.just("size"), max_size=1), budget=SEVERAL)
    def remember(self, passes: list[str], budget: int) -> None:
        """What the farm keeps for itself and for people."""
        rate = Rate(tokens_per_second=1.0, overhead_seconds=0.1, updated=1.0, samples=budget)
        with self.refused():
            self.farm.report(COMPLETION, 1000)
            self.farm.sample(SAMPLE)
            self.farm.set_policy(passes)
            self.farm.tell(DECISION, STATS)
            self.farm.remember({f"one|{budget}": rate}, ["one|2"])
            self.farm.learn_budget("cpu", "m", budget)
        self.farm.policy()
        self.farm.decisions(2)
        self.farm.scheduler_stats()
        self.farm.history()
        self.farm.budget("cpu", "m")
        self.farm.samples(10)
        self.farm.recent_batches(10)
        self.farm.events("$", MOMENT)
        self.farm.events("0", MOMENT)

    # Interactive requests.

    @rule(dimensions=SEVERAL, pieces=SEVERAL, size=st.sampled_from([1, 100]))
    def ask(self, dimensions: int, pieces: int, size: int) -> None:
        """Send a request, if there is room."""
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
        """Lease pieces."""
        engine = engine_key(JobSpec(model=f"null:{dimensions}"))
        with self.refused():
            self.taken += self.lane.take(engine, worker, enough)
        with self.refused():  # the lane may expire while one looks
            self.lane.oldest(engine)
        self.lane.waiting(engine)
        self.lane.bells(self.lane.now(), MOMENT)
        self.lane.bells("0", MOMENT)
        self.lane.asked()

    @rule(dimensions=SEVERAL, worker=WORKERS, picks=PICKS)
    def answer(self, dimensions: int, worker: str, picks: list[int]) -> None:
        """Answer pieces, or keep them, or take them out."""
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
        """An asker gives up."""
        spec = JobSpec(model=f"null:{dimensions}")
        chosen = [self.taken[-1 - pick % len(self.taken)] for pick in picks]
        piece = LanePiece(id=chosen[0].id, spec=spec, place=0, texts=["t"], timeout_seconds=1.0)
        self.lane._withdraw([piece], [each.entry for each in chosen])

    @rule(worker=WORKERS)
    def load(self, worker: str) -> None:
        """Who may load an engine, and who cannot."""
        with self.refused():
            self.lane.claim_loading("e", worker)
        with self.refused():
            self.lane.refuse("e", worker, "no")
        self.lane.unloaded("e")
        self.lane.end_loading("e")
