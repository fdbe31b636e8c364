"""Tests that a secret in a URL is found nowhere that a job leaves traces."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import fsspec
import pytest
import redis
from fastapi.testclient import TestClient
from fsspec.implementations.local import LocalFileSystem
from typer.testing import CliRunner, Result

from embedfarm.cli.app import app
from embedfarm.web.auth.keys import Key
from tests.farm.harness import texts_of, write_corpus
from tests.ingest.loopback_server import Neighbour, Reply
from tests.ingest.rq_farm import START_SECONDS, Door
from tests.support import LiveServer, wait_until
from tests.web.conftest import client_of

if TYPE_CHECKING:
    from fastapi import FastAPI

CANARY: Final = "c4nary"
KEY: Final = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SIGNED: Final = f"X-Amz-Signature={CANARY}&X-Amz-Security-Token={CANARY}"
OVER: Final = {"finished", "failed"}


class Vault(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A file system of this machine by URLs with a password and a signature."""

    protocol = "vault"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        """Return the path of a URL."""
        path = path.partition("?")[0]
        return str(super()._strip_protocol("/" + path.split("/", 3)[3] if "://" in path else path))


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Make new files readable by everybody, unless the program takes care."""
    fsspec.register_implementation("vault", Vault, clobber=True)
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    """A server with one corpus, which takes nothing else."""
    corpus = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts_of(30))
    with Neighbour().running() as neighbour:
        neighbour.answer = lambda request: (
            Reply(body=corpus) if "corpus" in request.path else Reply(404)
        )
        yield neighbour


@pytest.fixture
def server_url(server: LiveServer, client: redis.Redis) -> Iterator[str]:
    """The server's URL with a user and a password."""
    client.acl_setuser(
        "me", enabled=True, passwords=[f"+{CANARY}"], keys=["*"], categories=["+@all"],
        channels=["*"],
    )  # fmt: skip
    yield f"unix://me:{CANARY}@{server.private.socket}"
    client.acl_deluser("me")


def traces_of(directory: Path) -> list[Path]:
    """The files that hold the secret, but for `call.json` and the server's log."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    files = [path for path in files if path.name != "call.json" and path.suffix != ".aof"]
    return [path for path in files if CANARY.encode() in path.read_bytes()]


def open_to_others(directory: Path) -> list[Path]:
    """The files below a directory that others than its owner may reach and read."""
    found = []
    for path in directory.iterdir():
        mode = path.stat().st_mode
        if path.is_dir() and mode & 0o011:
            found += open_to_others(path)
        elif path.is_file() and mode & 0o044:
            found.append(path)
    return found


def embed(*words: object) -> Result:
    """Run `embedfarm embed` in this process, where alone `vault` is known."""
    return CliRunner().invoke(app, ["embed", *map(str, words), "--model", "null:16"])


def read_everything(web: TestClient, headers: dict[str, str], jobs: list[str]) -> str:
    """All that the routes read by GET say of some jobs."""
    said = []
    paths = cast("FastAPI", web.app).openapi()["paths"]
    for path in ["/", "/workers", "/scheduler", "/jobs/{job}", *paths]:
        if path.endswith("/events") or (path in paths and "get" not in paths[path]):
            continue
        for job in jobs if "{job}" in path else [""]:
            for accepted in ("text/html", "application/json"):
                url = path.replace("{job}", job)
                answer = web.get(url, headers=headers | {"accept": accepted}, params={"timeout": 0})
                assert answer.status_code < 500, (url, answer.text)
                said.append(answer.text + str(answer.headers))
    return "\n".join(said)


def test_no_trace_of_a_secret(  # noqa: PLR0913, PLR0917 -- each is a fixture
    server: LiveServer,
    server_url: str,
    client: redis.Redis,
    neighbour: Neighbour,
    keys: dict[str, tuple[str, Key]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A secret is in no file, record, log, page or answer, and nobody else may read the files."""
    caplog.set_level(logging.INFO)
    url, hook = f"{neighbour.url}/corpus.jsonl?{SIGNED}", f"{neighbour.url}/hook/{CANARY}?{SIGNED}"
    gone, torn = f"{neighbour.url}/gone?{SIGNED}", f"s3://AKIA:{CANARY}@bucket/x?sig={CANARY}"
    chosen: dict[str, Any] = {
        "ingest_urls": [f"{neighbour.url}/"], "outbound_hosts": ["127.0.0.1"],
        "ingest_roots": [tmp_path], "jobs_directory": tmp_path / "home" / "jobs",
    }  # fmt: skip
    secrets, known = zip(*keys.values(), strict=True)
    asking = {"authorization": f"Bearer {keys['submit'][0]}"}
    reading = {"authorization": f"Bearer {keys['read'][0]}"}
    door = Door(server, tmp_path / "home")
    asked = [door.enqueue("embed_corpus", each, str(tmp_path / f"rq-{n}"), model="null:16",
                          webhook=hook) for n, each in enumerate((url, gone, torn))]  # fmt: skip
    words = {name: json.dumps(value, default=str) for name, value in chosen.items()}
    words |= {"jobs_directory": str(chosen["jobs_directory"]), "webhook_secret": KEY}
    monkeypatch.setenv("EMBEDFARM_REDIS_URL", server_url)
    with (
        client_of(server, known, redis_url=server_url, models=("null:16",), **chosen) as web,
        door.ingest(**words | {"redis_url": server_url}),
        door.work(),
    ):
        answers = [
            web.post("/v1/jobs", headers=asking, json={"source": each, "webhook": hook})
            for each in (url, gone, torn)
        ]
        corpus = write_corpus(tmp_path / "corpus.jsonl", list(texts_of(30)))
        vault = f"vault://me:{CANARY}@host{corpus}?sig="
        done = [
            embed(vault + CANARY, "--out", tmp_path / "cli"),
            embed(vault + "another", "--out", tmp_path / "cli"),
            embed(f"vault://me:{CANARY}@host/none.jsonl?{SIGNED}", "--out", tmp_path / "no"),
            embed(f"https://me:{CANARY}@host/a.jsonl?{SIGNED}", "--out", tmp_path / "no"),
        ]
        assert [each.exit_code for each in done] == [0, 0, 2, 2], [each.output for each in done]
        assert "is finished already" in done[1].output  # the signature does not count
        wait_until(lambda: all(each.get_status() in OVER for each in asked), START_SECONDS)
        jobs = [answer.json()["job"] for answer in answers[:2]]

        def states() -> set[str]:
            return {web.get(f"/v1/jobs/{job}", headers=reading).json()["state"] for job in jobs}

        wait_until(lambda: states() <= OVER, START_SECONDS)
        jobs = [key.decode()[4:-6] for key in client.scan_iter("ef:{*}:meta")]
        assert len(jobs) > len(answers)
        finished = json.loads((tmp_path / "cli" / "_manifest.json").read_bytes())["job"]
        done.append(CliRunner().invoke(app, ["jobs", "retry", finished]))
        assert "stands for what is not kept" in done[-1].output
        shown = [CliRunner().invoke(app, ["jobs", "show", job]).output for job in jobs]
        said = read_everything(web, reading, jobs)
    assert all("null:16" in each for each in shown)
    assert CANARY in neighbour.requests[0].path
    for text in [
        said,
        caplog.text,
        *shown,
        *(each.output for each in done),
        *(a.text for a in answers),
    ]:
        assert CANARY not in text
        assert not any(secret in text for secret in secrets)
    for job in jobs:
        assert CANARY not in str(client.hgetall(f"ef:{{{job}}}:meta"))
    for request in asked:
        request.refresh()
        result = request.latest_result()
        assert result is not None
        assert CANARY not in f"{request.description} {request.meta} {result.exc_string}"
    assert not traces_of(tmp_path)
    assert not open_to_others(tmp_path / "home")
    assert (tmp_path / "cli" / "_manifest.json").stat().st_mode & 0o777 == 0o666
