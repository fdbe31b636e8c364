"""What receivers of webhooks are sent."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from pydantic import ValidationError
from rq import Queue
from standardwebhooks import Webhook, WebhookVerificationError

from embedfarm.settings import Settings
from producer.notices import check_webhook, deliver, enqueue_notice, make_event
from producer.outbound import RequestFailed, UrlRefused
from tests.outbound.neighbour import Neighbour, Reply

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
EVENT = make_event("job.finished", "a run", {"job": "a", "failed": 0})


def settings(**more: Any) -> Settings:  # noqa: ANN401 -- what a setting takes
    """Those of a farm whose neighbour is a receiver."""
    return Settings.model_validate({"outbound_hosts": ["127.0.0.1"], **more})


@pytest.fixture
def receiver() -> Iterator[Neighbour]:
    """One that takes everything."""
    with Neighbour().running() as neighbour:
        yield neighbour


def test_a_signed_notice(receiver: Neighbour) -> None:
    """A receiver's own library takes it: id, time, type and facts; not with another secret."""
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
    """Without a secret there is no signature, and everything else."""
    deliver(receiver.url, EVENT, settings())
    assert "webhook-signature" not in receiver.requests[0].headers
    assert json.loads(receiver.requests[0].body) == EVENT


@pytest.mark.parametrize("status", [301, 307, 400, 404, 429, 500, 503])
def test_what_is_no_success(receiver: Neighbour, status: int) -> None:
    """Anything but 2xx is a failure; a redirect is not followed."""
    receiver.answer = lambda _: Reply(status, {"location": "/elsewhere"})
    with pytest.raises(RequestFailed, match=f"answers {status}"):
        deliver(receiver.url, EVENT, settings())
    assert len(receiver.requests) == 1


def test_a_receiver_that_is_gone(receiver: Neighbour) -> None:
    """410 says that it wants no more: that is an answer, and is not asked for again."""
    receiver.answer = lambda _: Reply(410)
    assert deliver(receiver.url, EVENT, settings()) == 410


def test_an_event_that_is_none(receiver: Neighbour) -> None:
    """Whoever enqueues a notice cannot write other headers with its id."""
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
    """Before a job is taken, in words."""
    with pytest.raises(ValueError, match=reason):
        check_webhook(url, Settings())
    if "127" in url:
        check_webhook(url, settings())


def test_a_notice_is_enqueued_once(client: redis.Redis) -> None:
    """At the front, to be tried for hours; shown without what may be secret in the URL."""
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
    """The same of one run, whenever it is made, another one of another run or kind."""
    again = make_event("job.finished", "a run", {"job": "a"})
    others = {
        make_event(*words, {})["id"] for words in [("job.finished", "b"), ("job.failed", "a run")]
    }
    assert again["id"] == EVENT["id"]
    assert len(others - {EVENT["id"]}) == 2


def test_the_secret_is_not_shown() -> None:
    """Neither by the settings nor by the error that refuses one; a child process gets it."""
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
