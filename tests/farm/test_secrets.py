"""Tests that no password is shown of a server that refuses us, is away, or has a wrong URL."""

import logging
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from embedfarm.cli.app import app
from tests.farm.harness import write_corpus
from tests.support import LiveServer
from tests.web.conftest import client_of

SECRET = "s3cretPassword"  # noqa: S105 -- what is looked for
VERBS = [
    "embed CORPUS --out OUT --model null:16", "batch CORPUS --out OUT --model null:16",
    "schedule", "work --devices cpu --workers 1", "ingest", "jobs ls", "jobs show x",
    "jobs watch x", "jobs rm x", "workers", "advise", "top", "doctor", "scheduler stats",
    "scheduler explain", "scheduler passes",
]  # fmt: skip
URLS = {
    "refused": f"unix://me:{SECRET}@SOCKET",
    "refused by the query": f"unix://SOCKET?password={SECRET}",
    "away": f"redis://:{SECRET}@127.0.0.1:1/0",
    "sentinels away": f"sentinel://:{SECRET}@127.0.0.1:1/name?sentinel_password={SECRET}",
    "torn": f"redis://:1/{SECRET}@127.0.0.1:1",
    "torn at its port": f"redis://me:{SECRET}/x@127.0.0.1:1",
    "no such option": f"redis://:{SECRET}@127.0.0.1:1?password={SECRET}&colour=red",
}


@pytest.fixture
def closed(server: LiveServer, client: redis.Redis) -> LiveServer:
    """Give the server a password that is none of those above."""
    client.config_set("requirepass", "another")
    return server


@pytest.mark.parametrize("way", URLS)
def test_no_verb_shows_the_password(
    closed: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    """Every verb fails with a sentence without the password, whichever way it got the URL."""
    url = URLS[way].replace("SOCKET", str(closed.private.socket))
    monkeypatch.setenv("EMBEDFARM_REDIS_URL", url)
    monkeypatch.setenv("EMBEDFARM_RECONNECT_SECONDS_MAX", "0.1")
    monkeypatch.setenv("EMBEDFARM_STATE_DIRECTORY", str(tmp_path / "state"))
    caplog.set_level(logging.DEBUG)
    words = {
        "CORPUS": str(write_corpus(tmp_path / "corpus", ["one"])),
        "OUT": str(tmp_path / "out"),
    }
    for place, verb in enumerate(VERBS):
        asked = [words.get(word, word) for word in verb.split()]
        done = CliRunner().invoke(app, [*asked, *(["--redis", url] if place % 2 else [])])
        assert isinstance(done.exception, SystemExit), (verb, done.exception, done.output)
        assert done.output.strip(), verb
        assert SECRET not in done.output, verb
    assert SECRET not in caplog.text


@pytest.mark.parametrize("way", ["refused", "away", "sentinels away"])
def test_no_page_shows_the_password(
    closed: LiveServer, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """`serve` shows no password when the server is away or refuses it."""
    url = URLS[way].replace("SOCKET", str(closed.private.socket))
    caplog.set_level(logging.DEBUG)
    with client_of(closed, redis_url=url, reconnect_seconds_max=0.1) as web:
        for path in (
            "/",
            "/workers",
            "/scheduler",
            "/v1/jobs",
            "/v1/jobs/x",
            "/readyz",
            "/metrics",
        ):
            for accepted in ("text/html", "application/json"):
                answer = web.get(path, headers={"accept": accepted})
                assert SECRET not in answer.text + str(answer.headers)
                assert answer.status_code in {200, 503} or path == "/metrics"
    assert SECRET not in caplog.text
