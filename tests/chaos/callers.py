"""Those who use a farm while it is shot at: vectors by HTTP, and small jobs through RQ."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from numpy.typing import NDArray
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchJobError

from embedfarm.broker import UNAVAILABLE, closing_client
from producer.tasks import QUEUE
from tests.chaos.outcome import COSINE_MIN
from tests.chaos.roles import write_texts
from tests.farm.harness import read_parquet

ASK_SECONDS: Final = 2.0
ANSWER_SECONDS_MAX: Final = 60.0
ENQUEUE_SECONDS: Final = 10.0
JOB_SECONDS_MAX: Final = 300.0
JOB_CHUNKS: Final = 32
REFUSALS: Final = {429, 503}
NOBODY_SERVES: Final = (httpx.NetworkError, httpx.RemoteProtocolError)  # refused, or cut off
OVER: Final = {"finished", "failed", "stopped", "canceled"}
LOOK_SECONDS: Final = 0.5


def cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Cosines row by row."""
    left, right = one.astype(np.float64), other.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray(np.sum(left * right, axis=1) / norms)


@dataclass
class Callers:
    """Two threads that ask, and compare what they get with what a quiet farm gave.

    Attributes:
        url: The server.
        port: Of HTTP.
        model: That they ask for.
        texts: What they ask about.
        vectors: Of a quiet run, a row for each text.
        place: Where small jobs put their output.
        answered: Requests that got their vector.
        served: Monotonic time at which the last of them began.
        refused: Requests that were told to come again, or met nobody.
        wrong: Other answers than these, in words.
        unanswered: Requests that waited in vain, in words.
        jobs: Small jobs that ended well.
        enqueued: How often one was enqueued: again, if a failover has forgotten it.
        failed: Small jobs that did not, in words.
    """

    url: str
    port: int
    model: str
    texts: list[str]
    vectors: NDArray[np.float32]
    place: Path
    answered: int = 0
    served: float = 0.0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    jobs: int = 0
    enqueued: int = 0
    failed: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin to ask."""
        self._threads = [
            threading.Thread(target=self._guard, args=[each]) for each in (self._ask, self._enqueue)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End; a small job that runs is waited for."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _guard(self, work: Callable[[], None]) -> None:
        """Do it; who gives up early is a finding."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 # whatever it is, it is reported
            self.failed.append(f"{work.__name__} ended: {error!r}")

    def _ask(self) -> None:
        for row in itertools.cycle(range(len(self.texts))):
            if self._ended.wait(ASK_SECONDS):
                return
            self.ask_for(row)

    def ask_for(self, row: int) -> None:
        """Ask for the vector of a text, once; what a restart explains is no finding."""
        url = f"http://127.0.0.1:{self.port}/v1/embeddings"
        request = {"model": self.model, "input": self.texts[row]}
        began = time.monotonic()
        try:
            answer = httpx.post(url, json=request, timeout=ANSWER_SECONDS_MAX)
        except NOBODY_SERVES:
            self.refused += 1
            return
        except httpx.HTTPError as error:
            seconds = time.monotonic() - began
            self.unanswered.append(f"HTTP, after {seconds:.0f} s: {error!r}")
            return
        if answer.status_code in REFUSALS:
            self.refused += 1
            return
        if answer.status_code != httpx.codes.OK:
            self.wrong.append(f"HTTP {answer.status_code}: {answer.text}")
            return
        vector = np.asarray([answer.json()["data"][0]["embedding"]], dtype=np.float32)
        if self._is_right(vector, row, f"the vector of text {row} by HTTP", self.wrong):
            self.answered += 1
            self.served = began

    def _is_right(
        self, vectors: NDArray[np.float32], first: int, what: str, findings: list[str]
    ) -> bool:
        least = cosines(vectors, self.vectors[first : first + len(vectors)]).min()
        if not least >= COSINE_MIN:
            findings.append(f"{what}: cosine {least}")
        return bool(least >= COSINE_MIN)

    def _enqueue(self) -> None:
        with closing_client(self.url) as connection:
            queue = Queue(QUEUE, connection, serializer="json")
            for number in itertools.count():
                if self._ended.wait(ENQUEUE_SECONDS):
                    return
                self._do(queue, number)

    def _do(self, queue: Queue, number: int) -> None:
        """One small job, to its end."""
        name = f"small-{number}"
        first = number * JOB_CHUNKS % (len(self.texts) - JOB_CHUNKS)
        texts = self.texts[first : first + JOB_CHUNKS]
        corpus, out = write_texts(self.place / f"{name}.jsonl", texts), self.place / name
        words = ("producer.tasks.embed_corpus", str(corpus), str(out))
        deadline = time.monotonic() + JOB_SECONDS_MAX
        status = ""
        while status not in OVER and time.monotonic() < deadline:
            with contextlib.suppress(*UNAVAILABLE):  # as any client, it tries again
                status = self._look(queue, name, words)
            threading.Event().wait(LOOK_SECONDS)
        if status != "finished":
            self.failed.append(f"{name} is {status}: see {out}")
            return
        indices, vectors, _ = read_parquet(out)
        if indices != list(range(JOB_CHUNKS)):
            self.failed.append(f"{name} has the indices {indices}")
        elif self._is_right(vectors, first, name, self.failed):
            self.jobs += 1

    def _look(self, queue: Queue, name: str, words: tuple[str, ...]) -> str:
        """Status of a job; it is enqueued if the server does not know it."""
        try:
            return queue.job_class.fetch(name, queue.connection, "json").get_status().value
        except (NoSuchJobError, InvalidJobOperation):  # the latter if it goes between the two
            self.enqueued += 1
            job = queue.enqueue(*words, model=self.model, job_id=name)
            return job.get_status().value
