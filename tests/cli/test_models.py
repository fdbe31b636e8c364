"""Tests of `embedfarm models` on a worker that runs."""

import json

import pytest
import redis
from typer.testing import CliRunner, Result

from embedfarm.cli.app import app
from embedfarm.contract.farm_client import FarmClient
from embedfarm.workers import model_store
from tests.support import LiveServer, wait_until
from tests.workers.running import worker_on, working
from tests.workers.support import block_of, create_job

SLOW = "null:8:100"  # tokens per second


def models(server: LiveServer, *words: str) -> Result:
    """Run `embedfarm models`."""
    return CliRunner().invoke(app, ["models", *words, "--redis", server.url])


def test_models_are_loaded_kept_and_unloaded(
    server: LiveServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each verb does what it says, and the others show it."""
    monkeypatch.setattr(model_store, "ORDERS_SECONDS", 0.0)
    farm = FarmClient(client)
    with working(worker_on(server)):
        wait_until(farm.workers)
        assert "no worker has it" in models(server, "show", "null:4").output
        done = models(server, "load", "null:4")
        assert (done.exit_code, done.output) == (0, "null:4 is loaded\n")
        assert models(server, "pin", "null:4").output == "null:4 is pinned\n"
        wait_until(lambda: "ready, pinned" in models(server, "ls").output)
        shown = models(server, "show", "null:4").output
        assert "wanted on all workers since" in shown
        assert ", pinned\n" in shown
        told = json.loads(models(server, "show", "null:4", "--json").output)
        assert told["order"]["pinned"]
        assert [each["state"] for each in told["workers"]] == ["ready"]
        assert models(server, "unpin", "null:4").output == "null:4 is pinned no longer\n"
        assert models(server, "unload", "null:4").output == "null:4 is unloaded\n"
        assert "unloaded by hand at" in models(server, "show", "null:4").output


def test_without_a_worker_nothing_is_loaded(server: LiveServer) -> None:
    """A farm without workers has not loaded a model, whatever is wanted of it."""
    done = models(server, "load", "null:4")
    assert (done.exit_code, "no worker is alive" in done.output) == (1, True)


def test_what_is_not_done_is_said(
    server: LiveServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that does not exist, and one that work needs, are no success."""
    monkeypatch.setattr(model_store, "ORDERS_SECONDS", 0.0)
    farm = FarmClient(client)
    job = create_job(farm, [block_of(0, 100)], model=SLOW)  # 4 s
    with working(worker_on(server)) as worker:
        wait_until(lambda: worker._current)
        failed = models(server, "load", "null:x")
        assert failed.exit_code == 1
        assert "cannot load it: 'null:x' is not null:<dimensions>" in failed.output
        kept = models(server, "unload", SLOW, "--wait", "0")
        assert kept.exit_code == 1
        assert "work needs it on" in kept.output
        wait_until(lambda: job.status().chunks_done == 100)
        wait_until(lambda: not any(each.state == "ready" for each in farm.workers()[0].models))
