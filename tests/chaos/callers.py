"""Callers that use a farm while it is shot at: vectors by HTTP, small jobs, and readers."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import httpx
import numpy as np

from tests.chaos.corpora import Vectors
from tests.chaos.outcome import COSINE_MIN
from tests.chaos.small_jobs import HttpJobs, RqJobs
from tests.chaos.tally import Tally
from tests.chaos.tenants import Door, Reader

ASK_SECONDS: Final = 2.0


@dataclass
class InteractiveCaller:
    """A caller that asks for vectors by HTTP, and compares them with those of a quiet farm.

    Attributes:
        doors: The doors that it uses in turn.
        model: The model that it asks for.
        known: The vectors of all texts.
        tally: Counts the answers.
    """

    doors: Sequence[Door]
    model: str
    known: Vectors
    tally: Tally

    def run(self, ended: threading.Event) -> None:
        """Ask for one text after the other, of the tenants in turn, until `ended` is set."""
        for number in itertools.count():
            if ended.wait(ASK_SECONDS):
                return
            door = self.doors[number % len(self.doors)]
            texts = door.tenant.texts if door.tenant else list(self.known.rows)
            self.ask_for(door, texts[number % len(texts)])

    def ask_for(self, door: Door, text: str) -> None:
        """Ask once for the vector of a text, and count the answer."""
        began = time.monotonic()
        answer = door.ask("POST", "/v1/embeddings", json={"model": self.model, "input": text})
        if answer is None:
            return
        if answer.status != httpx.codes.OK:
            self.tally.wrong.append(f"HTTP {answer.status}: {answer.body}")
            return
        vector = json.loads(answer.body)["data"][0]["embedding"]
        least = self.known.least_cosine(np.asarray([vector], dtype=np.float32), [text])
        if not least >= COSINE_MIN:
            self.tally.wrong.append(f"the vector of {text[:60]!r} by HTTP: cosine {least}")
            return
        self.tally.answered += 1
        self.tally.served = began


@dataclass
class Callers:
    """All callers, each in a thread.

    Attributes:
        interactive, rq_jobs, http_jobs, readers: The callers.
        tally: Counts what they got.
        ended: Set when they are to end.
    """

    interactive: InteractiveCaller
    rq_jobs: RqJobs
    http_jobs: HttpJobs
    readers: Sequence[Reader]
    tally: Tally
    ended: threading.Event
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Start all callers."""
        works: dict[str, Callable[[], None]] = {
            "asking": lambda: self.interactive.run(self.ended),
            "RQ jobs": self.rq_jobs.run,
            "jobs by HTTP": self.http_jobs.run,
        }
        for number, reader in enumerate(self.readers):
            works[f"reader {number}"] = partial(reader.read, self.ended)
        self._threads = [
            threading.Thread(target=self._guard, args=[name, work], name=name)
            for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop all callers; a small job that runs is waited for."""
        self.ended.set()
        for thread in self._threads:
            thread.join()

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        """Do a caller's work, and note an error that ends it as a finding."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 # whatever it is, it is reported
            self.tally.failed.append(f"{name} ended: {error!r}")
