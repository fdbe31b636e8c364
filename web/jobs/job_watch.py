"""One task that watches jobs on behalf of all streams and long polls."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, cast

import anyio.to_thread
import redis
from fastapi import Depends, HTTPException, Request

from embedfarm.watch.overview import JobFacts

LOGGER: Final = logging.getLogger(__name__)
LOOK_SECONDS: Final = 0.25
BUSY_SECONDS: Final = 1


@dataclass
class JobWatch:
    """Task that reads all watched jobs together, as long as there are any.

    So the cost of streams and long polls for the server grows with the jobs that they are about,
    and not with the number of streams. To be used within one event loop.

    Attributes:
        read: Function that returns the facts of the given jobs that are there; called in a thread.
        places_max: Most streams, and answers with results, at a time.
        watched: Number of clients that wait for each job.
    """

    read: Callable[[Sequence[str]], list[JobFacts]]
    places_max: int
    watched: Counter[str] = field(default_factory=Counter)
    _places: int = 0
    _facts: dict[str, JobFacts | None] = field(default_factory=dict)
    _new: set[str] = field(default_factory=set)  # watched since the last look began
    _looked: asyncio.Condition = field(default_factory=asyncio.Condition)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Take one of the places for the time of the block.

        Raises:
            HTTPException: No place is free.
        """
        if self._places >= self.places_max:
            raise HTTPException(
                429, f"{self._places} streams are open", {"retry-after": str(BUSY_SECONDS)}
            )
        self._places += 1
        try:
            yield
        finally:
            self._places -= 1

    @contextlib.contextmanager
    def watching(self, job: str) -> Iterator[None]:
        """Have a job looked at for the time of the block."""
        if job not in self.watched:
            self._new.add(job)
        self.watched[job] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self.watched[job] -= 1
            if not self.watched[job]:
                del self.watched[job]
                self._facts.pop(job, None)

    async def change(self, job: str, seen: JobFacts | None) -> JobFacts | None:
        """Wait until the facts of a watched job differ from `seen`, and return them.

        Returns:
            None if the job is gone, or the watch is closed.
        """
        async with self._looked:
            await self._looked.wait_for(lambda: self._closing.is_set() or self._differs(job, seen))
            return None if self._closing.is_set() else self._facts[job]

    def _differs(self, job: str, seen: JobFacts | None) -> bool:
        facts = self._facts.get(job, seen)
        return facts != seen or (job in self._facts and facts is None)

    @property
    def closed(self) -> bool:
        """Whether all waiting is to end."""
        return self._closing.is_set()

    async def pause(self, seconds: float) -> None:
        """Wait some seconds, but return at once when the watch is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def close(self) -> None:
        """End all waiting, now and from now on."""
        self._closing.set()
        async with self._looked:
            self._looked.notify_all()
        if self._task is not None:
            await self._task

    async def _look(self) -> None:
        while self.watched and not self._closing.is_set():
            jobs = list(self.watched)
            self._new.clear()
            try:
                found = {facts.job: facts for facts in await self._read(jobs)}
            except redis.RedisError as error:
                LOGGER.warning("jobs cannot be watched: %s", type(error).__name__)
            else:
                # Of a job that was left and is watched again, this may be older than the watch.
                kept = [job for job in jobs if job in self.watched and job not in self._new]
                self._facts |= {job: found.get(job) for job in kept}
                async with self._looked:
                    self._looked.notify_all()
            await self.pause(LOOK_SECONDS)

    async def _read(self, jobs: Sequence[str]) -> list[JobFacts]:
        return await anyio.to_thread.run_sync(self.read, jobs)


async def _watch(request: Request) -> JobWatch:
    return cast("JobWatch", request.app.state.watch)


Watching = Annotated[JobWatch, Depends(_watch)]


async def _take_place(watch: Watching) -> AsyncIterator[None]:
    with watch.place():
        yield


PLACE: Final = Depends(_take_place)
"""Of a route whose answer takes a place until all of it is sent."""
