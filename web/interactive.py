"""Interactive requests, which wait for vectors of a few texts: a thread each, and not too many."""

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeVar, cast

import anyio.to_thread
import numpy as np
from anyio import CapacityLimiter
from fastapi import Depends, HTTPException, Request
from numpy.typing import NDArray

from embedfarm.contract import tracing
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.lane import Lane, LaneFull, LaneLate, LaneRefused, LaneUnserved
from embedfarm.contract.load_forecast import seconds_until_loaded
from embedfarm.contract.records import LaneAnswer

T = TypeVar("T")
BUSY_SECONDS: Final = 1
COMPARED_SECONDS: Final = 600.0
COMPARED_MAX: Final = 256  # outputs, each by the models that were compared with it
DIMENSIONS_MAX: Final = 1 << 16  # that may be asked for
FAILED_MAX: Final = 3  # texts that an error names
PLACES_FACTOR: Final = 7  # times the places that are left, which requests for one model may have


@dataclass
class Compared:
    """Remembers for some time what was compared, and agreed; any thread may ask."""

    _until: OrderedDict[Hashable, float] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def holds(self, key: Hashable) -> bool:
        """Tell whether something was compared lately."""
        with self._lock:
            return time.monotonic() < self._until.get(key, 0.0)

    def add(self, key: Hashable) -> None:
        """Note that something was compared now."""
        with self._lock:
            self._until.pop(key, None)
            self._until[key] = time.monotonic() + COMPARED_SECONDS
            while len(self._until) > COMPARED_MAX:
                self._until.popitem(last=False)


@dataclass
class InteractiveRequests:
    """Takes interactive requests to the lane, each in a thread, and bounds how many wait.

    Requests for one model have up to `PLACES_FACTOR` times the places that are left, so that those
    which wait for a model in vain never take the places of the others (the dynamic threshold of
    Choudhury and Hahne 1998): of 256 one model has up to 224, two have up to 119 each.

    Attributes:
        lane: Queue on the server where workers find interactive requests.
        waiting_max: Most requests, and threads, at a time.
        waiting: Requests that wait now, by model.
        compared: What workers were found to make the vectors of.
    """

    lane: Lane
    waiting_max: int
    waiting: Counter[str] = field(default_factory=Counter)
    compared: Compared = field(default_factory=Compared)
    _limiter: CapacityLimiter = field(init=False)

    def __post_init__(self) -> None:
        self._limiter = CapacityLimiter(self.waiting_max)

    async def run(self, work: Callable[[], T], model: str = "") -> T:
        """Run work in a thread and return its outcome; all that blocks or computes belongs there.

        Args:
            work: What is run.
            model: Name of the model that it waits for, "" where it is not known yet, or none.

        Raises:
            HTTPException: Too many requests wait, or the work raised one.
        """
        total = self.waiting.total()
        free = self.waiting_max - total
        if free <= 0:
            raise _busy(f"{total} requests wait", BUSY_SECONDS)
        if self.waiting[model] >= PLACES_FACTOR * free:
            raise _busy(f"{self.waiting[model]} requests wait for {model}", BUSY_SECONDS)
        self.waiting[model] += 1
        try:
            return await anyio.to_thread.run_sync(work, limiter=self._limiter)
        finally:
            self.waiting[model] -= 1
            if not self.waiting[model]:
                del self.waiting[model]

    def embed(
        self,
        model: str,
        texts: Sequence[str],
        *,
        truncate: bool = True,
        prompt_name: str = "",
        task: str = "",
    ) -> LaneAnswer:
        """Embed texts on the farm, vectors as the model makes them; this blocks: call in a thread.

        The caller normalizes vectors and cuts dimensions, so that all requests share one engine.
        A `task` is as in `JobSpec`.

        Raises:
            HTTPException: The farm gave no vectors; the status says whose fault it is.
        """
        long = "truncate" if truncate else "error"
        spec = JobSpec(model=model, long=long, prompt_name=prompt_name, task=task)
        try:
            with tracing.span("lane", model=model, texts=len(texts)):
                answer = self.lane.ask(spec, texts, self.lane.settings.lane_seconds_max)
        except LaneFull as error:
            raise _busy(str(error), error.retry_seconds) from error
        except LaneLate as error:
            again = {"retry-after": str(math.ceil(self._forecast(spec)))}
            raise HTTPException(503, str(error), again) from error
        except LaneUnserved as error:
            raise HTTPException(404 if prompt_name else 422, str(error)) from error
        except LaneRefused as error:
            raise HTTPException(422, str(error)) from error
        if answer.errors:
            named = [f"text {each.index}: {each.reason}" for each in answer.errors[:FAILED_MAX]]
            raise HTTPException(422, f"{len(answer.errors)} texts failed: {'; '.join(named)}")
        return answer

    def _forecast(self, spec: JobSpec) -> float:
        """Return the seconds after which a request that had no answer may be worth another try."""
        beats = FarmClient(self.lane.client).workers()
        return seconds_until_loaded(beats, spec, time.time())


def _busy(detail: str, seconds: float) -> HTTPException:
    return HTTPException(429, detail, {"retry-after": str(max(1, math.ceil(seconds)))})


def shape(
    vectors: NDArray[np.float32], dimensions: int | None = None, *, normalize: bool = True
) -> NDArray[np.float32]:
    """Cut vectors to their leading `dimensions`, and scale them to length 1 if wanted.

    Raises:
        HTTPException: The vectors have fewer components.
    """
    full = vectors.shape[1]
    if dimensions is not None and dimensions > full:
        raise HTTPException(422, f"dimensions: the model has {full}")
    kept = vectors[:, :dimensions]
    if not normalize:
        return kept
    lengths = np.linalg.norm(kept, axis=1, keepdims=True)
    return (kept / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)


def are_unit(vectors: NDArray[np.float32]) -> bool:
    """Tell whether all vectors have length 1, as far as float32 tells."""
    return bool(np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4))


async def _interactive(request: Request) -> InteractiveRequests:
    return cast("InteractiveRequests", request.app.state.interactive)


Interactive = Annotated[InteractiveRequests, Depends(_interactive)]
