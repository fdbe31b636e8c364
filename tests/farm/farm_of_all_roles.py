"""A farm of all roles, each reaching the server by a URL of its own."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from tests.farm.command_server import Copy
from tests.farm.harness import check_output, run, texts_of, write_corpus
from tests.support import free_port, wait_until

MODEL: Final = "null:16"
ROLES: Final = {
    "scheduler": ["schedule"],
    "worker": ["work", "--devices", "cpu", "--workers", "1"],
    "ingest": ["ingest"],
    "web": ["serve"],
}


@dataclass(frozen=True)
class WholeFarm:
    """A running farm of all roles.

    Attributes:
        home: Directory of logs, in `<role>.log` and below `state`, and of jobs by HTTP.
        url: Returns the URL of the server for a role, or for "submitter".
        environment: The variables of every process, without the URL.
        web: The HTTP client of the farm.
    """

    home: Path
    url: Callable[[str], str]
    environment: dict[str, str]
    web: httpx.Client

    def variables(self, user: str) -> dict[str, str]:
        """Return the environment of a process of one of the server's users."""
        return os.environ | self.environment | {"EMBEDFARM_REDIS_URL": self.url(user)}

    def run(self, user: str, *words: object) -> subprocess.CompletedProcess[str]:
        """Run `embedfarm` as one of the server's users, to its end."""
        return run(*words, environment=self.variables(user))

    def embed_corpus(self, name: str, count: int = 3000, model: str = MODEL) -> None:
        """Embed a corpus, and check that each vector is in its place."""
        texts = list(texts_of(count))
        corpus = write_corpus(self.home / f"{name}.jsonl", texts)
        out = self.home / name
        words = ["embed", corpus, "--out", out, "--model", model]
        done = self.run("submitter", *words, "--redis", self.url("submitter"))
        assert done.returncode == 0, done.stderr
        check_output(out, texts, 16)

    def embed_by_http(self) -> str:
        """Embed two texts by a job over HTTP, which ingest runs; return its id."""
        answer = self.web.post("/v1/jobs", json={"texts": ["one", "two"], "model": MODEL})
        assert answer.is_success, answer.text
        job = str(answer.json()["job"])
        wait_until(lambda: self.web.get(f"/v1/jobs/{job}").json()["state"] == "finished", 60)
        lines = self.web.get(f"/v1/jobs/{job}/results").text.splitlines()
        assert [json.loads(line)["index"] for line in lines] == [0, 1]
        return job

    def ask(self) -> None:
        """Send a request for vectors, and wait for the answer."""
        answer = self.web.post("/v1/embeddings", json={"input": ["one"], "model": MODEL})
        assert len(answer.json()["data"][0]["embedding"]) == 16, answer.text


@contextlib.contextmanager
def whole_farm(home: Path, url: Callable[[str], str], **settings: object) -> Iterator[WholeFarm]:
    """Run all roles; SIGTERM must end each of them with status 0."""
    port = free_port()
    chosen = {
        "state_directory": home / "state",
        "jobs_directory": home / "jobs",
        "ingest_roots": json.dumps([str(home)]),
        "models": json.dumps([MODEL]),
    } | settings
    environment = {f"EMBEDFARM_{name.upper()}": str(value) for name, value in chosen.items()}
    with contextlib.ExitStack() as stack:
        for role, words in ROLES.items():
            at = ["--port", str(port)] if role == "web" else []
            variables = environment | {"EMBEDFARM_REDIS_URL": url(role)}
            stack.enter_context(_running([*words, *at], home / f"{role}.log", variables))
        web = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60))
        wait_until(lambda: _is_ready(web), 60)
        yield WholeFarm(home, url, environment, web)


@contextlib.contextmanager
def _running(words: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    with (
        log.open("wb") as said,
        Copy(words, os.environ | environment, said, said) as process,
    ):
        try:
            yield
            process.terminate()
            assert process.wait(40) == 0, log.read_text()
        finally:
            process.kill()


def _is_ready(web: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return web.get("/readyz").is_success
    return False
