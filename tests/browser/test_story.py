"""Tests of what a person does on the pages, from the first text to the last vector."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import redis
from playwright.sync_api import Browser, FilePayload, Page, expect

from embedfarm.contract.encoding import decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, ChunkError, Result, text_checksums
from tests.browser.conftest import SECONDS, Watched
from tests.farm.harness import null_vectors, role
from tests.support import LiveServer, wait_until
from tests.web.test_gate import served

pytestmark = pytest.mark.system

MODEL: Final = "null:16:60"  # a chunk of ten tokens in a sixth of a second
TEXTS: Final = [f"question {number}: how do I change my password" for number in range(300)]


@contextlib.contextmanager
def worker(server: LiveServer, device: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that no supervisor starts again."""
    with subprocess.Popen(
        [sys.executable, "-m", "embedfarm.workers.main", "--device", device],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"EMBEDFARM_REDIS_URL": server.url},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def idle_farm(server: LiveServer, tmp_path: Path) -> Iterator[str]:
    """The URL of the pages of a farm of real processes that has no worker."""
    home = {"state_directory": str(tmp_path / "state"), "models": json.dumps([MODEL])}
    with (
        role(server, tmp_path, "schedule", **home),
        # So small blocks that the workers leave some to `fail_one`.
        role(server, tmp_path, "ingest", block_chunks_max="8", **home),
        served(server, **home) as ((host, port), _),
    ):
        yield f"http://{host}:{port}"


@pytest.fixture
def farm(server: LiveServer, client: redis.Redis, idle_farm: str) -> Iterator[str]:
    """The URL of the pages of a farm of real processes, with one worker."""
    with worker(server, "cpu-0"):
        wait_until(lambda: FarmClient(client).workers(), SECONDS)
        yield idle_farm


def fail_one(job: Job) -> int:
    """Commit a block whose first chunk fails; return that chunk's index, -1 without a block."""
    found = job.stream.read("odd", 1)
    if not found:
        return -1
    block = decode(Block, found[0].data)
    result = Result(
        start=block.start,
        count=block.count,
        dimensions=16,
        dtype="<f4",
        vectors=null_vectors(block.texts, 16).tobytes(),
        checksums=text_checksums(block.texts),
        errors=[ChunkError(index=block.start, reason="the device was odd", attempts=3)],
        token_count=block.count,
    )
    assert job.stream.commit([(found[0], result)]) == ["committed"]
    return block.start


def submit(page: Page, base: str, texts: list[str]) -> str:
    """Submit texts as a person does, and return the job's id."""
    page.goto(base)
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="New job").click()
    page.get_by_label("Texts, one in each line").fill("\n".join(texts))
    page.get_by_label("Name", exact=True).fill("questions")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**/jobs/*")
    return page.url.rpartition("/")[2]


def do(page: Page, verb: str, confirmation: str) -> None:
    """Press a button, and answer the question."""
    page.get_by_role("link", name=verb).click()
    page.get_by_role("button", name=confirmation).click()


def shown_done(page: Page) -> float:
    """The number of chunks that the page says are embedded."""
    return float(page.locator("progress").first.get_attribute("value") or 0)


def test_a_job_from_submit_to_download(
    browser: Browser, server: LiveServer, client: redis.Redis, farm: str
) -> None:
    """A person submits, steers, retries, downloads and searches a job, though a worker dies."""
    watched = Watched(browser.new_context())
    page = watched.page
    with worker(server, "cpu-1") as second:
        wait_until(lambda: len(FarmClient(client).workers()) == 2, SECONDS)
        job = Job(client, submit(page, farm, TEXTS))
        wait_until(lambda: (job.status().chunks_in, fail_one(job))[1] >= 0, SECONDS)
        failed = job.results.failures(1)[1][0].index

        loaded = page.evaluate("performance.timeOrigin")
        wait_until(lambda: shown_done(page) > 0, SECONDS)
        before = shown_done(page)
        wait_until(lambda: shown_done(page) > before, SECONDS)
        assert page.evaluate("performance.timeOrigin") == loaded  # it moves without a reload

        do(page, "Pause", "Pause")
        expect(page.locator(".badge").first).to_have_text("paused")
        assert job.status().state == "paused"
        do(page, "Resume", "Resume")
        expect(page.locator(".badge").first).to_have_text("running")

        name = next(beat.worker for beat in FarmClient(client).workers() if "cpu-1" in beat.device)
        second.kill()
        page.goto(farm)
        expect(page.get_by_text(f"worker {name} is lost").first).to_be_visible()
    page.get_by_role("link", name="questions").first.click()
    expect(page.locator(".badge").first).to_have_text("finished")

    chunk = page.locator(f"#chunk-{failed}")
    chunk.locator("summary").click()
    expect(chunk.get_by_text("the device was odd").last).to_be_visible()
    do(page, "Try these again", "Try again")
    wait_until(lambda: job.status().chunks_failed == 0, SECONDS)
    expect(page.locator(".badge").first).to_have_text("finished")
    expect(page.get_by_text("nothing was given up on")).to_be_visible()

    with page.expect_download() as download:
        page.get_by_role("link", name="JSON Lines").click()
    rows = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert download.value.suggested_filename == "questions.jsonl"
    assert [row["index"] for row in rows] == list(range(len(TEXTS)))
    vectors = np.array([row["embedding"] for row in rows], dtype=np.float32)
    np.testing.assert_array_equal(vectors, null_vectors(TEXTS, 16))

    page.get_by_label("Find the chunks nearest to a text").fill(TEXTS[7])
    page.get_by_role("button", name="Search").click()
    found = page.get_by_role("list", name="Nearest chunks").get_by_role("listitem")
    expect(found).to_have_count(10)
    expect(found.first).to_contain_text("1.000")
    expect(found.first).to_contain_text(TEXTS[7])
    assert not watched.faults


def test_what_was_embedded_of_a_cancelled_job(
    browser: Browser, client: redis.Redis, farm: str
) -> None:
    """A person cancels a job in the middle, and downloads what was embedded of it, in order."""
    watched = Watched(browser.new_context())
    page = watched.page
    job = Job(client, submit(page, farm, TEXTS))
    wait_until(lambda: job.status().chunks_done >= 16, SECONDS)
    do(page, "Cancel", "Cancel")
    expect(page.locator(".badge").first).to_have_text("cancelled")
    wait_until(lambda: job.status().ended, SECONDS)
    with page.expect_download() as download:
        page.get_by_role("link", name="JSON Lines").click()
    rows = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert 16 <= len(rows) < len(TEXTS)
    assert len(rows) == job.status().drained_upto
    vectors = np.array([row["embedding"] for row in rows], dtype=np.float32)
    np.testing.assert_array_equal(vectors, null_vectors(TEXTS, 16)[: len(rows)])
    expect(page.get_by_text("was cancelled by HTTP")).to_be_visible()
    assert not watched.faults


def test_many_jobs_are_tried_again(
    browser: Browser, server: LiveServer, client: redis.Redis, idle_farm: str
) -> None:
    """A person tries again what failed in several jobs at once, after their number was shown."""
    watched = Watched(browser.new_context())
    page = watched.page
    jobs = []
    for _ in range(2):  # one after the other, since `ingest` reads one corpus at a time
        jobs.append(Job(client, submit(page, idle_farm, TEXTS[:40])))
        wait_until(lambda: fail_one(jobs[-1]) >= 0, SECONDS)
        with worker(server, "cpu-0"):
            wait_until(lambda: jobs[-1].status().ended, SECONDS)
        assert jobs[-1].status().chunks_failed == 1
    with worker(server, "cpu-0"):
        page.goto(f"{idle_farm}/jobs")
        page.get_by_label("State").select_option(label="finished, with failures")
        page.get_by_role("button", name="Show").click()
        page.get_by_label("all 2, not only those marked").check()
        page.get_by_role("button", name="Try again …").click()
        expect(page.get_by_role("heading", name="Try again what failed in 2 jobs?")).to_be_visible()
        page.get_by_role("button", name="Try again").click()
        wait_until(lambda: not any(job.status().chunks_failed for job in jobs), SECONDS)
        assert {job.status().state for job in jobs} == {"finished"}
    assert not watched.faults


def test_a_file_is_uploaded(browser: Browser, client: redis.Redis, farm: str) -> None:
    """A refused upload says why and keeps the form; one that is taken becomes a job of its name."""
    watched = Watched(browser.new_context())
    page = watched.page
    page.goto(f"{farm}/jobs/new?of=file")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:40])
    file = FilePayload(name="mails.jsonl", mimeType="application/jsonl", buffer=lines.encode())
    page.get_by_label("File", exact=True).set_input_files(file)
    page.get_by_text("More: when it must be done").click()
    page.get_by_label("Deadline").fill("soon")
    page.get_by_label("Normalize").check()
    page.get_by_role("button", name="Submit").click()
    expect(page.locator("#note")).to_contain_text("'soon' is no deadline")
    page.get_by_label("Deadline").fill("2h")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile("/jobs/[0-9a-f]{32}$"))
    expect(page.get_by_role("heading", name="mails.jsonl")).to_be_visible()
    expect(page.locator(".badge").first).to_have_text("finished")
    expect(page.get_by_text("is finished")).to_be_visible()  # in the timeline
    job = FarmClient(client).job(page.url.rpartition("/")[2])
    assert job.spec().normalize
    assert job.status().deadline_ms
    assert not watched.faults


def test_without_javascript(browser: Browser, client: redis.Redis, farm: str) -> None:
    """A person without JavaScript submits, pauses, resumes, downloads and deletes a job."""
    watched = Watched(browser.new_context(java_script_enabled=False))
    page = watched.page
    job = Job(client, submit(page, farm, TEXTS[:60]))
    do(page, "Pause", "Pause")
    expect(page.locator(".badge").first).to_have_text("paused")
    do(page, "Resume", "Resume")
    expect(page.locator(".badge").first).to_have_text(re.compile("queued|running"))
    wait_until(lambda: job.status().state == "finished", SECONDS)
    page.reload()
    expect(page.locator(".badge").first).to_have_text("finished")
    with page.expect_download() as download:
        page.get_by_role("link", name="NumPy").click()
    np.testing.assert_array_equal(np.load(download.value.path()), null_vectors(TEXTS[:60], 16))
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Jobs").click()
    page.get_by_label("Name, id or model").fill("quest")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("checkbox", name="mark questions").check()
    page.get_by_role("button", name="Delete …").click()
    page.get_by_role("button", name="Delete 1 job").click()
    assert page.url == f"{farm}/jobs?words=quest"
    expect(page.get_by_text("There is no job")).to_be_visible()
    page.get_by_role("button", name="dark theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert not watched.faults
