"""Webhooks: a POST to a user's URL when a job has ended.

Documents and signatures are those of Standard Webhooks, so that receivers need no code of ours. A
receiver may be told twice, and then under the same id.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final

from rq import Queue, Retry
from rq.exceptions import DeserializationError, DuplicateJobError
from rq.job import Job
from standardwebhooks import Webhook

from embedfarm.contract.settings import Settings
from embedfarm.ingest.outbound import RequestFailed, find_addresses, parse_url, send

TASK: Final = "producer.tasks.notify"
RETRY_SECONDS: Final = (5, 30, 120, 600, 1800, 3600, 7200, 14400)  # after each failure: 7.7 hours
DELIVERY_SECONDS: Final = 20.0
TASK_SECONDS: Final = 60
KEPT_SECONDS: Final = 86400  # for so long an id is told once
FAILURE_SECONDS: Final = 7 * 86400
REASON_CHARACTERS_MAX: Final = 2000
DELIVERED: Final = range(200, 300)
GONE: Final = 410  # a receiver's way to say that it wants no more
FACTS: Final = ("job", "out", "done", "of", "failed")  # of a job's `meta` that are told
TOLD: Final = "told"  # in `meta`: id of the last notice

_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")

Event = dict[str, Any]


def check_webhook(url: str, settings: Settings) -> None:
    """Check that notices may be sent to a URL, as far as can be said now.

    Raises:
        ValueError: Nothing may be sent there; the message is for whoever named the URL.
    """
    parts = parse_url(url)
    try:
        find_addresses(parts.host, parts.port, settings.outbound_hosts)
    except RequestFailed as error:
        raise ValueError(str(error)) from error


def enqueue_notice(queue: Queue, url: str, event: Event) -> None:
    """Enqueue an event for delivery to a URL, with retries for some hours; each event once.

    Args:
        queue: Queue of `embedfarm ingest`, with JSON as its serializer.
        url: URL of the receiver.
        event: Document from `make_event`.
    """
    with contextlib.suppress(DuplicateJobError):
        queue.enqueue_call(
            TASK,
            args=(url, event),
            description=f"tell {parse_url(url).origin} of {event['type']}",
            timeout=TASK_SECONDS,
            result_ttl=KEPT_SECONDS,
            failure_ttl=FAILURE_SECONDS,
            job_id=event["id"],
            retry=Retry(len(RETRY_SECONDS), list(RETRY_SECONDS), enqueue_at_front=True),
            at_front=True,
            unique=True,
        )


def make_event(kind: str, key: str, facts: Mapping[str, Any]) -> Event:
    """Make the document of an event for a receiver.

    Args:
        kind: Kind of event, such as "job.finished".
        key: What tells this event from others of its kind; the document's id is made of it.
        facts: Values that JSON can say.
    """
    name = hashlib.sha256(f"{kind} {key}".encode()).hexdigest()[:24]
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"id": f"msg_{name}", "type": kind, "timestamp": now, "data": dict(facts)}


def deliver(url: str, event: Event, settings: Settings) -> int:
    """Post an event to its receiver, once.

    Returns:
        The HTTP status of the answer: one of success, or `GONE`.

    Raises:
        UrlRefused: Nothing may be sent to that URL.
        RequestFailed: The receiver is not reached, or answers anything else.
        ValueError: The event has no id that can be in a header.
    """
    target = parse_url(url)
    name = str(event.get("id", ""))
    if not _ID.fullmatch(name):
        raise ValueError(f"an event needs an id of letters and digits, which {name!r} is not")
    body = json.dumps(event)
    headers = {"content-type": "application/json", **_sign(name, body, settings)}
    deadline = monotonic() + DELIVERY_SECONDS
    hosts = settings.outbound_hosts
    with send(target, headers, body.encode(), hosts=hosts, deadline=deadline) as response:
        if response.status not in DELIVERED and response.status != GONE:
            raise RequestFailed(f"{target.origin} answers {response.status}")
        return response.status


def _sign(name: str, body: str, settings: Settings) -> dict[str, str]:
    """Return the headers of Standard Webhooks, with a signature if there is a secret."""
    now = datetime.now(UTC)
    headers = {"webhook-id": name, "webhook-timestamp": str(int(now.timestamp()))}
    if secret := settings.webhook_secret.get_secret_value():
        headers["webhook-signature"] = Webhook(secret).sign(name, now, body)
    return headers


def tell(job: Job, state: str, reason: str = "") -> None:
    """Enqueue the webhook of a job that has ended, if it has one; once a run.

    Args:
        job: Job that ended.
        state: "finished", "failed" or "cancelled".
        reason: Why it failed.
    """
    url = _webhook_of(job)
    if not url:
        return
    meta = job.get_meta()
    facts = {"request": job.id} | {name: meta[name] for name in FACTS if name in meta}
    if reason:
        facts["reason"] = reason[:REASON_CHARACTERS_MAX]
    event = make_event(f"job.{state}", f"{job.id} {job.enqueued_at}", facts)
    if meta.get(TOLD) != event["id"]:
        enqueue_notice(Queue(job.origin, job.connection, serializer="json"), url, event)
        job.meta[TOLD] = event["id"]
        job.save_meta()


def _webhook_of(job: Job) -> str:
    """Return the URL to which a job's notices go; "" without one, or if it cannot be read."""
    try:
        url = job.kwargs.get("webhook", "")
        parse_url(url)
    except (DeserializationError, AttributeError, TypeError, ValueError):
        return ""
    return str(url)
