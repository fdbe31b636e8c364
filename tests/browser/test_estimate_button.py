"""Tests of the button on the form for a new job that says what the job will take."""

import json
from pathlib import Path
from typing import Final

import pytest
import redis
from playwright.sync_api import Browser, FilePayload, expect

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.watch.corpus_beginning import BEGINNING_BYTES
from tests.browser.conftest import SCREENSHOTS, Watched
from tests.support import LiveServer
from tests.web.test_first_estimates import remember, rows
from tests.web.test_gate import served

pytestmark = pytest.mark.system

NULL: Final = "null:16"


def test_the_form_says_what_it_will_take(
    browser: Browser, server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """The answer is shown in the form, nothing is submitted, and of a file its beginning goes."""
    remember(client, JobSpec(model=NULL), 3000.0, 1000.0)
    home = {"state_directory": str(tmp_path), "models": json.dumps([NULL])}
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with served(server, **home) as ((host, port), _):
        watched = Watched(browser.new_context())
        page = watched.page
        page.goto(f"http://{host}:{port}/jobs/new")
        page.get_by_label("Texts, one in each line").fill("one two\nthree four")
        page.get_by_role("button", name="Estimate").click()
        expect(page.get_by_text("2 chunks, about 7 tokens")).to_be_visible()
        page.screenshot(path=SCREENSHOTS / "estimate-texts.png", full_page=True)

        page.goto(f"http://{host}:{port}/jobs/new?of=file")
        whole = rows(20_000)
        sent: list[int] = []
        page.on("request", lambda each: sent.append(len(each.post_data_buffer or b"")))
        page.get_by_label("File", exact=True).set_input_files(
            FilePayload(name="corpus.jsonl", mimeType="text/plain", buffer=whole)
        )
        page.get_by_role("button", name="Estimate").click()
        expect(page.get_by_text("about 20,000 chunks, about 2,000,000 tokens")).to_be_visible()
        assert max(sent) < 2 * BEGINNING_BYTES
        page.screenshot(path=SCREENSHOTS / "estimate-file.png", full_page=True)

        page.get_by_label("File", exact=True).set_input_files(
            FilePayload(name="corpus.parquet", mimeType="text/plain", buffer=b"PAR1")
        )
        page.get_by_role("button", name="Estimate").click()
        expect(page.get_by_text("parquet is not estimated by its beginning")).to_be_visible()
        assert not watched.faults
    assert not FarmClient(client).job_ids()
