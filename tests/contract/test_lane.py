"""Tests of the interactive lane on the real server, without a worker."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import cast

import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract import wire
from embedfarm.contract.encoding import decode, encode
from embedfarm.contract.farm_client import engine_key
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.lane import (
    Lane,
    LaneError,
    LaneFull,
    LaneLate,
    LaneRefused,
    Taken,
    TextsFailed,
    cut,
)
from embedfarm.contract.records import ChunkError, LaneAnswer, LanePiece
from embedfarm.contract.settings import Settings
from tests.support import wait_until

SPEC = JobSpec(model="null:2")
ENGINE = engine_key(SPEC)
BYTES = 1 << 20


def lane_of(client: redis.Redis, **settings: float) -> Lane:
    """Return a lane with some other limits."""
    return Lane(client, Settings().model_copy(update=settings))


def request(name: str, spec: JobSpec = SPEC) -> list[LanePiece]:
    """Return a request of one text."""
    return [LanePiece(id=name, spec=spec, place=0, texts=[name], timeout_seconds=60.0)]


def names(taken: list[Taken]) -> list[str]:
    """Return the texts of pieces."""
    return [text for each in taken for text in decode(LanePiece, each.data).texts]


def vectors(count: int) -> bytes:
    """Return the bytes of `count` vectors of two components."""
    return np.arange(2 * count, dtype="<f4").tobytes()


def sizes(client: redis.Redis) -> dict[str, int]:
    """Return the bytes that count as waiting, by lane."""
    stored = cast("dict[bytes, bytes]", client.hgetall(wire.LANE_SIZES))
    return {engine.decode(): int(size) for engine, size in stored.items()}


def test_an_answer_reaches_its_asker(client: redis.Redis) -> None:
    """Each of several threads gets its own answer, and nothing is left on the server but rings."""
    lane = lane_of(client)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(lane.embed, SPEC, [str(n)] * n, 20) for n in (1, 2, 3)]
        wait_until(lambda: client.xlen(wire.lane_key(ENGINE)) == 3)
        taken = lane.take(ENGINE, "w", BYTES)
        for each in taken:
            count = len(decode(LanePiece, each.data).texts)
            answer = LaneAnswer(dimensions=2, vectors=vectors(count))
            assert lane.answer(ENGINE, [(each.entry, each.id, answer)]) == [True]
        for count, future in enumerate(asked, 1):
            found = future.result()
            assert found.shape == (count, 2)
            assert found.dtype == np.float32
    assert not lane.waiting(ENGINE)
    kept = {wire.LANES, wire.LANE_WAKEUPS, wire.LANE_SIZES, wire.lane_key(ENGINE)}
    assert set(client.scan_iter()) == {key.encode() for key in kept}
    assert sizes(client) == {ENGINE: 0}


def test_the_first_answer_counts(client: redis.Redis) -> None:
    """A second answer to a request changes nothing, nor does one to nothing."""
    lane = lane_of(client)
    lane.send(request("a"))
    (taken,) = lane.take(ENGINE, "w", BYTES)
    first, second = LaneAnswer(worker="first"), LaneAnswer(worker="second")
    assert lane.answer(ENGINE, [(taken.entry, "a", first), (taken.entry, "a", second)]) == [
        True,
        False,
    ]
    assert lane.answer("another", [(taken.entry, "a", second)]) == [False]
    (data,) = cast("list[bytes]", client.lrange(wire.reply_key("a"), 0, -1))
    assert decode(LaneAnswer, data).worker == "first"
    assert 0 < client.ttl(wire.reply_key("a")) <= 30


def test_a_failed_text_is_named(client: redis.Redis) -> None:
    """The caller learns which text failed and why, and gets the other vectors."""
    lane = lane_of(client)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(lane.embed, SPEC, ["good", "bad"], 20)
        wait_until(lambda: lane.waiting(ENGINE))
        (taken,) = lane.take(ENGINE, "w", BYTES)
        errors = [ChunkError(index=1, reason="no")]
        answer = LaneAnswer(dimensions=2, vectors=vectors(2), errors=errors)
        lane.answer(ENGINE, [(taken.entry, taken.id, answer)])
        with pytest.raises(TextsFailed, match="1 texts failed, such as text 1: no") as caught:
            asked.result()
    assert caught.value.reasons == {1: "no"}
    assert caught.value.vectors.shape == (2, 2)


def test_a_full_lane_refuses(client: redis.Redis) -> None:
    """A full lane refuses a request at once, with a time to try again, and keeps the others."""
    lane = lane_of(client, lane_pieces_max=2)
    lane.send(request("a"))
    lane.send(request("b"))
    with pytest.raises(LaneFull, match=r"try again in \d+ s") as caught:
        lane.embed(SPEC, ["c"], 20)
    assert 0 <= caught.value.retry_seconds < 20
    taken = lane.take(ENGINE, "w", BYTES)
    assert names(taken) == ["a", "b"]
    with pytest.raises(LaneFull):  # a request in hand takes room as well
        lane.send(request("c"))
    lane.answer(ENGINE, [(each.entry, each.id, LaneAnswer()) for each in taken])
    lane.send(request("c"))


def test_lanes_are_bounded(client: redis.Redis) -> None:
    """Requests for ever other models do not fill the server."""
    lane = lane_of(client, lanes_max=1)
    lane.send(request("a"))
    other = request("b", JobSpec(model="null:3"))
    with pytest.raises(LaneFull):
        lane.send(other)
    lane.send(request("c"))
    brief = lane_of(client, lanes_max=1, lane_seconds_max=0.05)
    wait_until(lambda: sends(brief, other))


def sends(lane: Lane, asked: list[LanePiece]) -> bool:
    """Send a request; return whether there was room."""
    try:
        lane.send(asked)
    except LaneFull:
        return False
    return True


def test_what_nobody_waits_for_makes_room(client: redis.Redis) -> None:
    """Requests of askers that died do not fill a lane for ever."""
    lane = lane_of(client, lane_pieces_max=1)
    lane.send(request("a"))
    assert not sends(lane, request("b"))
    _let_expire(client, lanes_bytes_max=0)
    wait_until(lambda: sends(lane, request("b")))
    assert names(lane.take(ENGINE, "w", BYTES)) == ["b"]
    assert sizes(client) == {ENGINE: len(encode(request("b")[0]))}
    brief = lane_of(client, lane_pieces_max=1, lane_seconds_max=0.05)
    wait_until(lambda: sends(brief, request("c")))


def _let_expire(client: redis.Redis, **full: float) -> None:
    """Wait until all that waits was given up, with limits at which nothing else is taken."""
    brief = lane_of(client, lane_seconds_max=0.05, **full)

    def empty() -> bool:
        assert not sends(brief, request("never"))
        return not any(sizes(client).values())

    wait_until(empty)


def test_bytes_of_all_lanes_are_bounded(client: redis.Redis) -> None:
    """Long texts fill the farm sooner; what is answered, or expires with its lane, makes room."""
    size = len(encode(request("a")[0]))
    lane = lane_of(client, lanes_bytes_max=2 * size)
    others = JobSpec(model="null:3")
    lane.send(request("a"))
    lane.send(request("b", others))
    assert not sends(lane, request("c"))
    (taken,) = lane.take(ENGINE, "w", BYTES)
    assert lane.answer(ENGINE, [(taken.entry, taken.id, LaneAnswer())]) == [True]
    lane.send(request("d"))
    assert sizes(client) == {ENGINE: size, engine_key(others): size}
    _let_expire(client, lanes_bytes_max=0)
    lane_of(client, lanes_bytes_max=size).send(request("e"))
    assert sizes(client) == {ENGINE: size}


@given(st.lists(st.text(max_size=400), min_size=1, max_size=200))
def test_pieces_are_the_request(texts: list[str]) -> None:
    """The pieces of a request have all texts in order, are few, and not much larger than needed."""
    pieces = cut(SPEC, texts, 9.0)
    assert [text for piece in pieces for text in piece.texts] == texts
    places = [piece.place for piece in pieces]
    assert places == list(accumulate([0, *(len(piece.texts) for piece in pieces[:-1])]))
    assert len(pieces) <= 64 + 1
    assert len({piece.id for piece in pieces}) == 1
    total = sum(len(text.encode()) for text in texts)
    for piece in pieces:
        *before, _ = [len(text.encode()) for text in piece.texts]
        assert sum(before) < max(1024, total / 64 + 1)


def test_answers_to_pieces_are_joined(client: redis.Redis) -> None:
    """Texts keep their places and counts are of the whole, in whatever order workers answer."""
    lane = lane_of(client)
    texts = [f"{index} " + "x" * 600 for index in range(5)]
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(lane.ask, SPEC, texts, 20)
        wait_until(lambda: client.xlen(wire.lane_key(ENGINE)) == 3)
        for worker, taken in enumerate(reversed(lane.take(ENGINE, "w", BYTES))):
            piece = decode(LanePiece, taken.data)
            firsts = [[float(text.split()[0]), 0.0] for text in piece.texts]
            answer = LaneAnswer(
                place=piece.place,
                dimensions=2,
                vectors=np.asarray(firsts, dtype="<f4").tobytes(),
                errors=[ChunkError(index=0, reason="no")] if piece.place else [],
                worker=f"w{worker % 2}",
                token_count=len(piece.texts),
                seconds=0.5,
                waited_seconds=1.0 + worker,
                fingerprint={"weights": "1", "dtype": f"d{worker % 2}"},
            )
            lane.answer(ENGINE, [(taken.entry, taken.id, answer)])
        answer = asked.result()
    assert answer.matrix()[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert [error.index for error in answer.errors] == [2, 4]
    assert (answer.worker, answer.token_count) == ("w0,w1", 5)
    assert (answer.seconds, answer.waited_seconds) == (1.5, 1.0)
    assert answer.fingerprint == {"weights": "1", "dtype": "d0,d1"}


def answer_as(lane: Lane, worker: str, weights: str, axes: list[float], enough: int = 1) -> None:
    """Answer pieces as a worker whose model makes one vector of all texts."""
    for taken in lane.take(ENGINE, worker, enough):
        piece = decode(LanePiece, taken.data)
        answer = LaneAnswer(
            place=piece.place,
            dimensions=len(axes),
            vectors=np.asarray([axes] * len(piece.texts), dtype="<f4").tobytes(),
            worker=worker,
            token_count=len(piece.texts),
            fingerprint={"weights": weights, "dtype": worker},
        )
        assert lane.answer(ENGINE, [(taken.entry, taken.id, answer)]) == [True]


@pytest.mark.parametrize(("weights", "axes"), [("new", [0.0, 1.0]), ("old", [0.0, 1.0, 0.0])])
def test_an_answer_is_of_one_model(client: redis.Redis, weights: str, axes: list[float]) -> None:
    """A request that workers of two models share is answered again by one of them, as a whole."""
    lane = lane_of(client)
    texts = [f"{index} " + "x" * 600 for index in range(5)]
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(lane.ask, SPEC, texts, 20)
        wait_until(lambda: client.xlen(wire.lane_key(ENGINE)) == 3)
        answer_as(lane, "one", "old", [1.0, 0.0])
        answer_as(lane, "two", weights, axes, BYTES)
        wait_until(lambda: client.xlen(wire.lane_key(ENGINE)) == 1)
        answer_as(lane, "two", weights, axes)
        answer = asked.result()
    assert answer.matrix().tolist() == [axes] * 5
    assert (answer.worker, answer.token_count) == ("two", 5)
    assert answer.fingerprint == {"weights": weights, "dtype": "two"}
    assert not lane.waiting(ENGINE)


def test_who_waits_for_one_model_in_vain_is_told_of_both(client: redis.Redis) -> None:
    """A request that no model answers alone in time fails, and says which models there are."""
    lane = lane_of(client)
    texts = [f"{index} " + "x" * 600 for index in range(5)]
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(lane.embed, SPEC, texts, 2)
        wait_until(lambda: client.xlen(wire.lane_key(ENGINE)) == 3)
        answer_as(lane, "one", "old", [1.0, 0.0])
        answer_as(lane, "two", "new", [0.0, 1.0], BYTES)
        with pytest.raises(LaneLate, match=r"no answer .* weights old at one, new at two"):
            asked.result()
    assert not lane.waiting(ENGINE)


def test_no_answer_in_time(client: redis.Redis) -> None:
    """A caller without an answer gets an error with the workers' reasons, and the lane is empty."""
    lane = lane_of(client)
    lane.refuse(ENGINE, "w", "no memory")
    with pytest.raises(LaneLate, match=r"no answer within 0.1 s; w: no memory"):
        lane.embed(SPEC, ["a"], 0.1)
    assert not lane.waiting(ENGINE)
    assert sizes(client) == {ENGINE: 0}


@pytest.mark.parametrize(
    ("texts", "seconds", "message"),
    [
        ([], 1.0, "0 texts: 1 to 2,048"),
        (["a"] * 2049, 1.0, "2,049 texts"),
        (["x" * (3 << 20), "y"], 1.0, "3,145,729 bytes of text"),
        (["\ud800"], 1.0, "no Unicode"),
        (["a"], 121.0, "wait up to 120 s"),
        (["a"], 0.0, "wait up to 120 s"),
    ],
)
def test_requests_beyond_the_limits(
    texts: list[str], seconds: float, message: str, client: redis.Redis
) -> None:
    """A request with too many texts, too much text or a too long wait never gets to the server."""
    with pytest.raises(LaneRefused, match=message):
        lane_of(client).embed(SPEC, texts, seconds)
    assert not list(client.scan_iter())


@pytest.mark.parametrize("late", [False, True])
def test_a_refused_request_says_why(client: redis.Redis, *, late: bool) -> None:
    """A refused request raises the worker's reason, by the kind of refusal."""
    lane = lane_of(client)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(lane.embed, SPEC, ["a"], 20)
        wait_until(lambda: lane.waiting(ENGINE))
        (taken,) = lane.take(ENGINE, "w", BYTES)
        lane.answer(ENGINE, [(taken.entry, taken.id, LaneAnswer(reason="so", late=late))])
        with pytest.raises(LaneLate if late else LaneRefused, match="so"):
            asked.result()
    assert issubclass(LaneLate, LaneError)


def test_requests_are_taken_once_and_some_at_a_time(client: redis.Redis) -> None:
    """A worker leases as many requests as it asks for, and another worker gets the rest."""
    lane = lane_of(client, lane_lease_seconds=60)
    for name in "abc":
        lane.send(request(name))
    size = len(encode(request("a")[0]))
    taken = lane.take(ENGINE, "one", size + 1)
    assert names(taken) == ["a", "b"]
    assert [(each.id, each.deliveries) for each in taken] == [("a", 1), ("b", 1)]
    assert all(0 <= each.waited_seconds < 20 for each in taken)
    assert names(lane.take(ENGINE, "two", size + 1)) == ["c"]
    assert lane.take(ENGINE, "two", size) == []
    assert lane.take("unknown", "two", size) == []


def test_a_request_of_a_silent_worker_comes_alone(client: redis.Redis) -> None:
    """A request goes to another worker after its lease, by itself, unless it is renewed."""
    lane = lane_of(client, lane_lease_seconds=60)
    for name in "abc":
        lane.send(request(name))
    held = lane.take(ENGINE, "dead", BYTES)
    lane.send(request("d"))
    for each in held[:2]:  # their leases are over
        client.xclaim(
            wire.lane_key(ENGINE), wire.GROUP, "dead", 0, [each.entry], idle=99_000, justid=True
        )
    lane.renew(ENGINE, "dead", [held[0].entry])
    oldest = lane.oldest(ENGINE)
    assert oldest is not None
    assert oldest.id == "b"
    again = lane.take(ENGINE, "live", BYTES)
    assert names(again) == ["b"]
    assert again[0].deliveries == 2


def test_the_oldest_request_that_nobody_has(client: redis.Redis) -> None:
    """The oldest waiting request is found without being leased, and leased ones are not found."""
    lane = lane_of(client, lane_lease_seconds=60)
    assert (lane.asked(), lane.oldest(ENGINE)) == ([], None)
    lane.send(request("a"))
    lane.send(request("b"))
    assert lane.asked() == [ENGINE]
    oldest = lane.oldest(ENGINE)
    assert oldest is not None
    assert (oldest.id, oldest.deliveries) == ("a", 0)
    assert names(lane.take(ENGINE, "w", BYTES)) == ["a", "b"]
    assert lane.oldest(ENGINE) is None


def test_bells_are_heard_by_all(client: redis.Redis) -> None:
    """Each listener hears which engine was asked for, and nothing from before."""
    lane = lane_of(client)
    lane.send(request("before"))
    wait_until(lambda: lane.wakeups(lane.now(), 0.001)[1] == [])
    after = lane.now()
    wait_until(lambda: lane.now() != after)  # what comes now has another time
    heard: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: heard.append(lane.wakeups(after, 2)[1])) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    lane.send(request("a"))
    for thread in threads:
        thread.join()
    assert heard == [[ENGINE], [ENGINE]]
    specs = [JobSpec(model=f"null:{size}") for size in range(3, 12)]
    for number, spec in enumerate([*specs, *reversed(specs)]):
        lane.send(request(f"b-{number}", spec))
    assert lane.wakeups(after, 2)[1] == [ENGINE, *map(engine_key, specs)], "each once, in order"


def test_one_worker_loads_at_a_time(client: redis.Redis) -> None:
    """A second worker may load an engine only when the first has ended."""
    lane = lane_of(client)
    assert lane.claim_loading(ENGINE, "one")
    assert not lane.claim_loading(ENGINE, "two")
    lane.end_loading(ENGINE)
    assert lane.claim_loading(ENGINE, "two")


def test_the_engine_key_is_what_decides_vectors() -> None:
    """The engine key differs for another prompt, but not for another storage of the vectors."""
    assert engine_key(JobSpec(model="null:2", vector_dtype="int8", name="x")) == ENGINE
    assert engine_key(JobSpec(model="null:2", prompt="query: ")) != ENGINE
