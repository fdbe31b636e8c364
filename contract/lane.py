"""The interactive lane: requests for vectors of a few texts, whose caller waits for the answer.

A request is cut into pieces, entries of a stream that all workers with its model read as a group:
the one whose device comes free first takes the next, and nobody dispatches. Their answers come in a
list on which the caller waits. What a worker that died had taken is delivered again; the first
answer to a piece counts.
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

from embedfarm.contract import wire
from embedfarm.contract.broker import block_ms
from embedfarm.contract.encoding import RecordError, decode, encode
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_client import engine_key
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import differences
from embedfarm.contract.records import ChunkError, LaneAnswer, LanePiece
from embedfarm.contract.settings import Settings
from embedfarm.contract.unreadable_records import names_of

REPLY_SECONDS: Final = 30  # the caller waits for it; this is for one that died
UNLOADED_SECONDS: Final = 30
LOADER_SECONDS: Final = 60  # a worker that loads for longer may get company
WAKEUPS_MAX: Final = 64
PIECE_BYTES: Final = 1024  # of text: what the slowest device does in a fraction of a second
DIGEST_SHOWN: Final = 16  # characters of a component that differs
PIECES_MAX: Final = 64  # of a request: each costs a round trip's worth of the server's time


class LaneError(EmbedfarmError, RuntimeError):
    """Raised when a request gets no vectors; the message says why."""


class LaneFull(LaneError):
    """Raised when too many requests wait; the message says when to try again.

    Attributes:
        retry_seconds: Seconds for which the oldest of them has been waiting.
    """

    def __init__(self, retry_seconds: float) -> None:
        super().__init__(f"too many requests wait; try again in {math.ceil(retry_seconds)} s")
        self.retry_seconds = retry_seconds


class LaneLate(LaneError):
    """Raised when no answer comes in time."""


class LaneRefused(LaneError):
    """Raised when a request as it is cannot be answered."""


class LaneUnserved(LaneRefused):
    """Raised when no worker can load the model, or it cannot do what is asked for."""


class TextsFailed(LaneError):
    """Raised when some of the texts have no vector.

    Attributes:
        reasons: Reasons of the failures, by place of the text in the request.
        vectors: Vectors of all texts, shape (n, dimensions); rows of failed texts are zero.
    """

    def __init__(self, answer: LaneAnswer) -> None:
        self.reasons = {error.index: error.reason for error in answer.errors}
        self.vectors = answer.matrix()
        place, reason = next(iter(self.reasons.items()))
        super().__init__(f"{len(self.reasons)} texts failed, such as text {place}: {reason}")


class Taken(NamedTuple):
    """A piece of a request that a worker has leased.

    Attributes:
        entry: ID of the piece's stream entry.
        id: Id of the request.
        data: The encoded piece.
        waited_seconds: Time since the piece arrived on the server.
        deliveries: How often the piece was leased, this time included.
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

    # The caller's side.

    def embed(
        self, spec: JobSpec, texts: Sequence[str], timeout_seconds: float
    ) -> NDArray[np.float32]:
        """Return vectors of the texts, shape (n, dimensions), in float32 whatever `spec` stores.

        Raises:
            TextsFailed: Some texts have no vector; the others' come with it.
            LaneFull, LaneLate, LaneRefused: The request has no answer, for the reasons of `ask`.
        """
        answer = self.ask(spec, texts, timeout_seconds)
        if answer.errors:
            raise TextsFailed(answer)
        return answer.matrix()

    def ask(self, spec: JobSpec, texts: Sequence[str], timeout_seconds: float) -> LaneAnswer:
        """Return the answer of the workers that are free first; some of the texts may have failed.

        All of its vectors are of one model: where workers have different ones under the name, while
        its files are replaced for example, one worker answers all of the request.

        Raises:
            LaneFull: Too many requests wait already.
            LaneLate: Nobody answered within `timeout_seconds`, or workers of different models did.
            LaneUnserved: No worker can load the model, or it cannot do what is asked for.
            LaneRefused: The request is beyond the limits, or an answer is damaged.
            redis.ConnectionError, redis.TimeoutError: The server is away. Asking again is safe.
        """
        self._check(texts, timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        answers = self._ask(cut(spec, texts, timeout_seconds), deadline)
        differ = difference(answers)
        if differ:
            left = max(0.0, deadline - time.monotonic())
            try:
                answers = self._ask([whole(spec, texts, left)], deadline)
            except LaneLate as error:
                raise LaneLate(f"{error}; workers have different models: {differ}") from error
        return join(answers)

    def _ask(self, pieces: Sequence[LanePiece], deadline: float) -> list[LaneAnswer]:
        """Return the answers to all pieces of a request, or withdraw it and raise as `ask` does."""
        entries = self.send(pieces)
        answers = self._wait(pieces, deadline)
        refused = [answer for answer in answers if answer.reason]
        if refused or len(answers) < len(pieces):
            self._withdraw(pieces, entries)
        for answer in refused:
            unserved = LaneUnserved if answer.unserved else LaneRefused
            raise (LaneLate if answer.late else unserved)(answer.reason)
        if len(answers) < len(pieces):
            said = self.unloaded(engine_key(pieces[0].spec)).items()
            reasons = [f"{worker}: {reason}" for worker, reason in said]
            late = f"no answer within {pieces[0].timeout_seconds:.4g} s"
            raise LaneLate("; ".join([late, *reasons]))
        return answers

    def send(self, pieces: Sequence[LanePiece]) -> list[str]:
        """Put the pieces of a request into their lane, all or none; return their entries' IDs.

        Raises:
            LaneFull: Too many requests wait already.
        """
        engine, limits = engine_key(pieces[0].spec), self.settings
        word, *values = self._script("ask")(
            keys=[wire.lane_key(engine), wire.LANES, wire.LANE_WAKEUPS, wire.LANE_SIZES],
            args=[
                engine,
                pieces[0].id,
                limits.lane_pieces_max,
                limits.lanes_max,
                limits.lanes_bytes_max,
                int(limits.lane_seconds_max * 1000),
                *map(encode, pieces),
            ],
        )
        if word == b"full":
            raise LaneFull(int(values[0]) / 1000)
        return [str(value, "ascii") for value in values]

    def _check(self, texts: Sequence[str], timeout_seconds: float) -> None:
        """Refuse a request that would fill the server, or wait for too long."""
        limits = self.settings
        if not 0 < len(texts) <= limits.lane_texts_max:
            raise LaneRefused(too_many(len(texts), limits))
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise LaneRefused(f"a text that is no Unicode: {error}") from error
        if size > limits.lane_bytes_max:
            raise LaneRefused(too_long(size, limits))
        if not 0 < timeout_seconds <= limits.lane_seconds_max:
            raise LaneRefused(f"it may wait up to {limits.lane_seconds_max:g} s")

    def _wait(self, pieces: Sequence[LanePiece], deadline: float) -> list[LaneAnswer]:
        """Return the answers up to a monotonic deadline: to all pieces, or until one has failed."""
        answers: list[LaneAnswer] = []
        texts = {piece.place: len(piece.texts) for piece in pieces}
        key = wire.reply_key(pieces[0].id)
        while len(answers) < len(pieces) and (left := deadline - time.monotonic()) > 0:
            found = self.client.blpop([key], timeout=block_ms(left) / 1000)
            if found is None:
                continue
            try:
                answer = decode(LaneAnswer, cast("list[bytes]", found)[1])
                check_answer(answer, texts.pop(answer.place, 0))
                answers.append(answer)
            except RecordError as error:
                answers.append(LaneAnswer(reason=str(error)))
            if answers[-1].reason:
                break
        return answers

    def _withdraw(self, pieces: Sequence[LanePiece], entries: Sequence[str]) -> None:
        """Remove the unanswered pieces of a request from its lane."""
        engine = engine_key(pieces[0].spec)
        self._script("withdraw")(
            keys=[wire.lane_key(engine), wire.reply_key(pieces[0].id), wire.LANE_SIZES],
            args=[engine, *entries],
        )

    # The worker's side.

    def wakeups(self, after: str, seconds: float) -> tuple[str, list[str]]:
        """Return the engines that were asked for since ID `after`, each once, the first one first.

        Args:
            after: ID that the last call returned; `now` at first.
            seconds: Time to wait for the first engine, limited by `block_ms`.

        Returns:
            The ID to go on from, and the engines.
        """
        answer = self.client.xread({wire.LANE_WAKEUPS: after}, WAKEUPS_MAX, block_ms(seconds))
        items: list[Any] = [item for _, rows in cast("list[Any]", answer or []) for item in rows]
        last = items[-1][0].decode() if items else after
        return last, list(dict.fromkeys(names_of(row.get(b"engine", b"") for _, row in items)))

    def now(self) -> str:
        """Return the server's time as an ID, after which `wakeups` finds later requests."""
        seconds, microseconds = self.client.time()
        return f"{seconds * 1000 + microseconds // 1000}-0"

    def waiting(self, engine: str) -> bool:
        """Tell whether an engine's lane has pieces, leased ones included."""
        return bool(self.client.exists(wire.lane_key(engine))) and bool(
            self.client.xlen(wire.lane_key(engine))
        )

    def take(self, engine: str, worker: str, bytes_enough: int) -> list[Taken]:
        """Lease pieces, at least one if there is any, until they have `bytes_enough` together.

        A piece whose worker fell silent comes alone. When the reply is lost, the pieces are leased
        all the same, and are taken again like those of a worker that fell silent.
        """
        lease = int(self.settings.lane_lease_seconds * 1000)
        now, deliveries, entries = self._script("take")(
            keys=[wire.lane_key(engine)], args=[worker, lease, bytes_enough]
        )
        return [
            Taken(
                entry=entry.decode(),
                id=_field(fields, b"id").decode(errors="replace"),
                data=_field(fields, b"piece"),
                waited_seconds=(now - int(entry.split(b"-")[0])) / 1000,
                deliveries=deliveries,
            )
            for entry, fields in entries
        ]

    def answer(self, engine: str, answers: Sequence[tuple[str, str, LaneAnswer]]) -> list[bool]:
        """Answer pieces, each given as entry's ID, request's id and answer, in one round trip.

        Returns:
            Whether the caller gets each answer: not when another answer was first, nor when the
            caller has given up.
        """
        pipe = self.client.pipeline(transaction=False)
        script = self._script("answer")
        for entry, request, answer in answers:
            script(
                keys=[wire.lane_key(engine), wire.reply_key(request), wire.LANE_SIZES],
                args=[entry, engine, encode(answer), REPLY_SECONDS * 1000],
                client=pipe,
            )
        return [word == b"answered" for word in pipe.execute()]

    def renew(self, engine: str, worker: str, entries: Sequence[str]) -> None:
        """Renew a worker's leases on pieces of an engine's lane."""
        if self.client.exists(wire.lane_key(engine)):
            self._script("renew")(keys=[wire.lane_key(engine)], args=[worker, *entries])

    # Which engines are wanted.

    def asked(self) -> list[str]:
        """Return the engines that were asked for lately, the latest first."""
        found = cast("list[bytes]", self.client.zrevrange(wire.LANES, 0, -1))
        return names_of(found)

    def oldest(self, engine: str) -> Taken | None:
        """Return the oldest piece that no live worker has in hand, and leave it where it is."""
        key = wire.lane_key(engine)
        idle = int(self.settings.lane_lease_seconds * 1000)
        try:
            groups = self.client.xinfo_groups(key)
            silent = self.client.xpending_range(key, wire.GROUP, "-", "+", 1, idle=idle)
        except redis.ResponseError as error:
            if "no such key" in str(error).lower():
                return None  # a lane lives as long as somebody may wait in it
            raise
        first = silent[0]["message_id"] if silent else b"(" + groups[0]["last-delivered-id"]
        rows = cast("list[Any]", self.client.xrange(key, first, "+", 1))
        seconds, microseconds = self.client.time()
        for entry, fields in rows:
            waited = seconds + microseconds / 1e6 - int(entry.split(b"-")[0]) / 1000
            words = fields.get(b"id", b"").decode(errors="replace"), fields.get(b"piece", b"")
            return Taken(entry.decode(), *words, waited, 0)
        return None

    def claim_loading(self, engine: str, worker: str) -> bool:
        """Claim the right to load an engine; tell whether this worker got it.

        One worker loads an engine at a time, so that the others stay ready.
        """
        key = wire.loader_key(engine)
        return bool(self.client.set(key, worker, nx=True, ex=LOADER_SECONDS))

    def end_loading(self, engine: str) -> None:
        """Let others load the engine as well, if one worker is not enough."""
        self.client.unlink(wire.loader_key(engine))

    def refuse(self, engine: str, worker: str, reason: str) -> None:
        """Note that a worker cannot load an engine; forgotten soon, as the model may arrive."""
        pipe = self.client.pipeline(transaction=True)
        pipe.hset(wire.unloaded_key(engine), worker, reason)
        pipe.expire(wire.unloaded_key(engine), UNLOADED_SECONDS)
        pipe.execute()

    def unloaded(self, engine: str) -> dict[str, str]:
        """Return the reasons why workers could not load an engine, by worker."""
        stored = cast("dict[bytes, bytes]", self.client.hgetall(wire.unloaded_key(engine)))
        return {
            name.decode(errors="replace"): reason.decode(errors="replace")
            for name, reason in stored.items()
        }


def _field(words: Sequence[bytes], name: bytes) -> bytes:
    """Return a field of an entry, which a script answers as names and values in turn."""
    return dict(zip(words[::2], words[1::2], strict=False)).get(name, b"")


def cut(spec: JobSpec, texts: Sequence[str], timeout_seconds: float) -> list[LanePiece]:
    """Cut a request into pieces of about `PIECE_BYTES`, so that several devices may share it."""
    sizes = [len(text.encode()) for text in texts]
    enough = max(PIECE_BYTES, -(-sum(sizes) // PIECES_MAX))
    request, pieces, taken = uuid.uuid4().hex, list[LanePiece](), enough
    for place, (text, size) in enumerate(zip(texts, sizes, strict=True)):
        if taken >= enough:
            taken = 0
            pieces.append(
                LanePiece(
                    id=request, spec=spec, place=place, texts=[], timeout_seconds=timeout_seconds
                )
            )
        pieces[-1].texts.append(text)
        taken += size
    return pieces


def whole(spec: JobSpec, texts: Sequence[str], timeout_seconds: float) -> LanePiece:
    """Make one piece of a whole request, which one worker answers."""
    return LanePiece(
        id=uuid.uuid4().hex, spec=spec, place=0, texts=list(texts), timeout_seconds=timeout_seconds
    )


def check_answer(answer: LaneAnswer, texts: int) -> None:
    """Refuse an answer that has neither a vector for each text nor a reason.

    Raises:
        RecordError: The answer has other sizes.
    """
    rows = [error.index for error in answer.errors]
    size = 4 * texts * answer.dimensions
    if not answer.reason and not (0 < size == len(answer.vectors) and max(rows, default=0) < texts):
        raise RecordError(f"an answer that has not the sizes of {texts} texts")


def difference(answers: Sequence[LaneAnswer]) -> str:
    """Return in what two models differ that have answered pieces of a request; "" if all are one.

    A model is the same in whatever type a worker computes: vectors differ by rounding then.
    """
    first, *others = answers
    for other in others:
        one, another = _model_of(first), _model_of(other)
        named = [
            f"{name} {one.get(name, '')[:DIGEST_SHOWN]} at {first.worker}, "
            f"{another.get(name, '')[:DIGEST_SHOWN]} at {other.worker}"
            for name in differences(one, another)
        ]
        if named:
            return "; ".join(named)
    return ""


def _model_of(answer: LaneAnswer) -> dict[str, str]:
    """Return what must be equal for vectors of two answers to be of one model."""
    return answer.fingerprint | {"dtype": "", "size of a vector": str(answer.dimensions)}


def join(answers: Sequence[LaneAnswer]) -> LaneAnswer:
    """Join the answers to all pieces of a request, in any order, into the request's answer.

    They are of one model. Where workers compute in different types, the fingerprint has all of
    these, with commas between them.
    """
    ordered = sorted(answers, key=lambda answer: answer.place)
    prints = [answer.fingerprint for answer in ordered]
    return LaneAnswer(
        dimensions=ordered[0].dimensions,
        vectors=b"".join(answer.vectors for answer in ordered),
        errors=[
            ChunkError(index=answer.place + e.index, reason=e.reason, attempts=e.attempts)
            for answer in ordered
            for e in answer.errors
        ],
        worker=",".join(dict.fromkeys(answer.worker for answer in ordered)),
        token_count=sum(answer.token_count for answer in ordered),
        seconds=sum(answer.seconds for answer in ordered),
        waited_seconds=min(answer.waited_seconds for answer in ordered),
        fingerprint={
            name: ",".join(dict.fromkeys(each.get(name, "") for each in prints))
            for name in prints[0]
        },
    )


def too_many(texts: int, settings: Settings) -> str:
    """Return what is said of a request with no texts, or with too many."""
    return f"{texts:,} texts: 1 to {settings.lane_texts_max:,} are taken (EMBEDFARM_LANE_TEXTS_MAX)"


def too_long(size: int, settings: Settings) -> str:
    """Return what is said of a request with too many bytes of text."""
    most = f"{settings.lane_bytes_max:,} are taken in a request (EMBEDFARM_LANE_BYTES_MAX)"
    return f"{size:,} bytes of text: at most {most}"
