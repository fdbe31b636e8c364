"""Tests of what options of the command line make of the settings."""

from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from embedfarm.cli.app import app
from embedfarm.cli.options import USAGE, pin
from embedfarm.contract.settings import Settings


def test_pins_reach_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins of the command line come beside those of the settings, also in a worker's process."""
    settings = pin(Settings(models_pinned=("a/b",)), ["null:8"])
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert Settings().models_pinned == ("a/b", "null:8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--endpoint", "http://host:1"), "which model is it that the endpoints have"),
        (("--model", "m"), "say what an endpoint has: give --endpoint, or leave them out"),
        (("--concurrency", "3"), "say what an endpoint has"),
        (("--cpus", "9"), "--cpus is for workers on a cluster"),
        (("--endpoint", "host", "--model", "m"), "'host' is no URL of a server"),
        (
            ("--endpoint", "http://host:1", "--endpoint", "http://host:1/v1", "--model", "m"),
            "two servers at host, port 1",
        ),
    ],
)
def test_endpoints_that_cannot_be_used(words: Sequence[str], said: str) -> None:
    """Workers for endpoints need a model, and URLs that are those of servers, one for each."""
    told = CliRunner().invoke(app, ["work", "--redis", "redis://127.0.0.1:1", *words])
    assert told.exit_code == USAGE
    assert said in " ".join(told.output.split())
