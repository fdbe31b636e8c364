"""Tests of what jobs through RQ fetch, and whom they tell."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rq import Retry
from rq.job import Job
from standardwebhooks import Webhook

from tests.farm.harness import check_output, texts_of, write_corpus
from tests.ingest.loopback_server import Neighbour, Reply, Request
from tests.ingest.rq_farm import (
    ENDLESS,
    START_SECONDS,
    Door,
    failure,
    returned,
    wait_for,
    wait_for_parts,
)
from tests.support import wait_until

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    """Start a receiver that accepts every request, and serves what a test puts there."""
    with Neighbour().running() as neighbour:
        yield neighbour


def outbound(neighbour: Neighbour) -> dict[str, str]:
    """Return settings that allow the neighbour's URLs and webhooks."""
    return {
        "ingest_urls": json.dumps([f"{neighbour.url}/data/"]),
        "outbound_hosts": json.dumps(["127.0.0.1"]),
        "webhook_secret": SECRET,
    }


def notices(neighbour: Neighbour) -> list[Request]:
    """Return the requests that were posted."""
    return [request for request in neighbour.requests if request.method == "POST"]


def wait_for_notice(neighbour: Neighbour, job: Job) -> dict[str, Any]:
    """Wait for the notice about a job, and return its document."""

    def found() -> list[dict[str, Any]]:
        documents = [json.loads(request.body) for request in notices(neighbour)]
        return [each for each in documents if each["data"]["request"] == job.id]

    wait_until(found, START_SECONDS)
    return found()[0]


def test_a_corpus_from_a_url(door: Door, neighbour: Neighbour, tmp_path: Path) -> None:
    """A corpus from an allowed URL is downloaded once, then only asked for changes."""
    texts = list(texts_of(100))
    corpus = write_corpus(tmp_path / "elsewhere.jsonl", texts).read_bytes()
    neighbour.answer = lambda request: (
        Reply(304)
        if "if-none-match" in request.headers
        else Reply(headers={"etag": '"1"'}, body=corpus)
    )
    url, out = f"{neighbour.url}/data/corpus.jsonl?signature=secret", str(tmp_path / "out")
    first = door.enqueue("embed_corpus", url, out, model="null:16")
    check = door.enqueue("reconcile", out, url)
    again = door.enqueue("retry_failed", url, out, model="null:16")
    refused = [
        door.enqueue("embed_corpus", f"{neighbour.url}/{path}", str(tmp_path / "other"))
        for path in ("other/corpus.jsonl", "data/../corpus.jsonl")
    ]
    missing = door.enqueue("embed_corpus", "ftp://127.0.0.1/data/corpus.jsonl", out)
    with door.ingest(**outbound(neighbour)), door.work():
        wait_for(missing, "failed")
    assert [returned(each)["finished_before"] for each in (first, again)] == [False, True]
    assert returned(check)["problems"] == []
    check_output(Path(out), texts, 16)
    asked = [(request.path, "if-none-match" in request.headers) for request in neighbour.requests]
    assert asked == [("/data/corpus.jsonl?signature=secret", known) for known in (0, 1, 1)]
    assert first.get_meta()["fetched_bytes"] > 0
    first.refresh()
    assert f"embed {neighbour.url}/data/corpus.jsonl into {out}" in str(first.description)
    assert all("ingest_urls" in failure(job) or "dots" in failure(job) for job in refused)
    assert "secret" not in door.log()


def test_a_changed_corpus_of_the_same_size(
    door: Door, neighbour: Neighbour, tmp_path: Path
) -> None:
    """An output is not finished for a changed corpus of the same size whose server says no date."""
    texts = list(texts_of(100))
    corpus = write_corpus(tmp_path / "elsewhere.jsonl", texts).read_bytes()
    other = write_corpus(tmp_path / "other.jsonl", texts[::-1]).read_bytes()
    url, out = f"{neighbour.url}/data/corpus.jsonl", str(tmp_path / "out")
    with door.ingest(**outbound(neighbour)), door.work():
        neighbour.answer = lambda _: Reply(body=corpus)
        same = [door.enqueue("embed_corpus", url, out, model="null:16") for _ in range(2)]
        wait_for(same[-1], "finished")
        neighbour.answer = lambda _: Reply(body=other)
        changed = door.enqueue("embed_corpus", url, out, model="null:16")
        wait_for(changed, "failed")
    assert [returned(each)["finished_before"] for each in same] == [False, True]
    assert "the source has" in failure(changed)
    check_output(Path(out), texts, 16)


def test_a_check_keeps_the_corpus(door: Door, neighbour: Neighbour, tmp_path: Path) -> None:
    """Comparing an output with a URL that has another file by now leaves the one it was made of."""
    old, new = (
        write_corpus(tmp_path / f"{count}.jsonl", list(texts_of(count))).read_bytes()
        for count in (50, 60)
    )
    neighbour.answer = lambda _: Reply(body=old)
    url, out = f"{neighbour.url}/data/corpus.jsonl", tmp_path / "out"
    first = door.enqueue("embed_corpus", url, str(out), model="null:16")
    with door.ingest(**outbound(neighbour)), door.work():
        wait_for(first, "finished")
        neighbour.answer = lambda _: Reply(body=new)
        wait_for(changed := door.enqueue("reconcile", str(out), url), "finished")
        kept = [each.read_bytes() for each in out.glob(".corpus/**/*.jsonl")]
        neighbour.answer = lambda _: Reply(body=old)
        wait_for(same := door.enqueue("reconcile", str(out), url), "finished")
    assert "60" in str(returned(changed)["problems"])
    assert kept == [old]
    assert returned(same)["problems"] == []


def test_urls_that_differ_in_one_argument(door: Door, neighbour: Neighbour, tmp_path: Path) -> None:
    """All files of a corpus are embedded, also where only what may be a credential differs."""
    texts = {"alice": ["a river", "a lake"], "bob": ["a hill", "a mountain", "a valley"]}

    def answer(request: Request) -> Reply:
        lines = [json.dumps({"text": text}) for text in texts[request.path.partition("=")[2]]]
        return Reply(body="\n".join(lines).encode())

    neighbour.answer = answer
    urls = [f"{neighbour.url}/data/all.jsonl?author={name}" for name in texts]
    out = tmp_path / "out"
    first = door.enqueue("embed_corpus", urls, str(out), model="null:16")
    check = door.enqueue("reconcile", str(out), urls)
    with door.ingest(**outbound(neighbour)), door.work():
        wait_for(check, "finished")
    assert returned(first)["count"] == 5
    assert returned(check)["problems"] == []
    check_output(out, [*texts["alice"], *texts["bob"]], 16)


def test_a_webhook_is_told(door: Door, neighbour: Neighbour, tmp_path: Path) -> None:
    """A webhook is told the end of each job, good or bad, under one id; failed notices are resent.

    Retries of the job are no end.
    """
    corpus = str(write_corpus(tmp_path / "corpus.jsonl", ["a river"]))
    hook, out = f"{neighbour.url}/hook", str(tmp_path / "out")
    neighbour.answer = lambda _: Reply(503 if len(neighbour.requests) == 1 else 204)
    good = door.enqueue("embed_corpus", corpus, out, model="null:16", webhook=hook, job_id="mine")
    bad = door.enqueue(
        "embed_corpus", str(tmp_path / "none.jsonl"), out, webhook=hook,
        retry=Retry(max=1, interval=1),
    )  # fmt: skip
    refused = door.enqueue("embed_corpus", corpus, out, webhook="http://me:secret@127.0.0.1/")
    with door.ingest(**outbound(neighbour)), door.work():
        finished, failed = wait_for_notice(neighbour, good), wait_for_notice(neighbour, bad)
        wait_until(lambda: len(notices(neighbour)) == 3, START_SECONDS)
        wait_for(refused, "failed")
        wait_for(last := door.enqueue("cleanup"), "finished")
    assert last.id
    assert finished["type"] == "job.finished"
    assert finished["data"] | {"job": ""} == {
        "request": good.id, "job": "", "out": out, "done": 1, "of": 1, "failed": 0,
    }  # fmt: skip
    assert (failed["type"], bad.retries_left) == ("job.failed", 1)
    assert "is no file and no directory" in failed["data"]["reason"]
    ids = [request.headers["webhook-id"] for request in notices(neighbour)]
    assert (len(ids), len(set(ids)), ids.count(finished["id"])) == (3, 2, 2)
    for request in notices(neighbour):
        Webhook(SECRET).verify(request.body, request.headers)
    assert "user name" in failure(refused)
    assert SECRET not in door.log()


def test_a_webhook_is_told_of_cancelling(door: Door, neighbour: Neighbour, tmp_path: Path) -> None:
    """A webhook is told once of a job that is cancelled in the queue, at work, or on the farm."""
    corpus = str(write_corpus(tmp_path / "corpus.jsonl", list(texts_of(6_000))))
    hook = f"{neighbour.url}/hook"
    jobs = [
        door.enqueue("embed_corpus", corpus, str(tmp_path / name), model=ENDLESS, webhook=hook)
        for name in ("early", "running", "farm")
    ]
    jobs[0].cancel()
    with door.work(), door.ingest(part_bytes_max=16_000, **outbound(neighbour)):
        wait_for_parts(jobs[1], tmp_path / "running")
        jobs[1].cancel()
        wait_for_parts(jobs[2], tmp_path / "farm")
        door.cancel_farm_job(jobs[2].get_meta()["job"])
        documents = [wait_for_notice(neighbour, job) for job in jobs]
        # Housekeeping looks at cancelled jobs again and again.
        wait_until(lambda: jobs[0].get_meta().get("told") == documents[0]["id"])
    assert [each["type"] for each in documents] == ["job.cancelled"] * 3
    assert documents[1]["data"]["job"]
    assert len(notices(neighbour)) == 3


def test_a_notice_is_given_up_loudly(door: Door, neighbour: Neighbour) -> None:
    """A notice that cannot be sent fails after its last retry, and the log says so."""
    neighbour.answer = lambda _: Reply(500)
    event = {"id": "msg_1", "type": "job.finished"}
    late = door.enqueue("notify", f"{neighbour.url}/secret", event)
    private = door.enqueue(
        "notify", "http://[::1]/secret", event, retry=Retry(max=3, interval=[60])
    )
    with door.ingest(**outbound(neighbour)):
        wait_for(late, "failed")
        wait_for(private, "failed")
    assert "answers 500" in failure(late)
    assert "not public" in failure(private)
    assert "given up" in door.log()
