"""Small jobs of tenants, through RQ under ids that come again, and by HTTP."""

import contextlib
import itertools
import json
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from numpy.typing import NDArray
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job

from embedfarm.contract.broker import UNAVAILABLE, closing_client
from embedfarm.ingest.tasks import QUEUE
from tests.chaos.commands import World, remove_job
from tests.chaos.corpora import Vectors, compare, write_texts
from tests.chaos.outcome import COSINE_MIN
from tests.chaos.tally import Tally
from tests.chaos.tenants import Answer, Door, Tenant
from tests.farm.harness import read_parquet

EVERY_SECONDS: Final = 6.0  # between two jobs of a door
JOB_SECONDS_MAX: Final = 300.0
OVER: Final = {"finished", "failed", "stopped", "canceled", "cancelled"}
LOOK_SECONDS: Final = 0.5
IDS: Final = 2  # of each tenant, in turn
TAKEN: Final = "fills another output"
ACCEPTED: Final = 300  # below


@dataclass
class Asking:
    """The model, the vectors and the tally that small jobs of either door share.

    Attributes:
        model: The model that they ask for.
        known: The vectors of all texts.
        place: Directory of the outputs of RQ jobs.
        world: The servers and faults that may explain a failure.
        tally: Counts how they end.
        ended: Set when no more jobs are wanted.
    """

    model: str
    known: Vectors
    place: Path
    world: World
    tally: Tally
    ended: threading.Event

    def settle(
        self, door: str, name: str, texts: list[str], indices: list[int], got: NDArray[np.float32]
    ) -> None:
        """Compare a job's vectors with those of its texts, and count the result."""
        found = compare(indices, got, texts, self.known)
        if not found.cosine >= COSINE_MIN:
            self.tally.failed.append(f"{name}, {door}: {found}")
            return
        self.tally.jobs[door] += 1

    def may_fail(self, began: float) -> bool:
        """Tell whether a disk failed since a monotonic time."""
        return self.world.failing.overlap(began, time.monotonic())


def turned(tenant: Tenant, number: int) -> list[str]:
    """Return a tenant's texts, rotated by the number of the job."""
    place = number % len(tenant.texts)
    return [*tenant.texts[place:], *tenant.texts[:place]]


# Through RQ.


@dataclass
class Life:
    """A job under an id that other jobs had before it.

    Attributes:
        name: The id, on the farm too.
        corpus, out: The corpus and the output of this job alone.
        tenant: Name of the tenant.
        began: Monotonic time at which it was first asked for.
        before: Unix time at which the job before it was asked for, and not yet ended.
    """

    name: str
    corpus: Path
    out: Path
    tenant: str
    began: float
    before: float


@dataclass
class RqJobs:
    """A caller that enqueues one small job after the other through RQ."""

    asking: Asking
    tenants: list[Tenant]
    _asked: defaultdict[str, float] = field(default_factory=lambda: defaultdict(time.time))

    def run(self) -> None:
        """Do jobs until no more are wanted."""
        with closing_client(self.asking.world.settings.redis_url) as connection:
            queue = Queue(QUEUE, connection, serializer="json")
            for number in itertools.count():
                if self.asking.ended.wait(EVERY_SECONDS):
                    return
                self.do(queue, number)

    def do(self, queue: Queue, number: int) -> None:
        """Do a job to its end, and compare its vectors."""
        turn, tenant = divmod(number, len(self.tenants))
        owner, place = self.tenants[tenant], self.asking.place
        texts, name = turned(owner, number), f"{owner.name}-small-{turn % IDS}"
        owner.add("job", name)
        out = place / f"{name}-{number}"
        life = Life(
            name, out.with_suffix(".jsonl"), out, owner.name, time.monotonic(), self._asked[name]
        )
        self._asked[name] = time.time()
        write_texts(life.corpus, texts)
        status = self._follow(queue, life)
        if status != "finished":
            self.asking.tally.failed.append(f"{name} is {status}: see {out}")
            return
        indices, vectors, _ = read_parquet(out)
        self.asking.settle("RQ", str(out), texts, indices, vectors)

    def _follow(self, queue: Queue, life: Life) -> str:
        """Wait for the end of a job, and return its status; ask again where that is right."""
        status = ""
        while status not in OVER and time.monotonic() < life.began + JOB_SECONDS_MAX:
            with contextlib.suppress(*UNAVAILABLE):  # as any client, it tries again
                status = self._look(queue, life)
            threading.Event().wait(LOOK_SECONDS)
        return status

    def _look(self, queue: Queue, life: Life) -> str:
        """Return the status of a job; enqueue it if the server does not know it."""
        try:
            job = queue.job_class.fetch(life.name, queue.connection, "json")
            if job.args[1] == str(life.out):
                status = job.get_status().value
                return "" if status == "failed" and self._ask_again(queue, job, life) else status
        except (NoSuchJobError, InvalidJobOperation):  # the latter if it goes between the two
            pass
        return self._enqueue(queue, life)

    def _enqueue(self, queue: Queue, life: Life) -> str:
        kwargs = {"model": self.asking.model, "job_id": life.name, "tenant": life.tenant}
        words = (str(life.corpus), str(life.out))
        job = queue.enqueue_call(
            "producer.tasks.embed_corpus", words, kwargs, job_id=life.name
        )  # fmt: skip
        return str(job.get_status().value)

    def _ask_again(self, queue: Queue, job: Job, life: Life) -> bool:
        """Ask again for a job whose failure has an explanation; return whether it has one."""
        reason = _reason(job)
        if TAKEN in reason and self.asking.world.servers.lost_since(life.before):
            remove_job(life.name, self.asking.world.settings)
        elif not self.asking.may_fail(life.began):
            self.asking.tally.failed.append(f"{life.name}: {reason[-2000:]}")
            return False
        self.asking.tally.again += 1
        self._enqueue(queue, life)
        return True


def _reason(job: Job) -> str:
    """Return what RQ keeps of a failure."""
    result = job.latest_result()
    return "" if result is None else str(result.exc_string)


# By HTTP.


@dataclass
class HttpJobs:
    """A caller that sends one small job after the other by HTTP."""

    asking: Asking
    doors: list[Door]

    def run(self) -> None:
        """Upload a file for each tenant, and do jobs until no more are wanted."""
        for door in self.doors:
            self._upload(door)
        for number in itertools.count():
            if self.asking.ended.wait(EVERY_SECONDS):
                return
            self.do(self.doors[number % len(self.doors)], number)

    def _upload(self, door: Door) -> None:
        """Upload a file of a tenant, of which others must not hear."""
        assert door.tenant is not None
        name = door.tenant.name
        form = {"file": (f"{name}.jsonl", json.dumps({"note": name}).encode())}
        request = {"files": form, "data": {"purpose": "batch"}}
        answer = self._insist(door, "POST", "/v1/files", **request)
        if answer is not None:
            door.tenant.add("file", json.loads(answer.body)["id"])

    def do(self, door: Door, number: int) -> None:
        """Do a job to its end, and compare its vectors."""
        assert door.tenant is not None
        began, asked = time.monotonic(), time.time()
        texts, name = turned(door.tenant, number), f"{door.tenant.name}-{number}"
        order = {"texts": texts, "name": name, "model": self.asking.model}
        answer = self._insist(
            door, "POST", "/v1/jobs", json=order, headers={"idempotency-key": name}
        )
        if answer is None:
            return
        if answer.status >= ACCEPTED:
            self._blame(name, f"{answer.status} {answer.body[:500]}", asked)
            return
        job = json.loads(answer.body)["job"]
        door.tenant.add("job", job)
        state = self._follow(door, job, began)
        if state != "finished":
            self._blame(name, f"job {job} is {state}", asked)
            return
        self._read(door, job, texts, asked)

    def _insist(self, door: Door, verb: str, path: str, **request: Any) -> Answer | None:  # noqa: ANN401 # as httpx has them
        """Ask until there is an answer, and return it; None when no more jobs are wanted."""
        while True:
            answer = door.ask(verb, path, **request)
            if answer is not None or self.asking.ended.wait(LOOK_SECONDS):
                return answer

    def _blame(self, name: str, what: str, asked: float) -> None:
        """Note a failure, unless a server has forgotten what it was asked for."""
        if self.asking.world.servers.lost_since(asked):
            self.asking.tally.again += 1
        elif not self.asking.ended.is_set():
            self.asking.tally.failed.append(f"{name} by HTTP: {what}")

    def _follow(self, door: Door, job: str, began: float) -> str:
        """Wait for the end of a job, and return its state; retry it if a disk failed."""
        state = ""
        while state not in OVER and time.monotonic() < began + JOB_SECONDS_MAX:
            answer = door.ask("GET", f"/v1/jobs/{job}")
            if answer is not None and answer.status == httpx.codes.NOT_FOUND:
                return "gone"
            if answer is not None and answer.status == httpx.codes.OK:
                state = json.loads(answer.body)["state"]
            if state == "failed" and self.asking.may_fail(began):
                self.asking.tally.again += 1
                door.ask("POST", f"/v1/jobs/{job}/retry")
                state = ""
            threading.Event().wait(LOOK_SECONDS)
        return state

    def _read(self, door: Door, job: str, texts: list[str], asked: float) -> None:
        """Read the results with the tenant's own key, page by page, and compare them."""
        lines: list[dict[str, Any]] = []
        start, complete = 0, False
        while not complete:
            path = f"/v1/jobs/{job}/results"
            answer = self._insist(door, "GET", path, params={"start": start})
            if answer is None:
                return
            if answer.status != httpx.codes.OK:
                self._blame(job, f"{path}: {answer.status} {answer.body[:500]}", asked)
                return
            lines += map(json.loads, answer.body.splitlines())
            start, before = int(answer.head["x-next-start"]), start
            complete = answer.head["x-complete"] == "true" or start == before
        good = [line for line in lines if "embedding" in line]
        vectors = np.asarray([line["embedding"] for line in good], dtype=np.float32)
        self.asking.settle("HTTP", job, texts, [line["index"] for line in good], vectors)
