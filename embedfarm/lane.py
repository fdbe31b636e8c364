"""The interactive lane: a few texts whose vectors somebody waits for.

A request is an entry of a stream that all workers with its model read as one group: the one whose
device comes free first takes it, and nobody dispatches. Its answer is a list of one item on which
the asker waits. A request whose worker dies is delivered again; the first answer counts.
"""

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

import numpy as np
import redis
from numpy.typing import NDArray
from redis.commands.core import Script

from embedfarm import wire
from embedfarm.broker import block_ms
from embedfarm.farm import engine_key
from embedfarm.records import JobSpec, LaneAnswer, LaneRequest, decode, encode
from embedfarm.settings import Settings

REPLY_SECONDS: Final = 30  # the asker waits for it; this is for one that died
UNLOADED_SECONDS: Final = 30
LOADER_SECONDS: Final = 60  # a worker that loads for longer may get company
BELLS_MAX: Final = 64


class LaneError(RuntimeError):
    """No vectors; the message says why."""


class LaneFull(LaneError):
    """Too many requests wait; the message says when to try again.

    Attributes:
        retry_seconds: For so long the oldest of them has been waiting.
    """

    def __init__(self, retry_seconds: float) -> None:
        super().__init__(f"too many requests wait; try again in {math.ceil(retry_seconds)} s")
        self.retry_seconds = retry_seconds


class LaneLate(LaneError):
    """No answer in time."""


class LaneRefused(LaneError):
    """The request as it is cannot be answered."""


class TextsFailed(LaneError):
    """Some of the texts have no vector.

    Attributes:
        reasons: By place of the text in the request.
        vectors: Of all texts, shape (n, dimensions); those of the failed ones are zero.
    """

    def __init__(self, answer: LaneAnswer) -> None:
        self.reasons = {error.index: error.reason for error in answer.errors}
        self.vectors = answer.matrix()
        place, reason = next(iter(self.reasons.items()))
        super().__init__(f"{len(self.reasons)} texts failed, such as text {place}: {reason}")


class Taken(NamedTuple):
    """A request that a worker has leased.

    Attributes:
        entry: Its entry's ID.
        id: The asker's.
        data: The encoded request.
        waited_seconds: Since it arrived on the server.
        deliveries: How often it was leased, this time included.
    """

    entry: str
    id: str
    data: bytes
    waited_seconds: float
    deliveries: int


@dataclass
class Lane:
    """A handle on the lanes of a farm; safe between threads."""

    client: redis.Redis
    settings: Settings = field(default_factory=Settings)

    def _script(self, name: str) -> Script:
        return self.client.register_script(wire.script(name))

    # The asker's side.

    def embed(
        self, spec: JobSpec, texts: Sequence[str], timeout_seconds: float
    ) -> NDArray[np.float32]:
        """Vectors of the texts, shape (n, dimensions), in float32 whatever `spec` stores.

        Raises:
            TextsFailed: Some texts have no vector; the others' come with it.
            LaneFull, LaneLate, LaneRefused: As `ask`.
        """
        answer = self.ask(spec, texts, timeout_seconds)
        if answer.errors:
            raise TextsFailed(answer)
        return answer.matrix()

    def ask(self, spec: JobSpec, texts: Sequence[str], timeout_seconds: float) -> LaneAnswer:
        """The answer of the worker that is free first; some of the texts may have failed.

        Raises:
            LaneFull: Too many requests wait already.
            LaneLate: Nobody answered within `timeout_seconds`.
            LaneRefused: The request is beyond the limits, or no worker can load the model.
            redis.ConnectionError, redis.TimeoutError: The server is away. Asking again is safe.
        """
        self._check(texts, timeout_seconds)
        request = LaneRequest(
            id=uuid.uuid4().hex, spec=spec, texts=list(texts), timeout_seconds=timeout_seconds
        )
        deadline = time.monotonic() + timeout_seconds
        entry = self.send(request)
        answer = self._wait(request.id, deadline)
        if answer is None:
            answer = self._withdraw(request, entry)
        if answer.reason:
            raise (LaneLate if answer.late else LaneRefused)(answer.reason)
        return answer

    def send(self, request: LaneRequest) -> str:
        """Put a request into its lane; the ID of its entry.

        Raises:
            LaneFull: Too many requests wait already.
        """
        engine, limits = engine_key(request.spec), self.settings
        word, value = self._script("ask")(
            keys=[wire.lane_key(engine), wire.LANES, wire.LANE_BELL],
            args=[
                engine,
                request.id,
                encode(request),
                limits.lane_requests_max,
                limits.lanes_max,
                int(limits.lane_seconds_max * 1000),
            ],
        )
        if word == b"full":
            raise LaneFull(int(value) / 1000)
        return str(value, "ascii")

    def _check(self, texts: Sequence[str], timeout_seconds: float) -> None:
        """Refuse what would fill the server, or wait for ever."""
        limits = self.settings
        if not 0 < len(texts) <= limits.lane_texts_max:
            raise LaneRefused(f"{len(texts)} texts: 1 to {limits.lane_texts_max} are taken")
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise LaneRefused(f"a text that is no Unicode: {error}") from error
        if size > limits.lane_bytes_max:
            raise LaneRefused(f"{size} bytes of text: at most {limits.lane_bytes_max} are taken")
        if not 0 < timeout_seconds <= limits.lane_seconds_max:
            raise LaneRefused(f"it may wait up to {limits.lane_seconds_max:g} s")

    def _wait(self, request: str, deadline: float) -> LaneAnswer | None:
        """The answer, None if it does not come by the deadline in monotonic time."""
        while (left := deadline - time.monotonic()) > 0:
            key = wire.reply_key(request)
            found = self.client.blpop([key], timeout=block_ms(left) / 1000)
            if found is not None:
                return decode(LaneAnswer, cast("list[bytes]", found)[1])
        return None

    def _withdraw(self, request: LaneRequest, entry: str) -> LaneAnswer:
        """Take a request out of its lane; the answer that came meanwhile, else that it is late."""
        engine = engine_key(request.spec)
        pipe = self.client.pipeline(transaction=True)
        pipe.xack(wire.lane_key(engine), wire.GROUP, entry)
        pipe.xdel(wire.lane_key(engine), entry)
        pipe.lpop(wire.reply_key(request.id))
        *_, data = pipe.execute()
        if data is not None:
            return decode(LaneAnswer, data)
        reason = f"no answer within {request.timeout_seconds:g} s"
        reasons = [f"{name}: {said}" for name, said in self.unloaded(engine).items()]
        return LaneAnswer(reason="; ".join([reason, *reasons]), late=True)

    # The worker's side.

    def bells(self, after: str, seconds: float) -> tuple[str, set[str]]:
        """Engines that were asked for since ID `after`.

        Args:
            after: Where the last call ended; `now` at first.
            seconds: Time to wait for the first one, as `block_ms`.

        Returns:
            The ID to go on from, and the engines.
        """
        answer = self.client.xread({wire.LANE_BELL: after}, BELLS_MAX, block_ms(seconds))
        items: list[Any] = [item for _, rows in cast("list[Any]", answer or []) for item in rows]
        last = items[-1][0].decode() if items else after
        return last, {fields[b"engine"].decode() for _, fields in items}

    def now(self) -> str:
        """The ID from which later bells are heard."""
        seconds, microseconds = self.client.time()
        return f"{seconds * 1000 + microseconds // 1000}-0"

    def waiting(self, engine: str) -> bool:
        """Whether there are requests, those that are being answered included."""
        return bool(self.client.exists(wire.lane_key(engine))) and bool(
            self.client.xlen(wire.lane_key(engine))
        )

    def take(self, engine: str, worker: str, bytes_enough: int) -> list[Taken]:
        """Lease requests, at least one if there is any, until they have `bytes_enough` together.

        One whose worker fell silent comes alone. When the reply is lost, so is the worker.
        """
        lease = int(self.settings.lane_lease_seconds * 1000)
        now, deliveries, entries = self._script("take")(
            keys=[wire.lane_key(engine)], args=[worker, lease, bytes_enough]
        )
        return [
            Taken(
                entry=entry.decode(),
                id=fields[1].decode(),
                data=fields[3],
                waited_seconds=(now - int(entry.split(b"-")[0])) / 1000,
                deliveries=deliveries,
            )
            for entry, fields in entries
        ]

    def answer(self, engine: str, answers: Sequence[tuple[str, str, LaneAnswer]]) -> list[bool]:
        """Answer requests, given as entry and id, in one round trip.

        Returns:
            For each whether the asker gets it: not when another answer was first, nor when the
            asker has given up.
        """
        pipe = self.client.pipeline(transaction=False)
        script = self._script("answer")
        for entry, request, answer in answers:
            script(
                keys=[wire.lane_key(engine), wire.reply_key(request)],
                args=[entry, encode(answer), REPLY_SECONDS * 1000],
                client=pipe,
            )
        return [word == b"answered" for word in pipe.execute()]

    def renew(self, engine: str, worker: str, entries: Sequence[str]) -> None:
        """Keep leases."""
        if self.client.exists(wire.lane_key(engine)):
            self._script("renew")(keys=[wire.lane_key(engine)], args=[worker, *entries])

    # Which engines are wanted.

    def asked(self) -> list[str]:
        """Engines that were asked for lately, the latest first."""
        found = cast("list[bytes]", self.client.zrevrange(wire.LANES, 0, -1))
        return [each.decode() for each in found]

    def oldest(self, engine: str) -> Taken | None:
        """The oldest request that no live worker has in hand, left where it is."""
        key = wire.lane_key(engine)
        if not self.client.exists(key):
            return None
        groups = self.client.xinfo_groups(key)
        idle = int(self.settings.lane_lease_seconds * 1000)
        silent = self.client.xpending_range(key, wire.GROUP, "-", "+", 1, idle=idle)
        first = silent[0]["message_id"] if silent else b"(" + groups[0]["last-delivered-id"]
        rows = cast("list[Any]", self.client.xrange(key, first, "+", 1))
        seconds, microseconds = self.client.time()
        for entry, fields in rows:
            waited = seconds + microseconds / 1e6 - int(entry.split(b"-")[0]) / 1000
            return Taken(entry.decode(), fields[b"id"].decode(), fields[b"request"], waited, 0)
        return None

    def claim_loading(self, engine: str, worker: str) -> bool:
        """Whether this worker may load an engine: one at a time, so that the others stay ready."""
        key = wire.loader_key(engine)
        return bool(self.client.set(key, worker, nx=True, ex=LOADER_SECONDS))

    def end_loading(self, engine: str) -> None:
        """Let others load it as well, if one worker is not enough."""
        self.client.unlink(wire.loader_key(engine))

    def refuse(self, engine: str, worker: str, reason: str) -> None:
        """Note that a worker cannot load an engine; forgotten soon, as the model may arrive."""
        pipe = self.client.pipeline(transaction=True)
        pipe.hset(wire.unloaded_key(engine), worker, reason)
        pipe.expire(wire.unloaded_key(engine), UNLOADED_SECONDS)
        pipe.execute()

    def unloaded(self, engine: str) -> dict[str, str]:
        """Why workers could not load an engine, by worker."""
        stored = cast("dict[bytes, bytes]", self.client.hgetall(wire.unloaded_key(engine)))
        return {name.decode(): reason.decode() for name, reason in stored.items()}
