"""Tests that damaged, foreign, extreme or late data costs only itself."""

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import redis
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from embedfarm.cli.app import app
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.scheduling_terms import DEADLINE_MS_MAX
from embedfarm.ingest.job_directories import new_id, remove_old
from tests.support import LiveServer
from tests.web.conftest import client_of
from tests.web.test_batches import NULL, create, line, upload

NAMES: Final = ("batch.json", "stopped.json", "completed.json", "output/plan.json", "call.json")
DAMAGES: Final[dict[str, Callable[[Path], object]]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(b'{"state": "canc'),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\0"),
    "other": lambda path: path.write_bytes(b'{"state": 1, "at": "x", "created_at": 1e99}'),
    "list": lambda path: path.write_bytes(b"[[]]"),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "directory": Path.mkdir,
    "itself": lambda path: path.symlink_to(path.name),
}
FOREIGN: Final = b"\xff\xfe\x00"
SHOWN: Final = (
    "/readyz",
    "/health",
    "/metrics",
    "/v1/jobs",
    "/v1/batches",
    "/v1/files",
    "/v1/workers",
)
PAGES: Final = ("/", "/workers", "/scheduler")


@pytest.fixture
def web(server: LiveServer, client: redis.Redis, tmp_path: Path) -> Iterator[TestClient]:
    """An application whose jobs are not worked on."""
    del client
    with client_of(server, models=(NULL,), jobs_directory=tmp_path) as web:
        yield web


def new_batch(web: TestClient) -> str:
    """Create a batch that waits, and return its id."""
    return str(create(web, upload(web, line("a", input="a")))["id"])


def ids(web: TestClient, path: str) -> set[str]:
    """The ids in a list."""
    answer = web.get(path)
    assert answer.status_code == 200, answer.text
    return {each["id"] for each in answer.json()["data"]}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_costs_its_own_batch(
    web: TestClient, tmp_path: Path, damage: str
) -> None:
    """A damaged file of a batch spoils no list, and the batch gets an answer without 5xx."""
    well = new_batch(web)
    for name in NAMES:
        batch = new_batch(web)
        path = tmp_path / batch / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        DAMAGES[damage](path)
        assert well in ids(web, "/v1/batches")
        assert web.get(f"/v1/batches/{batch}").status_code in {200, 404}, name
        assert web.post(f"/v1/batches/{batch}/cancel").status_code in {200, 404, 409}, name


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_costs_itself(web: TestClient, tmp_path: Path, damage: str) -> None:
    """A damaged file is left out of the list, which has the others, and can be deleted."""
    well, bad = upload(web, line("a", input="a")), upload(web, line("b", input="b"))
    path = tmp_path / "files" / bad / "about.json"
    path.unlink()
    DAMAGES[damage](path)
    assert ids(web, "/v1/files") == {well}
    assert web.get(f"/v1/files/{bad}").status_code == 404
    assert web.delete(f"/v1/files/{bad}").status_code in {200, 404}


def test_a_clock_that_is_ahead_cancels_nothing(
    web: TestClient, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading batches changes none of them, whatever this machine's clock says."""
    batch = new_batch(web)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3 * 86_400)
    for path in ("/v1/batches", f"/v1/batches/{batch}"):
        assert web.get(path).status_code == 200
    monkeypatch.undo()
    assert FarmClient(client).job(batch).status().state == "open"
    assert web.get(f"/v1/batches/{batch}").json()["status"] == "validating"


def test_what_cannot_be_removed_keeps_nothing_else(web: TestClient, tmp_path: Path) -> None:
    """`cleanup` goes on past a dangling link, and leaves the target of a link alone."""
    old = upload(web, line("a", input="a"))
    (tmp_path / "files" / "dangling").symlink_to("nowhere")
    (tmp_path / "files" / "link").symlink_to(tmp_path)
    settings = web.app.state.services.settings  # type: ignore[attr-defined] # of any application
    later = time.time() + 2 * settings.jobs_directory_seconds
    assert remove_old(settings, later, lambda _: True) == []
    assert not (tmp_path / "files" / old).exists()
    assert list((tmp_path / "files").iterdir()) == []
    assert tmp_path.exists()


def test_what_stays_is_not_reported_as_removed(
    web: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cleanup` names the directories that it has removed, and no other."""
    kept, other = (new_id() for _ in range(2))
    for name in (kept, other):
        (tmp_path / name).mkdir()
    rename = Path.rename

    def busy(path: Path, target: Path) -> Path:
        if path.name == kept:
            raise OSError(errno.EBUSY, "busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    settings = web.app.state.services.settings  # type: ignore[attr-defined] # of any application
    later = time.time() + 2 * settings.jobs_directory_seconds
    assert remove_old(settings, later, lambda _: True) == [other]
    assert (tmp_path / kept).is_dir()


@pytest.mark.parametrize("deadline", [1, DEADLINE_MS_MAX])
def test_what_is_taken_can_be_shown(web: TestClient, server: LiveServer, deadline: int) -> None:
    """Extreme terms and odd names that are accepted are shown on all pages and in commands."""
    most = {
        "deadline_ms": deadline,
        "weight": 1000,
        "priority": 2,
        "tenant": "\U0001f600" * 64,
        "name": "\x00\x1b[2J\u202e\ud7ff\U0010ffff" + "a" * 190,
        "prompt": "\x1b]0;" + "\uffff" * 4000,
        "max_length": 1 << 20,
        "dimensions": 1 << 16,
        "long_overlap": 1 << 20,
    }
    made = web.post("/v1/feeds", json=most)
    assert made.status_code == 201, made.text
    show(web, server, made.json()["job"])
    for wrong in (DEADLINE_MS_MAX + 1, 2**53):
        assert web.post("/v1/feeds", json={"deadline_ms": wrong}).status_code == 422
        path = f"/v1/jobs/{made.json()['job']}"
        assert web.patch(path, json={"deadline_ms": wrong}).status_code == 422


def test_times_beyond_the_calendar_are_shown(
    web: TestClient, server: LiveServer, client: redis.Redis
) -> None:
    """Times beyond the calendar, as other programs may write them, are shown without an error."""
    job = web.post("/v1/feeds", json={}).json()["job"]
    for at in (2**53, -1, 0):
        for name in ("deadline_ms", "created_ms", "first_read_ms", "ended_ms"):
            client.hset(FarmClient(client).job(job).keys.meta, name, at)
        show(web, server, job)


def show(web: TestClient, server: LiveServer, job: str) -> None:
    """Ask for a job wherever one is shown; nothing may fail."""
    paths = (
        f"/jobs/{job}",
        f"/jobs/{job}/cancel",
        f"/v1/jobs/{job}",
        f"/charts/jobs/{job}/lanes.svg",
        f"/charts/jobs/{job}/workers.svg",
    )
    for path in (*SHOWN, *PAGES, *paths):
        answer = web.get(path)
        assert answer.status_code in {200, 503}, (path, answer.text)
    for words in ("jobs ls", f"jobs show {job}"):
        done = CliRunner().invoke(app, [*words.split(), "--redis", server.url])
        assert done.exit_code == 0, (words, done.output, done.exception)


def test_bytes_of_others_are_no_ingest(web: TestClient, client: redis.Redis) -> None:
    """Foreign bytes and types in RQ's keys count as no ingest worker, and cause no error 500."""
    batch = new_batch(web)
    assert web.post(f"/v1/batches/{batch}/cancel").status_code == 200
    client.sadd("rq:workers:embedfarm", FOREIGN)
    client.sadd("rq:workers", FOREIGN)
    client.sadd("rq:queues", FOREIGN)
    client.rpush("rq:queue:embedfarm", FOREIGN)
    client.zadd("rq:wip:embedfarm", {FOREIGN: 1})
    check_shown(web, batch)
    client.hset(f"rq:job:http-{batch}", mapping={"status": FOREIGN, "origin": FOREIGN})
    check_shown(web, batch)
    for key in ("rq:workers:embedfarm", "rq:wip:embedfarm", f"rq:job:http-{batch}"):
        client.delete(key)
        client.set(key, FOREIGN)
    check_shown(web, batch)


def check_shown(web: TestClient, batch: str) -> None:
    """Ask for all that looks at RQ's keys; nothing may fail."""
    for path in (*SHOWN, f"/v1/batches/{batch}"):
        assert web.get(path).status_code in {200, 503}, path
    assert "no ingest worker" in web.get("/readyz").text
    assert web.get("/jobs/new", headers={"accept": "text/html"}).status_code == 200
