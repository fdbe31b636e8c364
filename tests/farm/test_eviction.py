"""Test that every role refuses a server that evicts keys."""

from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from embedfarm.cli.app import app
from tests.farm.harness import write_corpus
from tests.support import LiveServer

ROLES = [
    "embed CORPUS --out OUT --model null:16", "batch REQUESTS --out OUT --model null:16",
    "schedule", "work --devices cpu --workers 1", "ingest", "serve --port 0",
]  # fmt: skip
REQUEST = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/embeddings",'
    ' "body": {"model": "null:16", "input": "a"}}'
)


def test_every_role_refuses_it(
    server: LiveServer, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every role ends at once on a server that evicts keys, and says which command mends it."""
    client.config_set("maxmemory-policy", "allkeys-lru")
    monkeypatch.setenv("EMBEDFARM_REDIS_URL", server.url)
    monkeypatch.setenv("EMBEDFARM_MODELS", '["null:16"]')
    monkeypatch.setenv("EMBEDFARM_STATE_DIRECTORY", str(tmp_path / "state"))
    (tmp_path / "requests").write_text(REQUEST + "\n")
    words = {
        "CORPUS": str(write_corpus(tmp_path / "corpus", ["one"])),
        "REQUESTS": str(tmp_path / "requests"),
        "OUT": str(tmp_path / "out"),
    }
    for role in ROLES:
        done = CliRunner().invoke(app, [words.get(word, word) for word in role.split()])
        assert done.exit_code == 1, (role, done.output)
        assert "(maxmemory-policy allkeys-lru)" in done.output, role
        assert "CONFIG SET maxmemory-policy noeviction" in done.output, role
    assert client.dbsize() == 0
    client.config_set("maxmemory-policy", "noeviction")
