"""Tests of the page of all jobs: how they are found, and steered many at a time."""

import json
import re
import time
from html import unescape
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import msgspec
import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.contract import wire
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient, FarmFull
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.scheduling_terms import Terms
from embedfarm.contract.settings import Settings
from embedfarm.ingest.job_directories import Call, write_call
from embedfarm.ingest.job_queue import Submissions
from embedfarm.watch import job_search
from embedfarm.watch.job_search import JobQuery, search_jobs
from embedfarm.web.auth.keys import Key, make_key
from embedfarm.web.jobs.bulk import DO, Do
from embedfarm.web.services import Services
from tests.farm.harness import run, write_corpus
from tests.support import LiveServer
from tests.web.conftest import client_of

BROWSER = {"accept": "text/html"}
SPEC = JobSpec(model="null:2")


def make(client: redis.Redis, name: str, tenant: str = "", end: str = "", failed: int = 0) -> Job:
    """Make a job of a name, which has ended in a state if that is given."""
    job = Job(client, f"id-{name}")
    job.create(msgspec.structs.replace(SPEC, name=name), 0, Terms(tenant=tenant))
    if end in {"finished", "failed"}:
        FarmClient(client).end(job.id, end, "", Settings(), chunk_count=9)  # type: ignore[arg-type]
        client.hset(wire.JobKeys(job.id).meta, "chunks_failed", failed)
    elif end:
        job.cancel()
    return job


@pytest.fixture
def many(client: redis.Redis) -> redis.Redis:
    """Make jobs in every state, some of tenants, one of them long ago."""
    make(client, "Wikipedia one")
    make(client, "Wikipedia two", "red", "finished")
    make(client, "mails", "red", "failed")
    make(client, "letters", "blue", "finished", failed=3)
    make(client, "notes", end="cancelled")
    make(client, "papers").pause()
    old = int(1000 * (time.time() - 2 * 86_400))
    client.hset(wire.JobKeys("id-mails").meta, "created_ms", old)
    return client


def shown(web: TestClient, **query: object) -> list[str]:
    """Return the names of the jobs that the page shows, in order."""
    text = web.get("/jobs", params=query, headers=BROWSER).text  # type: ignore[arg-type]
    return re.findall(r'<a class="name" href="/jobs/[^"]*">([^<]*)</a>', text)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"words": "wiki"}, {"Wikipedia one", "Wikipedia two"}),
        ({"words": "TWO wiki"}, {"Wikipedia two"}),
        ({"words": "id-mails"}, {"mails"}),
        ({"words": "null:2 nothing"}, set()),
        ({"state": "running"}, {"Wikipedia one"}),
        ({"state": "paused"}, {"papers"}),
        ({"state": "finished"}, {"Wikipedia two", "letters"}),
        ({"state": "incomplete"}, {"letters"}),
        ({"state": "failed"}, {"mails"}),
        ({"state": "cancelled"}, {"notes"}),
        ({"tenant": "red"}, {"Wikipedia two", "mails"}),
        ({"age": "day", "tenant": "red"}, {"Wikipedia two"}),
        ({"age": "week", "tenant": "red"}, {"Wikipedia two", "mails"}),
    ],
)
def test_jobs_are_found(
    web: TestClient, many: redis.Redis, query: dict[str, str], names: set[str]
) -> None:
    """The page shows the jobs that words, state, tenant and age ask for, and says of how many."""
    del many
    assert set(shown(web, **query)) == names
    text = web.get("/jobs", params=query, headers=BROWSER).text
    assert "of 6" in text


def test_jobs_of_one_corpus_are_found(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """The page of a job leads to all jobs of its corpus; one of texts that were sent has none."""
    del client
    wiki, notes = (write_corpus(tmp_path / f"{name} &.jsonl", ["a"]) for name in ("wiki", "notes"))
    settings: dict[str, Any] = {"models": ("null:2",), "ingest_roots": [tmp_path]}
    with client_of(server, jobs_directory=tmp_path / "jobs", **settings) as web:
        orders = [
            {"source": str(wiki), "name": "first"}, {"source": str(notes), "name": "other"},
            {"source": str(wiki), "name": "again"}, {"texts": ["a"], "name": "sent"},
        ]  # fmt: skip
        made = [web.post("/v1/jobs", json=each).json() for each in orders]
        page = web.get(f"/jobs/{made[0]['job']}", headers=BROWSER).text
        [link] = re.findall(r'href="([^"]*)">All its jobs', page)
        assert set(shown(web, corpus=made[0]["corpus"])) == {"first", "again"}
        listed = web.get(unescape(link), headers=BROWSER).text
        alone = web.get(f"/jobs/{made[3]['job']}", headers=BROWSER).text
    assert [each["corpus"] for each in made] == [str(wiki), str(notes), str(wiki), ""]
    assert (listed.count('class="name"'), "wiki &amp;.jsonl</code>" in listed) == (2, True)
    assert "All its jobs" not in alone


def test_jobs_are_found_by_a_label(web: TestClient, many: redis.Redis) -> None:
    """Labels are given by HTTP and changed; the list, the page and `jobs ls` find jobs by one."""
    given = {"texts": ["a"], "labels": "wiki,nightly", "name": "new"}
    made = web.post("/v1/jobs", json=given).json()
    assert made["labels"] == "nightly,wiki"
    changed = web.patch("/v1/jobs/id-papers", json={"labels": "nightly"})
    assert changed.json()["labels"] == "nightly"
    for wrong in ("a b", "a,,b", "é"):
        assert web.post("/v1/jobs", json=given | {"labels": wrong}).status_code == 422
    FarmClient(many).end(made["job"], "failed", "no file", Settings())
    for label, names in (("nightly", {"new", "papers"}), ("wiki", {"new"}), ("night", set())):
        listed = web.get("/v1/jobs", params={"label": label}).json()["jobs"]
        assert {each["name"] for each in listed} == names
        page = web.get("/jobs", params={"label": label}).text
        shown = set(re.findall(r'<a class="name" href="[^"]*">([^<]*)</a>', page))
        assert shown == names
    assert 'href="/jobs?label=wiki">wiki</a>' in web.get(f"/jobs/{made['job']}").text
    asked = web.get("/steer", params={"verb": "cancel", "every": "yes", "label": "nightly"}).text
    assert "Of 2 jobs" not in asked
    assert "Cancel 1 job" in asked


def test_the_order_is_chosen(web: TestClient, many: redis.Redis) -> None:
    """Jobs come by age, name, size or failures."""
    for number, name in enumerate(("papers", "notes", "letters"), 1):
        many.hset(wire.JobKeys(f"id-{name}").meta, "created_ms", 10**15 - number)
    assert shown(web)[:3] == ["papers", "notes", "letters"]
    assert shown(web, order="oldest")[-3:] == ["letters", "notes", "papers"]
    names = shown(web, order="name")
    assert names == sorted(names, key=str.casefold)
    assert shown(web, order="failures")[0] == "letters"
    assert set(shown(web, order="chunks")[:3]) == {"Wikipedia two", "mails", "letters"}


def test_pages_follow_each_other(web: TestClient, client: redis.Redis) -> None:
    """Each job is on one page; a page behind the last one is the last one."""
    for number in range(60):
        make(client, f"job {number:02}")
    pages = [shown(web, page=number, order="name", words="job") for number in (1, 2, 3)]
    assert [len(page) for page in pages] == [25, 25, 10]
    assert [*pages[0], *pages[1], *pages[2]] == [f"job {number:02}" for number in range(60)]
    assert shown(web, page=9, order="name") == pages[2]
    text = web.get("/jobs", params={"page": 2, "words": "job"}, headers=BROWSER).text
    assert "60 jobs of 60, page 2 of 3" in text
    assert 'href="/jobs?words=job&amp;page=3"' in text


@pytest.mark.parametrize("first", ["\u00e9", "\u00df", "\u4e16", "\U0001f600", "a", "\x7f"])
def test_a_name_is_found_by_its_first_letters(client: redis.Redis, first: str) -> None:
    """Whatever bytes stand before a name in its record, which say its length: it is found."""
    names = [first * count for count in (1, 31, 32, 47, 48, 127, 128, 194, 195, 200)]
    for name in names:
        make(client, name)
    found = search_jobs(FarmClient(client), JobQuery(words=first)).jobs
    assert set(found) == {f"id-{name}" for name in names}


def test_what_another_program_wrote_hides_nothing(web: TestClient, many: redis.Redis) -> None:
    """A key of another type, a count that is none and a spec of another version stay apart."""
    many.zadd(wire.JOBS, {"list": 1, "odd": 2, "newer": 3, "gone": 4})
    many.rpush(wire.JobKeys("list").meta, "x")
    many.hset(wire.JobKeys("odd").meta, mapping={"state": "open", "created_ms": "long ago"})
    many.hset(wire.JobKeys("newer").meta, mapping={"state": "open", "spec": b"\x02\x90"})
    names = shown(web)
    assert len(names) == 7
    assert "newer" in names


def test_a_tenant_finds_its_own(
    server: LiveServer, many: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search on behalf of a tenant looks at no job of another one, however many there are."""
    for looked_max, complete in ((2, True), (1, False)):
        monkeypatch.setattr(job_search, "LOOKED_MAX", looked_max)
        found = search_jobs(FarmClient(many, tenant="red"), JobQuery())
        assert (found.of, found.complete) == (looked_max, complete)
    assert not search_jobs(FarmClient(many), JobQuery()).complete
    monkeypatch.undo()
    assert search_jobs(FarmClient(many), JobQuery()).complete
    with client_of(server) as web:
        found = search_jobs(FarmClient(many, tenant="red"), JobQuery(tenant="blue"))
        assert found.jobs == []
        assert found.of == 2
        assert len(shown(web)) == 6


def ask(web: TestClient, verb: str, **query: object) -> str:
    """Ask for an action on many jobs, and return the page that asks whether it is meant."""
    words = urlencode({"verb": verb, **query}, doseq=True)
    answer = web.get(f"/steer?{words}", headers=BROWSER)
    assert answer.status_code == 200
    return answer.text


def act(web: TestClient, page: str) -> tuple[int, str]:
    """Press the button of a page that asks; return the status, and where it leads, or the text."""
    form = page.partition('action="/steer"')[2]
    fields = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', form)
    words = urlencode([(name, value.replace("&amp;", "&")) for name, value in fields])
    headers = BROWSER | {"content-type": "application/x-www-form-urlencoded"}
    answer = web.post("/steer", content=words, headers=headers, follow_redirects=False)
    return answer.status_code, answer.headers.get("location", answer.text)


def test_marked_jobs_are_steered(web: TestClient, many: redis.Redis) -> None:
    """The jobs marked are counted and named before anything is done; others stay as they are."""
    page = ask(web, "cancel", job=["id-Wikipedia one", "id-papers", "id-mails"], words="w")
    assert "Cancel 2 jobs?" in page
    assert "Left out, since it cannot be done to them now: 1 of 3." in page
    assert "papers" in page
    assert Job(many, "id-papers").status().state == "paused"
    assert act(web, page) == (303, "/jobs?words=w")
    assert Job(many, "id-papers").status().cancelled
    assert Job(many, "id-Wikipedia one").status().cancelled
    assert Job(many, "id-mails").status().state == "failed"


def test_all_that_are_found_are_steered(web: TestClient, many: redis.Redis) -> None:
    """An action may be on all that the filter finds, on all its pages, as it was asked for."""
    for number in range(30):
        make(many, f"old {number}", end="cancelled")
    page = ask(web, "delete", every="yes", words="old", state="cancelled")
    assert "Delete 30 jobs?" in page
    assert "and 20 more" in page
    make(many, "old one that comes later", end="cancelled")
    assert act(web, page) == (303, "/jobs?words=old&state=cancelled")
    assert shown(web, words="old") == ["old one that comes later"]
    assert len(shown(web)) == 7


def test_a_thousand_are_steered(web: TestClient, client: redis.Redis) -> None:
    """A page asks about as many jobs as its form can name, and says of how many these are."""
    pipe = client.pipeline(transaction=False)
    for number in range(1000):
        meta = {"spec": encode(SPEC), "state": "open", "tenant": ""}
        pipe.hset(wire.JobKeys(f"{number:032x}").meta, mapping=meta)  # type: ignore[arg-type] # bytes too
        pipe.zadd(wire.JOBS, {f"{number:032x}": number})
    pipe.execute()
    page = ask(web, "pause", every="yes")
    assert "These are the first 998 of 1,000." in page
    assert act(web, page)[0] == 303
    assert len(search_jobs(FarmClient(client), JobQuery(state="paused")).jobs) == 998


def test_nothing_to_do_is_said(web: TestClient, many: redis.Redis) -> None:
    """Nothing can be done where no job is marked, or where all are in other states."""
    del many
    for query, words in (
        ({}, "No job is marked."),
        ({"job": ["id-mails", "id-notes"]}, "Of 2 jobs none is in a state for that."),
    ):
        page = ask(web, "cancel", **query)
        assert words in page
        assert "<button" not in page.partition("data-question")[2].partition("</form>")[0]


def test_who_deletes_jobs_is_told_of_their_files(
    server: LiveServer, many: redis.Redis, tmp_path: Path
) -> None:
    """A question whether to delete jobs says which outputs are removed with them, and they are.

    Outputs of jobs by HTTP are, which the farm has in a directory of its own.
    """
    with client_of(server, jobs_directory=tmp_path, models=("null:2",)) as web:
        mine = [web.post("/v1/jobs", json={"texts": ["a"]}).json()["job"] for _ in range(2)]
        for job in mine:
            Job(many, job).cancel()
        said = [ask(web, "delete", job=jobs) for jobs in (["id-notes"], mine, [*mine, "id-notes"])]
        said += [web.get(f"/jobs/{job}/delete").text for job in ("id-notes", mine[0])]
        removed = "Output and upload are removed from the disk as well."
        some = "Output and upload of 2 of them are removed from the disk as well. Files of the"
        stays = "Files of an output stay."
        for page, words in zip(said, [stays, removed, some, stays, removed], strict=True):
            assert words in page
            assert (stays in page) is (words == stays)
        assert act(web, said[2])[0] == 303
    assert not list(tmp_path.glob("?" * 32))


def test_what_cannot_be_done_is_told(web: TestClient, many: redis.Redis) -> None:
    """A job that has changed since the question is named with its reason; the others are done."""
    page = ask(web, "delete", job=["id-mails", "id-notes", "id-letters"])
    many.hset(wire.JobKeys("id-mails").meta, "state", "open")
    many.delete(wire.JobKeys("id-notes").meta)
    status, text = act(web, page)
    assert status == 200
    assert "1 job of 3 done" in text
    assert "is running and not finished" in text
    assert "there is no such job any more" in text


def test_a_full_farm_keeps_no_other_job_from_it(
    web: TestClient, many: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job for which the farm has no place is named; those after it are done all the same."""
    usual = DO["delete"]

    def delete(services: Services, key: Key, job: str) -> None:
        if job == "id-mails":
            raise FarmFull(9, 60)
        usual(services, key, job)

    page = ask(web, "delete", job=["id-mails", "id-notes"])
    monkeypatch.setitem(cast("dict[str, Do]", DO), "delete", delete)
    status, text = act(web, page)
    assert status == 200
    assert "the farm is full (9 jobs), try again in 60 s" in text
    assert not FarmClient(many).exists("id-notes")


def test_priorities_of_many(web: TestClient, many: redis.Redis) -> None:
    """Jobs that go on are given a priority; those that have it, or have ended, are left out."""
    Job(many, "id-papers").set_terms(priority=1)
    page = ask(web, "priority-high", every="yes")
    assert "Set 1 job to high priority?" in page
    assert act(web, page) == (303, "/jobs")
    assert Job(many, "id-Wikipedia one").status().priority == 1
    assert "Urgent priority …" in web.get("/jobs", headers=BROWSER).text


def bulk(web: TestClient, verb: str, **others: object) -> dict[str, Any]:
    """Act on many jobs by HTTP, and return the answer."""
    answer = web.post("/v1/job-actions", json={"verb": verb, **others})
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def test_many_by_http(web: TestClient, many: redis.Redis) -> None:
    """A dry run names the jobs; the action is done to these though others come meanwhile."""
    dry = bulk(web, "pause", words="wiki", dry_run=True)
    assert (dry["found"], dry["possible"], dry["jobs"]) == (2, 1, ["id-Wikipedia one"])
    assert Job(many, "id-Wikipedia one").status().state == "open"
    make(many, "Wikipedia three")
    assert bulk(web, "pause", jobs=dry["jobs"])["jobs"] == dry["jobs"]
    assert Job(many, "id-Wikipedia one").status().state == "paused"
    assert Job(many, "id-Wikipedia three").status().state == "open"
    said = bulk(web, "resume", jobs=["id-Wikipedia one", "id-mails", "none"])
    assert said["jobs"] == ["id-Wikipedia one"]
    assert said["refused"]["none"] == "there is no such job any more"
    assert "is failed" in said["refused"]["id-mails"]
    urgent = bulk(web, "priority-urgent", state="paused")
    assert urgent["jobs"] == ["id-papers"]
    assert Job(many, "id-papers").status().priority == 2
    for wrong in ({"verb": "burn"}, {"verb": "cancel", "age": "year"}, {"state": "paused"}):
        assert web.post("/v1/job-actions", json=wrong).status_code == 422


def test_old_jobs_are_chosen(web: TestClient, many: redis.Redis) -> None:
    """Jobs may be chosen for having been created long ago."""
    del many
    assert bulk(web, "delete", age="before-day", dry_run=True)["jobs"] == ["id-mails"]
    assert bulk(web, "delete", age="before-week", dry_run=True)["jobs"] == []
    assert shown(web, age="before-day") == ["mails"]


def test_a_dry_run_of_retries_tells_the_truth(
    server: LiveServer, many: redis.Redis, tmp_path: Path
) -> None:
    """A dry run names the jobs that can be tried again from here, and why others cannot.

    The action itself does it to the same ones and refuses the same ones.
    """
    mine = Job(many, f"{1:032x}")
    mine.create(SPEC, 0, notes={"out": "out"})
    FarmClient(many).end(mine.id, "failed", "no memory", Settings())
    (tmp_path / mine.id).mkdir()
    write_call(tmp_path / mine.id, Call(["c.txt"], "out", {}, ""))
    asked = {"jobs": ["id-mails", "id-letters", "id-papers", "none", mine.id]}
    with client_of(server, jobs_directory=tmp_path) as web:
        found = bulk(web, "retry", dry_run=True)
        assert (found["possible"], found["jobs"]) == (1, [mine.id])
        assert "was not submitted by HTTP" in found["refused"]["id-mails"]
        assert found["refused"].keys() == {"id-mails", "id-letters"}
        page = ask(web, "retry", every="yes")
        assert "Try again what failed in 1 job?" in page
        assert "Left out, since it cannot be done to them now: 6 of 7. One of them: job id-" in page
        dry = bulk(web, "retry", dry_run=True, **asked)
        assert (dry["found"], dry["possible"], dry["jobs"]) == (5, 1, [mine.id])
        assert mine.status().state == "failed"
        wet = bulk(web, "retry", **asked)
    assert wet["jobs"] == dry["jobs"]
    assert wet["refused"].keys() == dry["refused"].keys()
    assert mine.status().state == "open"


def test_the_command_foresees_which_retries_it_can_do(
    server: LiveServer, many: redis.Redis
) -> None:
    """A dry run of retries at the command line names those that need their own command."""
    command = "embedfarm embed mails.jsonl --out vectors"
    many.hset(wire.JobKeys("id-mails").meta, "command", command)
    words = ("jobs", "bulk", "retry", "--redis", server.url, "--json")
    dry = run(*words, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    said = json.loads(dry.stdout)
    assert (said["found"], said["possible"], said["jobs"]) == (6, 0, [])
    assert said["refused"]["id-mails"] == f"it has failed; to go on with it: {command}"
    assert said["refused"].keys() == {"id-mails", "id-letters"}
    wet = run(*words, "--yes")
    assert wet.returncode == 1
    assert json.loads(wet.stdout)["refused"] == said["refused"]
    assert "done to 0 of 2 jobs" in wet.stderr


def test_many_of_a_tenant(server: LiveServer, many: redis.Redis) -> None:
    """A tenant's key finds and changes its own jobs only, and names no other."""
    secret, key = make_key("ann", ["read", "submit"], "red")
    with client_of(server, [key]) as web:
        web.headers |= {"authorization": f"Bearer {secret}"}
        assert bulk(web, "delete", dry_run=True)["found"] == 2
        said = bulk(web, "delete", jobs=["id-letters", "id-mails"])
    assert said["jobs"] == ["id-mails"]
    assert said["refused"] == {"id-letters": "there is no such job any more"}
    assert FarmClient(many).exists("id-letters")


def test_many_by_the_command_line(server: LiveServer, many: redis.Redis) -> None:
    """The command says how many it hits, asks, and does it; a dry run changes nothing."""
    words = ("jobs", "bulk", "cancel", "--redis", server.url)
    asked = run(*words, stdin=b"n\n")
    assert asked.returncode == 1
    assert "cancel: 2 jobs of 6 found" in asked.stdout
    dry = json.loads(run(*words, "--dry-run", "--state", "paused", "--json").stdout)
    assert (dry["jobs"], dry["possible"]) == (["id-papers"], 1)
    assert Job(many, "id-papers").status().state == "paused"
    done = run(*words, "--yes", "--words", "wiki")
    assert done.returncode == 0, done.stderr
    assert Job(many, "id-Wikipedia one").status().cancelled
    assert Job(many, "id-papers").status().state == "paused"
    assert run("jobs", "bulk", "delete", "--yes", "--redis", server.url).returncode == 0
    assert FarmClient(many).ended_ids(9) == []


def test_what_others_own_is_not_steered(server: LiveServer, many: redis.Redis) -> None:
    """A tenant's key neither names nor changes what another tenant owns."""
    secret, key = make_key("ann", ["read", "submit"], "red")
    with client_of(server, [key]) as web:
        web.headers |= {"authorization": f"Bearer {secret}"}
        page = ask(web, "delete", job=["id-letters", "id-mails"])
        assert "Delete 1 job?" in page
        assert "letters" not in page.partition("data-question")[2]
        form = {"verb": "delete", "job": ["id-letters"]}
        answer = web.post("/steer", data=form, headers=BROWSER)
        assert "there is no such job any more" in answer.text
    assert FarmClient(many).exists("id-letters")


def test_a_place_in_the_queue(web: TestClient, client: redis.Redis) -> None:
    """A job that waits for an ingest worker shows how many are before it."""
    submissions = Submissions(client, Settings(), client)
    for number in (1, 2):
        job = Job(client, f"{number:032x}")
        job.create(SPEC, 0, notes={"out": "out"})
        submissions.embed(job.id, Call(["c.txt"], "out", {}, ""))
    client.rpush(submissions._queue.key, b"\xff", b"somebody's")
    text = web.get("/jobs", headers=BROWSER).text
    assert text.count('is-queued">queued<') == 2
    assert [text.count(f"place {place} in the queue") for place in (1, 2, 3)] == [1, 1, 0]


def test_a_page_offers_only_retries_that_can_be_done(web: TestClient, many: redis.Redis) -> None:
    """The page of a job that failed offers to try it again if it came by HTTP."""
    mine = Job(many, f"{1:032x}")
    mine.create(SPEC, 0)
    FarmClient(many).end(mine.id, "failed", "no memory", Settings())
    for job, offered in ((mine.id, True), ("id-mails", False)):
        page = web.get(f"/jobs/{job}", headers=BROWSER).text
        assert (f'href="/jobs/{job}/retry"' in page) is offered
        assert f'href="/jobs/{job}/delete"' in page
