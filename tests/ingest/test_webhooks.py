"""Tests of webhooks: what receivers are sent."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from pydantic import ValidationError
from rq import Queue
from standardwebhooks import Webhook, WebhookVerificationError

from embedfarm.contract.settings import Settings
from embedfarm.ingest.outbound import RequestFailed, UrlRefused
from embedfarm.ingest.webhooks import check_webhook, deliver, enqueue_notice, make_event
from tests.ingest.loopback_server import Neighbour, Reply

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
EVENT = make_event("job.finished", "a run", {"job": "a", "failed": 0})


def settings(**more: Any) -> Settings:  # noqa: ANN401 -- what a setting takes
    """Settings of a farm that may send to loopback."""
    return Settings.model_validate({"outbound_hosts": ["127.0.0.1"], **more})


@pytest.fixture
def receiver() -> Iterator[Neighbour]:
    """A server that accepts every notice."""
    with Neighbour().running() as neighbour:
        yield neighbour


def test_a_signed_notice(receiver: Neighbour) -> None:
    """A receiver's library accepts id, time, type and facts, but not with another secret."""
    assert deliver(f"{receiver.url}/hook?token=x", EVENT, settings(webhook_secret=SECRET)) == 200
    [request] = receiver.requests
    assert (request.method, request.path) == ("POST", "/hook?token=x")
    assert Webhook(SECRET).verify(request.body, request.headers) == EVENT
    assert request.headers["webhook-id"] == EVENT["id"]
    assert request.headers["content-type"] == "application/json"
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + "A" * 32).verify(request.body, request.headers)
    assert EVENT["type"] == "job.finished"
    assert EVENT["data"] == {"job": "a", "failed": 0}


def test_an_unsigned_notice(receiver: Neighbour) -> None:
    """A notice without a secret has no signature, and everything else."""
    deliver(receiver.url, EVENT, settings())
    assert "webhook-signature" not in receiver.requests[0].headers
    assert json.loads(receiver.requests[0].body) == EVENT


@pytest.mark.parametrize("status", [301, 307, 400, 404, 429, 500, 503])
def test_what_is_no_success(receiver: Neighbour, status: int) -> None:
    """A status other than 2xx and 410 is a failure, and a redirect is not followed."""
    receiver.answer = lambda _: Reply(status, {"location": "/elsewhere"})
    with pytest.raises(RequestFailed, match=f"answers {status}"):
        deliver(receiver.url, EVENT, settings())
    assert len(receiver.requests) == 1


def test_a_receiver_that_is_gone(receiver: Neighbour) -> None:
    """The status 410 is taken as an answer: the receiver wants no more."""
    receiver.answer = lambda _: Reply(410)
    assert deliver(receiver.url, EVENT, settings()) == 410


def test_an_event_that_is_none(receiver: Neighbour) -> None:
    """An event whose id could break a header, and a private receiver, are refused."""
    for name in ("a\r\nx-evil: 1", "", "é"):
        with pytest.raises(ValueError, match="needs an id"):
            deliver(receiver.url, EVENT | {"id": name}, settings())
    with pytest.raises(UrlRefused, match="not public"):
        deliver(receiver.url, EVENT, Settings())
    assert not receiver.requests


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1/", "not public"),
        ("http://localhost/", "not public"),
        ("gopher://example.com/", "begins with http"),
        ("http://nowhere.invalid/", "cannot be found"),
    ],
)
def test_a_webhook_is_checked_early(url: str, reason: str) -> None:
    """A webhook that cannot be sent to is refused in words when a job is submitted."""
    with pytest.raises(ValueError, match=reason):
        check_webhook(url, Settings())
    if "127" in url:
        check_webhook(url, settings())


def test_a_notice_is_enqueued_once(client: redis.Redis) -> None:
    """A notice is enqueued once, at the front, with hours of retries, and its URL's path hidden."""
    queue = Queue("embedfarm", client, serializer="json")
    queue.enqueue("producer.tasks.cleanup")
    for _ in range(2):
        enqueue_notice(queue, "https://hooks.example/secret?token=secret", EVENT)
    job = queue.jobs[0]
    assert (len(queue.jobs), job.id) == (2, EVENT["id"])
    assert job.description == "tell https://hooks.example of job.finished"
    assert job.retry_intervals is not None
    assert 4 * 3600 < sum(job.retry_intervals) < 24 * 3600
    assert job.retries_left == len(job.retry_intervals)


def test_an_event_has_the_id_of_what_happened() -> None:
    """An event's id is the same for one run and kind whenever it is made, and else another one."""
    again = make_event("job.finished", "a run", {"job": "a"})
    others = {
        make_event(*words, {})["id"] for words in [("job.finished", "b"), ("job.failed", "a run")]
    }
    assert again["id"] == EVENT["id"]
    assert len(others - {EVENT["id"]}) == 2


def test_the_secret_is_not_shown() -> None:
    """The webhook secret is in no text of settings or errors, but in a child's environment."""
    chosen = settings(webhook_secret=SECRET)
    for text in (repr(chosen), str(chosen), chosen.model_dump_json(), f"{chosen.model_dump()}"):
        assert SECRET not in text
        assert SECRET[6:] not in text
    assert chosen.environment()["EMBEDFARM_WEBHOOK_SECRET"] == SECRET
    for wrong in ("hunter2", "whsec_hunter2", "whsec_" + "A" * 16, SECRET[6:], SECRET + "!"):
        with pytest.raises(ValidationError, match="24 to 64 bytes") as refused:
            settings(webhook_secret=wrong)
        assert wrong not in str(refused.value)
    assert not settings(webhook_secret="").webhook_secret
