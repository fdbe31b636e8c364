"""Tests of `embedfarm work --on`: what is refused, and which settings go to other hosts."""

from base64 import b64encode

import pytest

from embedfarm.cli.cluster import environment_of
from embedfarm.contract.settings import Settings
from tests.farm.harness import run

REFUSED = {
    "--on slurm --redis redis://farm": "it is ray, or ray://HOST:PORT",
    "--on ray --redis unix:///run/valkey": "no other host reaches a server at a unix socket",
    "--on ray --redis redis://farm --devices 0,1": "names devices of one host",
    "--on ray --redis redis://farm --workers 2": "give --devices gpu or --devices cpu",
    "--on ray --redis redis://farm --endpoint http://h/v1 --model m": "endpoints need no cluster",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_cluster_cannot_do_is_refused(words: str) -> None:
    """A sentence says what is meant, before any cluster is asked."""
    done = run("work", *words.split())
    assert done.returncode == 2
    assert REFUSED[words] in " ".join(done.stderr.split())


def test_only_what_was_set_goes_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults are left to the hosts, and secrets and places that workers have no use for here."""
    monkeypatch.delenv("EMBEDFARM_ENGINE_CACHE")
    monkeypatch.setenv("EMBEDFARM_LEASE_SECONDS", "20")
    monkeypatch.setenv("EMBEDFARM_STATE_DIRECTORY", "/here")
    monkeypatch.setenv("EMBEDFARM_WEBHOOK_SECRET", f"whsec_{b64encode(bytes(24)).decode()}")
    settings = Settings().model_copy(update={"redis_url": "redis://:word@farm"})
    assert environment_of(settings) == {
        "EMBEDFARM_REDIS_URL": "redis://:word@farm",
        "EMBEDFARM_DRAIN_SECONDS": "30.0",
        "EMBEDFARM_LEASE_SECONDS": "20.0",
    }
