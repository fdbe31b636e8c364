"""Tests of the pages without a browser: what they say, to whom, and how soon."""

import logging
import re
import statistics
import time
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html import unescape
from itertools import product

import msgspec
import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.contract import wire
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import JobShare, Plan
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.contract.usage import Account
from embedfarm.scheduler.timeline_drawing import Bar
from embedfarm.web.auth.keys import Key, Scope
from embedfarm.web.auth.sessions import COOKIE
from embedfarm.web.http.rendering import duration, local_path, number, percent, size, span
from embedfarm.web.pages.chart_drawing import (
    ChartStyle,
    Curve,
    Theme,
    TimeAxis,
    Width,
    draw_bars,
    draw_curves,
    draw_pairs,
)
from embedfarm.web.pages.job import actions_for
from embedfarm.web.pages.scheduler import changes
from tests.contract.little_job import (
    CHUNKS,
    COMPLETION,
    DECISION,
    RATE,
    SAMPLE,
    STATS,
    heartbeat,
    make_job,
    run_everything,
)
from tests.support import LiveServer
from tests.web.conftest import client_of

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PAGES = ("/", "/workers", "/scheduler")
CHARTS = ("/charts/farm.svg", "/charts/predictions.svg")
THEMES: tuple[Theme, ...] = ("light", "dark")
WIDTHS: tuple[Width, ...] = ("wide", "narrow")
LOOKS = [ChartStyle(theme, width) for theme, width in product(THEMES, WIDTHS)]
ODD = "<script>alert(1)</script> $x_1$ \u4e16\u754c {{ 7*7 }} \"'><img src=x onerror=alert(1)>"


@pytest.fixture
def keyed(server: LiveServer, keys: dict[str, tuple[str, Key]]) -> Iterator[TestClient]:
    """An application with keys, and a client like a browser that has none yet."""
    with client_of(server, [key for _, key in keys.values()]) as web:
        web.headers |= BROWSER
        yield web


def sign_in(web: TestClient, secret: str, then: str = "/") -> None:
    """Sign in with a key, as a person does."""
    answer = web.post("/login", data={"key": secret, "then": then}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, then)


def test_pages_of_an_empty_farm(web: TestClient) -> None:
    """Every page and chart can be had while the farm is still empty."""
    for page in PAGES:
        answer = web.get(page, headers=BROWSER)
        assert answer.status_code == 200, page
        assert "embedfarm " in answer.text
        assert answer.headers["cache-control"] == "no-store"
    for chart in CHARTS:
        ET.fromstring(web.get(chart).content)  # noqa: S314 -- our own


def test_pages_of_a_farm_at_work(web: TestClient, client: redis.Redis) -> None:
    """The pages show jobs, workers, failures with their reasons, and ended jobs."""
    job = run_everything(client)
    client.set(wire.SCHEDULER, "1")
    page = web.get("/").text
    for words in ("little", "other", "one", "no memory", "Ended jobs"):
        assert words in page
    page = web.get(f"/jobs/{job.id}").text
    for words in ("chunk 3", "bad", "worker two cannot embed it: no memory", "null:2", "Cancel"):
        assert words in page
    assert "one" in web.get("/workers").text
    page = web.get("/scheduler").text
    assert "leave out" in page
    for look in LOOKS:
        for name in ("speed", "lanes"):
            answer = web.get(f"/charts/jobs/{job.id}/{name}.svg", params=look._asdict())
            ET.fromstring(answer.content)  # noqa: S314 -- our own


def test_plans_are_told(web: TestClient, client: redis.Redis) -> None:
    """The page of the scheduler says what each worker may lease, and which model it loads ahead."""
    run_everything(client)
    client.delete(wire.SCHEDULER)
    farm = FarmClient(client)
    fence = farm.plans.elect("test", 600)
    shares = [JobShare(job="little", tokens=1234, blocks=2)]
    shares += [JobShare(job="other", tokens=0, blocks=1, ahead=True)]
    assert farm.plans.publish([Plan(worker="one", fence=fence, shares=shares)], fence, 600)
    page = web.get("/scheduler", headers=BROWSER).text
    words = " ".join(re.sub("<[^>]+>", " ", page).split())
    told = "tokens in 2 blocks loads the model of other ahead, if there is room"
    assert f"1,234 {told}" in words


def test_notes_that_are_not_kept_are_counted(web: TestClient, client: redis.Redis) -> None:
    """The notes of a pass that were not kept are counted on the scheduler's page."""
    decision = msgspec.structs.replace(DECISION, left_out={"tail": 1234})
    FarmClient(client).plans.tell(decision, STATS)
    assert "notes not kept: 1,234" in web.get("/scheduler", headers=BROWSER).text


def test_a_micro_batch_of_no_tokens_is_shown(web: TestClient, client: redis.Redis) -> None:
    """A micro-batch without a token count is no error on the workers' page."""
    farm = FarmClient(client)
    farm.statistics.remember({"one|null:2|0": RATE}, [])
    farm.statistics.report(msgspec.structs.replace(COMPLETION, tokens=0), 100)
    assert web.get("/workers", headers=BROWSER).status_code == 200


def test_pages_go_on_among_records_of_another_version(web: TestClient, client: redis.Redis) -> None:
    """The pages show what they can read, and name records of another version as left out."""
    run_everything(client)
    newer = b"\x02\x90"
    for key in (wire.POLICY, wire.STATS, wire.plan_key("one")):
        client.set(key, newer)
    client.lpush(wire.DECISIONS, newer)
    client.hset(wire.HISTORY, "one|null:2|4", newer)
    client.hset(wire.worker_key("two"), "heartbeat", newer)
    client.zadd(wire.WORKERS, {"two": time.time()})
    client.xadd(wire.EVENTS, {"done": newer})
    client.xadd(wire.SAMPLES, {"sample": newer})
    client.hset(wire.JobKeys("other").meta, "spec", newer)
    client.hset(wire.JobKeys("little").meta, "account:two#1", newer)
    for page in (*PAGES, "/jobs/little", "/jobs/other", "/metrics", "/v1/jobs", "/v1/workers"):
        assert web.get(page, headers=BROWSER).status_code == 200, page
    page = web.get("/", headers=BROWSER).text
    assert "ef:{farm}:worker:two is left out: Heartbeat record of version 2" in page


def test_rows_that_were_left_out_are_named(web: TestClient, client: redis.Redis) -> None:
    """A job whose corpus had bad rows says how many have no index, on its page and by HTTP."""
    job = make_job(client, 2)
    job.note("rows_skipped", 1234)
    assert (
        "Bad rows of the corpus were left out, and have no index: 1,234"
        in web.get(f"/jobs/{job.id}").text
    )
    assert web.get(f"/v1/jobs/{job.id}").json()["rows_skipped"] == 1234


def test_curves_of_a_day_and_a_week(web: TestClient, client: redis.Redis) -> None:
    """The overview and a job's page show an hour, a day or a week, each of its own samples."""
    job, now = make_job(client, 2), time.time()
    for stream, ages in ((wire.SAMPLES, (5, 15)), (wire.LONG_SAMPLES, (600, 7200, 100_000))):
        for age in sorted(ages, reverse=True):
            done = {job.id: (1000 * age, 10 * age)}
            sample = msgspec.structs.replace(SAMPLE, seconds=10.0, workers={}, jobs=done)
            client.xadd(stream, {"sample": encode(sample)}, id=f"{int(1000 * (now - age))}-0")
    for path in ("/", f"/jobs/{job.id}"):
        for period, shown in (
            ("hour", (500, 1500)),
            ("day", (60_000, 720_000)),
            ("week", (10**7,)),
        ):
            page = web.get(path, params={"period": period}).text
            assert f'<a href="{path}?period={period}" aria-current="page">' in page
            assert f"&amp;period={period}" in page
            for rate in shown:
                assert f'<td class="n">{number(rate)}</td>' in page, (path, period, rate)
        assert f'<td class="n">{number(10**7)}</td>' not in web.get(f"{path}?period=day").text
        assert web.get(path, params={"period": "year"}).status_code == 422
    for chart, marks in (("hour", "min"), ("day", "-8 h"), ("week", "-2 d")):
        for drawn in ("/charts/farm.svg", f"/charts/jobs/{job.id}/speed.svg"):
            svg = web.get(drawn, params={"period": chart}).text
            assert svg.endswith("</svg>\n")
            assert drawn != "/charts/farm.svg" or marks in svg


def test_curves_of_a_jobs_workers(web: TestClient, client: redis.Redis) -> None:
    """A job's page has the speed of each of its workers, of many those that did most."""
    job, now = make_job(client, 2), time.time()

    def work(age: int, **tokens: int) -> None:
        done = {job.id: (sum(tokens.values()), 10)}
        sample = msgspec.structs.replace(
            SAMPLE, seconds=10.0, jobs=done, job_workers={job.id: tokens, "other": {"x": 10}}
        )
        client.xadd(wire.SAMPLES, {"sample": encode(sample)}, id=f"{int(1000 * (now - age))}-0")

    def rows() -> list[tuple[str, str]]:
        page = web.get(f"/jobs/{job.id}").text
        _, _, table = page.partition('<details id="workers-table">')
        return re.findall('<th scope="row">(.+?)</th><td class="n">(.+?)</td>',
                          table.partition("</details>")[0])  # fmt: skip

    chart = f"/charts/jobs/{job.id}/workers.svg"
    assert "no worker" in web.get(chart).text
    work(40, one=1000)
    assert rows() == []  # the whole job's curve is that of its only worker
    work(30, one=1000, two=6000)
    assert rows() == [("two", "300"), ("one", "100")]
    svg = web.get(f"{chart}?theme=dark").text
    assert ">two<" in svg
    assert ">x<" not in svg
    work(20, **{f"w{place}": 10_000 + place for place in range(7)})
    assert [name for name, _ in rows()] == ["w6", "w5", "w4", "w3", "w2", "4 others"]
    assert rows()[-1] == ("4 others", number((10_001 + 10_000 + 2000 + 6000) / 30))


def test_ids_that_come_again_are_counted(web: TestClient, client: redis.Redis) -> None:
    """The page of a job says how many chunks have the id of an earlier one."""
    job = make_job(client, 2)
    assert "id that an earlier" not in web.get(f"/jobs/{job.id}").text
    job.note("ids_repeated", 1234)
    text = unescape(web.get(f"/jobs/{job.id}").text)
    assert "Chunks with an id that an earlier chunk has: 1,234" in text


def test_texts_that_say_little_are_counted(web: TestClient, client: redis.Redis) -> None:
    """The page of a job says how many texts all workers found empty, or cut at the limit."""
    job, reports = make_job(client, 2), FarmClient(client).reports
    text = web.get(f"/jobs/{job.id}").text
    assert "without a text" not in text
    assert "at the model's limit" not in text
    for worker in ("one", "two"):
        reports.account(worker, "1", {(job.id, ""): Account(texts_empty=700, texts_full=3)})
    text = unescape(web.get(f"/jobs/{job.id}").text)
    assert "Chunks without a text, or with white space alone: 1,400" in text
    assert "beyond which nothing of a text is in its vector: 6" in text


def test_chunks_of_the_vector_cache_are_counted(web: TestClient, client: redis.Redis) -> None:
    """The page of a job says how many vectors no device made, if there are any."""
    job, reports = make_job(client, 2), FarmClient(client).reports
    assert "vector cache" not in web.get(f"/jobs/{job.id}").text
    for worker in ("one", "two"):
        reports.account(worker, "1", {(job.id, ""): Account(chunks_cached=700)})
    assert "1,400 chunks from the vector cache" in unescape(web.get(f"/jobs/{job.id}").text)


def test_a_trial_of_engines_is_shown(web: TestClient, client: redis.Redis) -> None:
    """A worker that tries engines before it loads a model for the first time says so."""
    beat = msgspec.structs.replace(heartbeat("one"), state="loading", trying_engines=True)
    FarmClient(client).beat(beat, 60)
    assert "tries which engine is faster" in web.get("/workers", headers=BROWSER).text


def test_a_paused_farm_has_no_end(web: TestClient, client: redis.Redis) -> None:
    """Where all work is paused nothing is done "in 0 s", and something is waiting."""
    make_job(client, 2).pause()
    page = web.get("/", headers=BROWSER).text
    assert "all is paused" in page
    assert not {"nothing is waiting", "0 s"} & set(re.split(r"[<>]", page))


def test_what_others_wrote_stays_text(web: TestClient, client: redis.Redis) -> None:
    """Names, reasons, tenants and commands are shown as text, and never as markup."""
    job = Job(client, "odd")
    spec = JobSpec(model=f"null:2 {ODD}", name=ODD, prompt=ODD)
    job.create(spec, 0)
    job.set_terms(tenant=ODD[:60])
    job.note("command", ODD)
    FarmClient(client).reports.refuse("odd", ODD, ODD)
    FarmClient(client).beat(heartbeat(ODD), 60)
    for page in (*PAGES, "/jobs/odd", "/jobs/odd/cancel", f"/scheduler/passes?passes={ODD}"):
        text = web.get(page, headers=BROWSER).text
        assert "<script>alert" not in text, page
        assert "<img src=x" not in text, page
        assert "49" not in text or "{{" in text
    assert "&lt;script&gt;alert(1)" in web.get("/jobs/odd").text


def test_errors_are_pages_for_browsers(web: TestClient) -> None:
    """A browser gets a page with the same status and words, a program JSON."""
    page = web.get("/jobs/none", headers=BROWSER)
    assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "no such job: none" in page.text
    assert web.get("/jobs/none").json()["detail"] == "no such job: none"
    assert web.get("/nothing", headers=BROWSER).status_code == 404
    assert "error" in web.get("/v1/models/none", headers=BROWSER).json()


def test_actions_ask_first_and_are_logged(
    web: TestClient, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """An action changes a job only after the question is answered, and is logged."""
    job = make_job(client, 2)
    caplog.set_level(logging.INFO)
    for verb, state in (("pause", "paused"), ("resume", "open"), ("cancel", "cancelled")):
        before = job.status().state
        assert 'method="post"' in web.get(f"/jobs/{job.id}/{verb}", headers=BROWSER).text
        assert job.status().state == before
        answer = web.post(f"/jobs/{job.id}/{verb}", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{job.id}")
        assert job.status().state == state
    assert web.post(f"/jobs/{job.id}/delete", follow_redirects=False).headers["location"] == "/"
    assert not client.exists(job.keys.meta)
    assert [each.split()[1] for each in caplog.messages if each.startswith("anybody")] == [
        "pauses", "resumes", "cancels", "deletes",
    ]  # fmt: skip
    assert web.post("/jobs/none/pause", headers=BROWSER).status_code == 404


def test_actions_come_from_our_own_pages(web: TestClient, client: redis.Redis) -> None:
    """A form of another site, or one that hides where it is, changes nothing."""
    job = make_job(client, 1)
    for origin in ("http://evil.example", "null"):
        answer = web.post(f"/jobs/{job.id}/cancel", headers=BROWSER | {"origin": origin})
        assert answer.status_code == 403
    assert job.status().state == "open"
    assert web.post(f"/jobs/{job.id}/pause", headers={"origin": "http://localhost"}).is_success


def test_signing_in(
    keyed: TestClient,
    client: redis.Redis,
    keys: dict[str, tuple[str, Key]],
    server: LiveServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Signing in makes a session whose secret only the cookie has, and which can be ended."""
    caplog.set_level(logging.INFO)
    secret = keys["read"][0]
    answer = keyed.get("/jobs/a?b=c", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?then=/jobs/a%3Fb%3Dc")
    assert keyed.get("/v1/jobs", headers={"accept": "*/*"}).status_code == 401
    wrong = keyed.post("/login", data={"key": "ef_wrong"})
    assert (wrong.status_code, "none of the farm" in wrong.text) == (401, True)
    sign_in(keyed, secret, "/workers")
    cookie = next(each for each in keyed.cookies.jar if each.name == COOKIE)
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert cookie.get_nonstandard_attr("SameSite") == "strict"
    assert keyed.get("/").status_code == 200
    session = next(client.scan_iter("ef:{farm}:session:*"))
    assert str(cookie.value).encode() not in session
    assert client.get(session) == keys["read"][1].sha256.encode()
    assert 0 < client.ttl(session) <= 12 * 3600
    with client_of(server, [keys["admin"][1]]) as others:  # from which that key was taken
        others.cookies.set(COOKIE, str(cookie.value))
        assert others.get("/").status_code == 401
    assert keyed.post("/logout", follow_redirects=False).headers["location"] == "/login"
    keyed.cookies.set(COOKIE, str(cookie.value))  # somebody kept it
    assert keyed.get("/", headers={"accept": "*/*"}).status_code == 401
    assert secret not in caplog.text


def test_scopes_hold_on_pages(
    keyed: TestClient, client: redis.Redis, keys: dict[str, tuple[str, Key]]
) -> None:
    """A key that may only read sees no buttons, and its forms are refused."""
    job = make_job(client, 1)
    wanted = {
        Scope.READ: (200, 403, 403),
        Scope.SUBMIT: (403, 303, 403),
        Scope.ADMIN: (200, 303, 303),
    }
    for scope, statuses in wanted.items():
        sign_in(keyed, keys[scope][0])
        page = keyed.get(f"/jobs/{job.id}")
        passes = keyed.post("/scheduler/passes", data={"passes": "size"}, follow_redirects=False)
        verb = "resume" if job.status().state == "paused" else "pause"
        acted = keyed.post(f"/jobs/{job.id}/{verb}", follow_redirects=False)
        assert (page.status_code, acted.status_code, passes.status_code) == statuses
        if scope is Scope.READ:
            assert "/pause" not in page.text
            assert "New job" not in page.text
            assert "leave out" not in keyed.get("/scheduler").text
        keyed.post("/logout")


def test_passes_are_switched(web: TestClient, client: redis.Redis) -> None:
    """Each step on the page leads to a list one step away; an impossible list is refused."""
    steps = changes(["a", "b", "c"], ["d"])
    assert steps["b"] == {"leave out": "a,c", "up": "b,a,c", "down": "a,c,b"}
    assert (steps["a"].get("up"), steps["d"]) == (None, {"add": "a,b,c,d"})
    asked = web.get("/scheduler/passes", params={"passes": "defer,size"})
    assert "defer → size" in asked.text
    web.post("/scheduler/passes", data={"passes": "defer,size"})
    assert FarmClient(client).plans.policy() == ["defer", "size"]
    assert web.post("/scheduler/passes", data={"passes": "nonsense"}).status_code == 409


def test_only_ways_on_this_site() -> None:
    """A next page that a client sent leads nowhere but to this site."""
    for path in ("//evil.example", "/\\evil.example", "http://evil.example", "", "/a\nb"):
        assert local_path(path) == "/"
    assert local_path("/jobs/a?b=c#d") == "/jobs/a?b=c#d"


@pytest.mark.parametrize("look", LOOKS)
def test_charts_take_any_figures(look: ChartStyle) -> None:
    """Charts are drawn of no figures, of gaps, and of names with markup or unknown letters."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = draw_bars([Bar(ODD, -3, -1, "#123456")], [ODD, "two"], 60, look).decode()
        assert "<script" not in svg
        for times in ([], [1.0], [1.0, 2.0, 300.0]):
            curve = Curve("tokens", times, times)
            ET.fromstring(draw_curves([curve, curve], TimeAxis(0, 3600), look))  # noqa: S314 -- our own
        ET.fromstring(draw_pairs([], look))  # noqa: S314 -- our own


def test_the_chart_of_an_ended_job_ends_with_it(web: TestClient, client: redis.Redis) -> None:
    """The chart of a job that goes on ends now, and that of an ended one at its end."""
    job = run_everything(client)
    chart = f"/charts/jobs/{job.id}/speed.svg?theme="
    assert ">now<" in web.get(f"{chart}light").text
    FarmClient(client).end(job.id, "finished", "", Settings())
    ended = web.get(f"{chart}dark").text
    assert (">end<" in ended, ">now<" in ended) == (True, False)


def test_words_for_figures() -> None:
    """Numbers, shares, sizes and times are written as a person writes them."""
    assert [number(each) for each in (0, 2.25, 12.3, 41_200, 1_234_567)] == [
        "0", "2.2", "12", "41,200", "1.23 M",
    ]  # fmt: skip
    assert [percent(each) for each in (0.0, 0.99999, 1.0, 2.5)] == [
        "0.0 %",
        "99.9 %",
        "100 %",
        "250 %",
    ]
    assert [size(each) for each in (10, 1536, 3 << 30)] == ["10 B", "1.5 KiB", "3.0 GiB"]
    assert [duration(each) for each in (0, 2.34, 75, 3700, 90_000)] == [
        "0 s", "2.3 s", "1 min 15 s", "1 h 1 min", "1 d 1 h",
    ]  # fmt: skip
    assert span((61, 62)) == "1 min"
    assert span((6.2, 9.4)) == "6 s to 9 s"
    assert span((50, 200)) == "50 s to 3 min"


@pytest.mark.alone
def test_pages_come_at_once(server: LiveServer, client: redis.Redis) -> None:
    """A page takes less than 100 ms beside 10,000 ended jobs with 100,000 failed chunks.

    A search through all of them takes less than half a second.
    """

    def seconds(page: str) -> float:
        took = []
        for _ in range(7):
            began = time.perf_counter()
            assert web.get(page, headers=BROWSER).status_code == 200
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    with client_of(server) as web:
        empty = {page: seconds(page) for page in PAGES}
        fail_much(client, 10_000, 10)
        for page in ("/jobs", "/jobs?words=ended-05"):
            assert seconds(page) < 0.5, page
        for page in (*PAGES, "/jobs/ended-00000"):
            assert seconds(page) < max(0.1, 2 * empty.get(page, empty["/"])), page
        assert "ended-09999" in web.get("/").text


def fail_much(client: redis.Redis, jobs: int, failures: int) -> None:
    """Put finished jobs on record, each with so many failed chunks."""
    source = """
    for job = tonumber(ARGV[1]), tonumber(ARGV[2]) do
      local name = string.format('ended-%05d', job)
      redis.call('HSET', 'ef:{' .. name .. '}:meta', 'spec', ARGV[3], 'state', 'finished',
        'chunk_count', 1000, 'chunks_done', 1000, 'chunks_failed', ARGV[5],
        'ended_ms', 1, 'created_ms', 1)
      redis.call('ZADD', ARGV[4], job, name)
      for place = 1, tonumber(ARGV[5]) do
        redis.call('XADD', 'ef:{' .. name .. '}:failed', '*',
          'index', place, 'reason', 'odd', 'attempts', 3)
      end
    end"""
    spec = encode(JobSpec(model="null:2"))
    for first in range(0, jobs, 1000):
        client.eval(source, 0, first, first + 999, spec, wire.ENDED, failures)


def test_actions_fit_the_state() -> None:
    """A job offers only the actions that its state allows."""
    job = JobStatus(state="open", chunk_count=-1)
    assert actions_for(job) == ["pause", "cancel"]
    assert actions_for(JobStatus(state="paused")) == ["resume", "cancel"]
    assert actions_for(JobStatus(state="cancelled")) == ["delete"]
    done = JobStatus(state="finished", chunk_count=CHUNKS, drained_upto=CHUNKS)
    assert actions_for(done) == ["delete"]
