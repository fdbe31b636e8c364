"""Tests of results by HTTP: every chunk once and in order, while a job runs and after."""

import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.collector.manifest import About
from embedfarm.collector.output import Output
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.settings import Settings
from embedfarm.runs.own_job import JOB_ID_FILE, make_own_job
from embedfarm.web.jobs.formats import FORMATS, choose_format
from tests.collector.test_reader import COUNT, FAILED, matrix_of, results
from tests.support import LiveServer, wait_until
from tests.web.conftest import client_of

if TYPE_CHECKING:
    from embedfarm.web.jobs.job_watch import JobWatch

PATH = "/v1/jobs/job/results"
ABOUT = About(job="job", model="m", fingerprint={}, source={})
ARROW = "application/vnd.apache.arrow.stream"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The directory that jobs may write to."""
    return tmp_path / "outputs"


@pytest.fixture
def web(server: LiveServer, client: redis.Redis, out: Path) -> Iterator[TestClient]:
    """An application that reads outputs."""
    del client
    with client_of(server, ingest_roots=[out]) as web:
        yield web


def make_job(client: redis.Redis, out: Path) -> Job:
    """A job that fills an output."""
    job = Job(client, "job")
    job.create(JobSpec(model="null:3"), 0, notes={"out": str(out)})
    return job


def watched(web: TestClient) -> Counter[str]:
    """The number of clients that wait for each job."""
    watch: JobWatch = web.app.state.watch  # type: ignore[attr-defined] # of any application
    return watch.watched


def open_output(out: Path, job: str = "job") -> Output:
    """Open an output of small parts, which a job fills."""
    output = Output(out, {"model": "m"}, sink="parquet", part_bytes_max=180)
    make_own_job(out, job)
    return output


def end(client: redis.Redis) -> None:
    """End the job, as its collector does at last."""
    FarmClient(client).end("job", "finished", "", Settings(), drained_upto=COUNT)


def read_all(web: TestClient, accept: str, limit: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield first index, number of chunks and body of each answer until no chunk is there."""
    start = 0
    while True:
        answer = web.get(PATH, params={"start": start, "limit": limit}, headers={"accept": accept})
        assert answer.headers["x-first-index"] == str(start)
        if answer.status_code == 204:
            assert answer.headers["x-next-start"] == str(start)
            return
        assert answer.headers["content-type"] == accept
        count = int(answer.headers["x-count"])
        assert 0 < count <= limit
        yield start, count, answer.content
        start += count
        assert answer.headers["x-next-start"] == str(start)
        if answer.headers["x-complete"] == "true":
            return


def expected(index: int, dtype: str, *, ids: bool) -> dict[str, Any]:
    """The line that is expected for a chunk."""
    line: dict[str, Any] = {"index": index} | ({"id": f"id {index}"} if ids else {})
    if index in FAILED:
        return line | {"error": f"odd {index}"}
    return line | {"embedding": matrix_of(dtype)[index].tolist()}


@pytest.mark.parametrize(("dtype", "ids"), [("<f4", True), ("|i1", False), ("|u1", True)])
def test_every_format_has_every_chunk_once(
    web: TestClient, client: redis.Redis, out: Path, dtype: str, *, ids: bool
) -> None:
    """Every format has each chunk in order, with id, and vector or reason, by any page size."""
    make_job(client, out)
    with open_output(out) as output:
        for result in results(dtype, ids=ids):
            output.add(result)
        for finished in (False, True):
            if finished:
                output.finish(COUNT, ABOUT)
                end(client)
            count = COUNT if finished else output.next_index
            wanted = [expected(index, dtype, ids=ids) for index in range(count)]
            for limit in (7, 1000):
                for accept in ("application/jsonl", "application/x-ndjson"):
                    bodies = b"".join(body for _, _, body in read_all(web, accept, limit))
                    assert [json.loads(line) for line in bodies.splitlines()] == wanted
                assert arrow_lines(web, limit, ids=ids) == wanted
                check_npy(web, limit, count, dtype)


def arrow_lines(web: TestClient, limit: int, *, ids: bool) -> list[dict[str, Any]]:
    """The lines of an Arrow stream, in the form of JSON Lines."""
    lines = []
    for _, count, body in read_all(web, ARROW, limit):
        rows = pa.ipc.open_stream(body).read_all().to_pylist()
        assert len(rows) == count
        assert all((row["embedding"] is None) == (row["error"] is not None) for row in rows)
        assert ids or all(row["id"] is None for row in rows)
        lines += [drop_nulls(row) for row in rows]
    return lines


def check_npy(web: TestClient, limit: int, count: int, dtype: str) -> None:
    """Assert that the npy rows are those of the chunks, and that failed ones are NaN or zero."""
    rows = matrix_of(dtype)
    rows[sorted(FAILED)] = np.nan if rows.dtype.kind == "f" else 0
    for accept in ("application/x-npy", "application/octet-stream"):
        pages = [np.load(io.BytesIO(body)) for _, _, body in read_all(web, accept, limit)]
        assert pages[0].dtype == rows.dtype
        np.testing.assert_array_equal(np.concatenate(pages), rows[:count])


@pytest.mark.parametrize(("dtype", "ids"), [("<f4", True), ("|i1", False)])
def test_pages_give_all_in_one_file(
    server: LiveServer, client: redis.Redis, out: Path, dtype: str, *, ids: bool
) -> None:
    """A job's page has a file of each format with all that is on the disk, however much it is."""
    job = Job(client, "job")
    job.create(JobSpec(model="null:3", name="All, of 2026!"), 0, notes={"out": str(out)})
    with (
        client_of(server, ingest_roots=[out], http_results_bytes_max=100) as web,
        open_output(out) as output,
    ):
        for result in results(dtype, ids=ids):
            output.add(result)
        for finished in (False, True):
            if finished:
                output.finish(COUNT, ABOUT)
                end(client)
            count = COUNT if finished else output.next_index
            wanted = [expected(index, dtype, ids=ids) for index in range(count)]
            lines = web.get("/jobs/job/results.jsonl")
            assert lines.headers["content-disposition"].endswith('"All-of-2026.jsonl"')
            assert [json.loads(line) for line in lines.content.splitlines()] == wanted
            matrix = np.load(io.BytesIO(web.get("/jobs/job/results.npy").content))
            rows = matrix_of(dtype)
            rows[sorted(FAILED)] = np.nan if rows.dtype.kind == "f" else 0
            np.testing.assert_array_equal(matrix, rows[:count], strict=True)
            arrow = pa.ipc.open_stream(web.get("/jobs/job/results.arrow").content).read_all()
            assert [drop_nulls(row) for row in arrow.to_pylist()] == wanted
    with client_of(server) as web:  # which may read no directory
        assert web.get("/jobs/job/results.npy").status_code == 409


def test_files_of_no_chunks(web: TestClient, client: redis.Redis, out: Path) -> None:
    """Files that say how large a vector is are refused while nobody knows: they would be empty."""
    make_job(client, out)
    with open_output(out) as output:
        for finished in (False, True):
            if finished:
                output.finish(0, ABOUT)
                end(client)
            assert web.get("/jobs/job/results.jsonl").content == b""
            for kind in ("npy", "arrow"):
                refused = web.get(f"/jobs/job/results.{kind}")
                assert (refused.status_code, "no chunk" in refused.text) == (409, True)


def drop_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow stream in the form of JSON Lines."""
    return {name: value for name, value in row.items() if value is not None}


def test_headers_tell_the_end(web: TestClient, client: redis.Redis, out: Path) -> None:
    """An answer is complete with the last chunk of a finished output, and never before."""
    make_job(client, out)
    nothing = web.get(PATH)
    assert (nothing.status_code, nothing.headers["x-state"]) == (204, "running")
    with open_output(out) as output:
        assert web.get(PATH).status_code == 204
        for result in results():
            output.add(result)
        last = web.get(PATH, params={"start": output.next_index - 1})
        assert (last.headers["x-count"], last.headers["x-complete"]) == ("1", "false")
        output.finish(COUNT, ABOUT)
    end(client)
    last = web.get(PATH, params={"start": COUNT - 1})
    assert (last.headers["x-complete"], last.headers["x-state"]) == ("true", "finished")
    behind = web.get(PATH, params={"start": COUNT})
    assert (behind.status_code, behind.headers["x-complete"]) == (204, "true")
    beyond = web.get(PATH, params={"start": COUNT + 1})
    assert (beyond.status_code, beyond.headers["x-next-start"]) == (409, str(COUNT))


def test_answers_are_bounded_in_bytes(server: LiveServer, client: redis.Redis, out: Path) -> None:
    """An answer is bounded by the bytes of its vectors, too, but has one chunk at least."""
    make_job(client, out).note("vector_bytes", 12)
    with open_output(out) as output:
        output.add(next(results(size=20)))
    for bytes_max, count in ((1, "1"), (50, "4")):
        with client_of(server, ingest_roots=[out], http_results_bytes_max=bytes_max) as web:
            assert web.get(PATH).headers["x-count"] == count


def fill_part(output: Output, job: Job) -> None:
    """Add chunks until a part of them is durable."""
    for result in results(size=15):
        if output.add(result) is not None:
            job.results.drain(output.next_index, [])
            return


def test_waiting_ends_with_the_next_part(web: TestClient, client: redis.Redis, out: Path) -> None:
    """A long poll answers when a part is durable, and at its time if none comes."""
    job = make_job(client, out)
    found = []
    asking = threading.Thread(target=lambda: found.append(web.get(PATH, params={"wait": 25})))
    with open_output(out) as output:
        asking.start()
        wait_until(lambda: watched(web))
        fill_part(output, job)
        asking.join(20)
        assert not asking.is_alive()
        assert (found[0].status_code, found[0].headers["x-count"]) == (200, "15")
        late = web.get(PATH, params={"start": 15, "wait": 0.1})
        assert (late.status_code, late.headers["x-next-start"]) == (204, "15")
    assert not watched(web)


def test_what_is_not_served(web: TestClient, client: redis.Redis, out: Path) -> None:
    """Results that are absent, elsewhere, another job's or damaged are refused in words."""
    assert web.get(PATH).status_code == 404
    job = Job(client, "job")
    job.create(JobSpec(model="null:3"), 0)
    refused = {"": "its own program"}
    (out / "other").mkdir(parents=True)
    with open_output(out / "other") as output:
        for result in results():
            output.add(result)
        output.finish(COUNT, About(job="another", model="m", fingerprint={}, source={}))
    (out / "link").symlink_to("/etc")
    with open_output(out / "damaged") as output:
        output.add(next(results(size=20)))
        next((out / "damaged").glob("part*")).write_bytes(b"nothing")
    refused |= {
        "/etc": "not served",
        str(out / ".." / "x"): "not served",
        str(out / "link"): "not served",
        str(out / "other"): "another",
        str(out / "damaged"): "cannot be read",
    }
    for directory, words in refused.items():
        job.note("out", directory)
        answer = web.get(PATH)
        assert (answer.status_code, words in answer.json()["detail"]) == (409, True), directory
    job.note("out", str(out / "absent"))
    assert web.get(PATH).status_code == 204
    job.cancel()
    assert "not any more" in web.get(PATH, params={"wait": 60}).json()["detail"]


def test_results_are_those_of_the_job_alone(
    web: TestClient, client: redis.Redis, out: Path
) -> None:
    """Vectors of another job that fills the directory since are no results of a job, at no door."""
    make_job(client, out)
    end(client)
    addresses = [PATH, "/jobs/job/results.jsonl", "/jobs/job/results.npy"]
    with open_output(out, "another") as output:
        for begun in (False, True):
            if begun:
                for result in results():
                    output.add(result)
            refused = [web.get(address) for address in addresses]
            assert [answer.status_code for answer in refused] == [409] * len(addresses)
            assert web.get("/v1/jobs/job/errors").json()["errors"] == []
            assert all("another job" in answer.json()["detail"] for answer in refused)
        output.finish(COUNT, About(job="another", model="m", fingerprint={}, source={}))
    assert [web.get(address).status_code for address in addresses] == [409] * len(addresses)


def test_results_wait_until_their_job_is_known(
    web: TestClient, client: redis.Redis, out: Path
) -> None:
    """What is in an output of which no job is known is served once it is known to be the job's."""
    make_job(client, out)
    with open_output(out) as output:
        output.add(next(results(size=20)))
        (out / JOB_ID_FILE).unlink()
        assert web.get(PATH).status_code == 204
        assert web.get("/jobs/job/results.jsonl").status_code == 409
        make_own_job(out, "job")
        assert web.get(PATH).headers["x-count"] == "20"


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", "application/jsonl"),
        ("*/*", "application/jsonl"),
        ("application/*;q=0.1", "application/jsonl"),
        ("application/jsonl;q=0.5, application/x-npy", "application/x-npy"),
        ("*/*, application/jsonl;q=0", "application/x-ndjson"),
        (f"text/html, {ARROW} ; q=0.3", ARROW),
        ("application/jsonl;q=high", None),
        ("text/html", None),
        ("*/*;q=0", None),
    ],
)
def test_the_client_chooses(accept: str, chosen: str | None) -> None:
    """The format is chosen by the Accept header, with its qualities and wildcards."""
    assert choose_format(accept) == chosen


def test_no_other_format(web: TestClient, client: redis.Redis, out: Path) -> None:
    """A format that is not offered gets 406, with those that are."""
    make_job(client, out)
    answer = web.get(PATH, headers={"accept": "text/csv"})
    assert answer.status_code == 406
    assert all(name in answer.json()["detail"] for name in FORMATS)


def test_places_are_bounded(server: LiveServer, client: redis.Redis, out: Path) -> None:
    """A request beyond the places is refused until another one has its answer."""
    job = make_job(client, out)
    with (
        client_of(server, ingest_roots=[out], http_streams_max=1) as web,
        open_output(out) as output,
    ):
        asking = threading.Thread(target=web.get, args=[f"{PATH}?wait=25"])
        asking.start()
        wait_until(lambda: watched(web))
        refused = web.get(PATH)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        fill_part(output, job)
        asking.join(20)
        assert not asking.is_alive()
        assert web.get(PATH).status_code == 200


def failures(web: TestClient, limit: int) -> list[int]:
    """The failed chunks on all pages."""
    found: list[int] = []
    after: str | None = ""
    while after is not None:
        page = web.get("/v1/jobs/job/errors", params={"limit": limit, "after": after}).json()
        assert all(each["reason"] == f"odd {each['index']}" for each in page["errors"])
        found += [each["index"] for each in page["errors"]]
        after = page["next"]
    return found


def test_failed_chunks_of_disk_and_server(web: TestClient, client: redis.Redis, out: Path) -> None:
    """Each failed chunk is listed once: those on disk, then those that only the server has."""
    job = make_job(client, out)
    for index in [*sorted(FAILED), 70]:
        fields = {"index": index, "reason": f"odd {index}", "attempts": 1}
        client.xadd(job.keys.failed, fields)  # type: ignore[arg-type] # numbers too
    everything = [*sorted(FAILED), 70]
    with open_output(out) as output:
        for place, result in enumerate(results()):
            if place % 4 == 0:
                assert {n: failures(web, n) for n in (1, 2, 100)} == dict.fromkeys(
                    (1, 2, 100), everything
                )
            output.add(result)
        output.finish(COUNT, ABOUT)
    client.delete(job.keys.failed)
    end(client)
    assert failures(web, 2) == sorted(FAILED)
    page = web.get("/jobs/job", headers={"accept": "text/html"}).text
    assert all(f'id="chunk-{index}"' in page for index in FAILED)
