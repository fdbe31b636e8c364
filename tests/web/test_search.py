"""Tests of search in the output of a job, by HTTP and on its page."""

from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import redis

from embedfarm.collector.manifest import read_manifest, write_manifest
from embedfarm.collector.search import search
from embedfarm.contract.canaries import canaries_of
from embedfarm.contract.settings import Settings
from embedfarm.runs.query import embed_query
from tests.support import LiveServer
from tests.web.conftest import client_of
from tests.web.test_jobs_page import BROWSER
from tests.web.test_submissions import doing, wait_for

NULL: Final = "null:16"
TEXTS: Final = [{"id": f"id {n}", "text": f"text <{n}>\nsecond line"} for n in range(40)]


@pytest.mark.parametrize("options", [{}, {"vector_dtype": "lsh"}, {"vector_dtype": "ubinary"}])
def test_a_text_finds_itself(
    server: LiveServer, client: redis.Redis, tmp_path: Path, options: dict[str, Any]
) -> None:
    """A query finds the chunk of the same text first, and the others that `search` finds.

    No other text than the one that was embedded is shown beside a hit.
    """
    del client
    with (
        client_of(server, models=(NULL,), jobs_directory=tmp_path / "jobs") as web,
        doing(server, tmp_path),
    ):
        order = {"texts": TEXTS, "model": NULL, **options}
        job = web.post("/v1/jobs", json=order).json()["job"]
        early = web.get(f"/v1/jobs/{job}/search", params={"query": "a"})
        done = wait_for(web, job, "finished")
        query = {"query": TEXTS[7]["text"]}
        found = web.get(f"/v1/jobs/{job}/search", params=query | {"count": 3}).json()["chunks"]
        page = web.get(f"/jobs/{job}/search", params=query, headers=BROWSER)
        link = web.get(f"/jobs/{job}", headers=BROWSER).text
        missing = web.get("/v1/jobs/none/search", params=query)
        corpus = tmp_path / "jobs" / job / "input.jsonl"
        corpus.write_bytes(b'{"id": "new", "text": "a new first row"}\n' + corpus.read_bytes())
        moved = web.get(f"/v1/jobs/{job}/search", params=query).json()["chunks"]
        corpus.unlink()
        bare = web.get(f"/v1/jobs/{job}/search", params=query).json()["chunks"]
    assert early.status_code in {409, 200}
    assert missing.status_code == 404
    first = found[0]
    assert (first["index"], first["id"], first["text"]) == (7, "id 7", TEXTS[7]["text"])
    assert first["score"] == pytest.approx(1.0, abs=0.2)  # less is known of bits
    out = Path(done["out"])
    hits = search(out, embed_query(read_manifest(out), query["query"], Settings()), 3)
    assert [each["index"] for each in found] == [hit.index for hit in hits]
    assert page.status_code == 200
    assert "text &lt;7&gt;\nsecond line" in page.text
    assert f'action="/jobs/{job}/search"' in link
    assert [each["text"] for each in bare] == [None] * 5
    assert moved == bare, "no row of a corpus that has changed since is shown beside a hit"


def test_what_cannot_be_searched(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """Too large an output is refused; one whose model nobody has is answered for in time."""
    del client
    settings: dict[str, Any] = {"models": (NULL,), "jobs_directory": tmp_path / "jobs"}
    limits: dict[str, Any] = {"http_search_bytes_max": 100, "lane_seconds_max": 0.5}
    with client_of(server, **settings, **limits) as small:
        with doing(server, tmp_path):
            job = small.post("/v1/jobs", json={"texts": ["a"] * 9, "model": NULL}).json()["job"]
            wait_for(small, job, "finished")
        refused = small.get(f"/jobs/{job}/search", params={"query": "a"}, headers=BROWSER)
        with client_of(server, **settings, lane_seconds_max=0.5) as web:
            nobody = web.get(f"/v1/jobs/{job}/search", params={"query": "a"})
            empty = web.get(f"/v1/jobs/{job}/search", params={"query": ""})
    assert refused.status_code == 409
    assert "use `embedfarm search`" in refused.text
    assert (nobody.status_code, empty.status_code) == (503, 422)


def test_workers_with_other_vectors_are_refused(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A search is refused where the workers have the job's files and make other vectors."""
    del client
    with (
        client_of(server, models=(NULL,), jobs_directory=tmp_path / "jobs") as web,
        doing(server, tmp_path),
    ):
        job = web.post("/v1/jobs", json={"texts": TEXTS, "model": NULL}).json()["job"]
        out = Path(wait_for(web, job, "finished")["out"])
        query = {"query": TEXTS[7]["text"]}
        for _ in range(2):  # what was compared is remembered
            assert web.get(f"/v1/jobs/{job}/search", params=query).status_code == 200
        manifest = read_manifest(out)
        assert manifest.canaries is not None
        turned = manifest.canaries.matrix()[:, ::-1]
        write_manifest(out, msgspec.structs.replace(manifest, canaries=canaries_of(turned)))
        refused = web.get(f"/v1/jobs/{job}/search", params=query)
        assert refused.status_code == 409
        assert "makes other vectors" in refused.json()["detail"]
        write_manifest(out, msgspec.structs.replace(manifest, canaries=None))
        assert web.get(f"/v1/jobs/{job}/search", params=query).status_code == 200
