"""Tests of what is shown of one chunk that failed: its id, why, and its text."""

from pathlib import Path
from typing import Any, Final

import pytest

from embedfarm.contract import wire
from embedfarm.workers import model_store
from tests.ingest.rq_farm import START_SECONDS
from tests.poison_worker import HEALED, MARKER, open_poison_engine
from tests.support import LiveServer, wait_until
from tests.web.conftest import client_of
from tests.web.test_jobs_page import BROWSER
from tests.web.test_submissions import doing, facts, wait_for

BAD: Final = f"<b>bad</b> {MARKER}raises"
TEXTS: Final = [{"id": f"id {n}", "text": BAD if n == 7 else f"text {n}"} for n in range(40)]


def test_a_failed_chunk_is_shown_with_its_text(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed chunk comes with its reason, id and text as soon as it fails, by HTTP and as a page.

    A chunk that has not failed is not found, and a corpus that is gone, has changed, or is too
    large to be read for this, costs the text alone, and so does an output that another job has
    filled since.
    """
    monkeypatch.setenv(HEALED, str(tmp_path / "healed"))
    monkeypatch.setattr(model_store, "open_engine", open_poison_engine)
    settings: dict[str, Any] = {"models": ("null:16",), "jobs_directory": tmp_path / "jobs"}
    with client_of(server, **settings) as web, doing(server, tmp_path) as door:
        job = web.post("/v1/jobs", json={"texts": TEXTS, "model": "null:16"}).json()["job"]
        address = f"/v1/jobs/{job}/errors"
        wait_until(lambda: facts(web, job)["chunks_failed"] == 1, START_SECONDS)
        early = web.get(f"{address}/7").json()
        wait_for(web, job, "finished")
        late = web.get(f"{address}/7").json()
        [listed] = web.get(address).json()["errors"]
        page = web.get(f"/jobs/{job}/errors/7", headers=BROWSER)
        links = web.get(f"/jobs/{job}", headers=BROWSER).text
        missing = [web.get(f"{address}/{index}").status_code for index in (6, 2**52)]
        nobody = web.get("/v1/jobs/none/errors/7").status_code
        with client_of(server, http_search_bytes_max=100, **settings) as small:
            withheld = small.get(f"{address}/7").json()
        other = web.post("/v1/jobs", json={"texts": TEXTS[8:], "model": "null:16"}).json()["job"]
        outs = [wait_for(web, each, "finished")["out"] for each in (job, other)]
        foreign = []
        for out in outs[::-1]:
            door.connection.hset(wire.JobKeys(job).meta, "out", out)
            foreign.append(web.get(f"{address}/7").json()["text"])
        corpus = tmp_path / "jobs" / job / "input.jsonl"
        corpus.write_bytes(b'{"id": "new", "text": "a new first row"}\n' + corpus.read_bytes())
        changed = web.get(f"{address}/7").json()
        corpus.unlink()
        bare = web.get(f"{address}/7").json()
        empty = web.get(f"/jobs/{job}/errors/7", headers=BROWSER).text
    assert (early["text"], early["attempts"]) == (BAD, late["attempts"])
    assert "poison" in late["reason"]
    assert late == listed | {"text": BAD}
    assert late["id"] == "id 7"
    assert page.status_code == 200
    assert "&lt;b&gt;bad&lt;/b&gt; poison" in page.text
    assert f'href="/jobs/{job}/errors/7"' in links
    assert [*missing, nobody] == [404, 404, 404]
    assert foreign == [None, BAD]
    assert withheld == changed == bare == late | {"text": None}
    assert "cannot be read here" in empty
