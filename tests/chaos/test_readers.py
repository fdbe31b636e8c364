"""Tests that a reader with a tenant's key finds what is another's, and that it reads at all."""

import http.server
import itertools
import json
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from tests.chaos import tenants
from tests.chaos.tally import Tally
from tests.chaos.tenants import NAMES, OPERATOR, PAGES, Door, Reader, Tenant
from tests.chaos.test_judgement import reply, web

MINE, OTHERS = NAMES
ID = f"{OTHERS}-7"
MADE = "0123456789abcdef"  # an id in which nobody's name is


@pytest.fixture
def reader() -> Reader:
    """Return a reader with the first tenant's key, at no port yet."""
    own, other = (Tenant(name, "secret", []) for name in NAMES)
    own.add("job", "mine-1")
    other.add("job", ID)
    other.add("job", MADE)
    return Reader(Door(0, Tally(), own, [other]), "m")


def look(
    reader: Reader, status: int, words: str, path: str = "/v1/jobs", hidden: str = ""
) -> Tally:
    """Let a reader look at one answer, and return its tally."""
    with web(partial(reply, status=status, words=words)) as asking:
        reader.door.port = asking.doors[0].port
        reader.look(path, hidden)
    return reader.door.tally


@pytest.mark.parametrize("word", [OTHERS, ID, MADE, f"{OPERATOR}-nightly-0"])
def test_a_word_of_another_is_found(reader: Reader, word: str) -> None:
    """A name or an id of another tenant, or the operator's, is found anywhere in a body."""
    tally = look(reader, 200, json.dumps({"jobs": [{"name": MINE}, {"deep": ["x" + word + "y"]}]}))
    assert len(tally.leaks) == 1
    assert tally.leaks[0].startswith(f"{MINE} reads")


def test_a_word_in_a_head_is_found(reader: Reader) -> None:
    """An id of another tenant is found in a header, such as a redirect's address."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", f"/jobs/{MADE}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with web(answer) as asking:
        reader.door.port = asking.doors[0].port
        reader.look("/jobs/x", "")
    assert len(reader.door.tally.leaks) == 1


def test_own_words_are_counted_and_found_nowhere(reader: Reader) -> None:
    """A tenant's own words are counted, and are no finding."""
    tally = look(reader, 200, f"a job of {MINE}")
    look(reader, 200, "nothing")
    assert (tally.leaks, tally.wrong) == ([], [])
    assert (tally.read[MINE], tally.own[MINE]) == (2, 1)


def test_what_is_anothers_must_not_be_there(reader: Reader) -> None:
    """A request for another tenant's id must get 404, which may name the id but not its owner."""
    assert look(reader, 404, f"no such job: {ID}", f"/v1/jobs/{ID}", ID).leaks == []
    tally = look(reader, 404, f"{OTHERS}: {MADE}", f"/v1/jobs/{MADE}", MADE)
    assert (len(tally.leaks), tally.wrong) == (1, [])
    for number, status in enumerate((200, 204, 403, 409), 1):
        assert len(look(reader, status, "", f"/v1/jobs/{MADE}", MADE).wrong) == number


@pytest.mark.parametrize(("status", "wrong"), [(500, 1), (401, 1), (403, 0), (404, 0), (422, 0)])
def test_errors_are_wrong_and_refusals_are_not(reader: Reader, status: int, wrong: int) -> None:
    """Status 500 or 401 is wrong, and a refusal is not."""
    assert len(look(reader, status, "").wrong) == wrong


def test_who_is_told_to_come_again_has_read_nothing(reader: Reader) -> None:
    """A refusal does not count as read, but another tenant's word in it is found."""
    tally = look(reader, 503, f"{OTHERS} has all the room")
    assert (tally.read[MINE], tally.refused, len(tally.leaks)) == (0, 1, 1)


def test_all_that_the_farm_offers_is_asked_for(reader: Reader) -> None:
    """Every offered path is asked for with each known id, and so are the pages."""
    paths: dict[str, dict[str, object]] = {
        "/v1/jobs": {"get": {}, "post": {}},
        "/v1/feeds": {"post": {}},
        "/v1/jobs/{job}": {"get": {}},
        "/v1/models/{model}": {"get": {}},
    }
    with web(partial(reply, status=200, words=json.dumps({"paths": paths}))) as asking:
        reader.door.port = asking.doors[0].port
        asked = list(reader.questions())
    assert asked[:5] == [
        ("/v1/jobs", ""),
        ("/v1/jobs/mine-1", ""),
        (f"/v1/jobs/{ID}", ID),
        (f"/v1/jobs/{MADE}", MADE),
        ("/v1/models/m", ""),
    ]
    assert {(f"/jobs/{MADE}", MADE), ("/jobs/mine-1", ""), ("/", "")} <= set(asked[5:])
    assert len(asked[5:]) >= len(PAGES)


def test_a_stream_without_an_end_is_left(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of events is left after some time, and what came until then is searched."""
    monkeypatch.setattr(tenants, "EVENTS_SECONDS", 0.1)
    gone = threading.Event()

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", tenants.EVENTS)
        handler.end_headers()
        try:
            for piece in _forever(f"data: {OTHERS}\n\n"):
                handler.wfile.write(piece.encode())
        except OSError:
            gone.set()

    with web(answer) as asking:
        reader.door.port = asking.doors[0].port
        reader.look("/v1/jobs/mine-1/events", "")
        assert gone.wait(20)
    assert len(reader.door.tally.leaks) == 1


def _forever(words: str) -> Iterator[str]:
    return itertools.repeat(words)
