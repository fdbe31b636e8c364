"""Tests of the settings, which are every limit of the farm."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from embedfarm.contract.settings import Settings, misspelt
from embedfarm.contract.settings.profiles import MEBIBYTE, PROFILES
from tests.farm.harness import run

PRINT = (
    "from embedfarm.contract.settings import Settings; s = Settings();"
    "print(s.model_dump_json()); print(s.webhook_secret.get_secret_value())"
)


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep settings from the directory and the environment out of the test."""
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"EMBEDFARM_{name.upper()}", raising=False)


def test_every_field_is_documented() -> None:
    """Every field says what it limits; sizes, times and rates end in their unit."""
    units = ("bytes", "bytes_max", "seconds", "seconds_max", "per_second", "per_hour")
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
        if field.annotation is float:
            assert name.endswith(units), name


def test_flag_then_environment_then_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag overrules the environment, that overrules the file, and that the default."""
    file = "drain_seconds = 1\nevents_max = 1\nprobe_seconds = 1\n[tenant_weights]\nours = 4\n"
    (tmp_path / "embedfarm.toml").write_text(file)
    monkeypatch.setenv("EMBEDFARM_EVENTS_MAX", "2")
    monkeypatch.setenv("EMBEDFARM_PROBE_SECONDS", "2")
    settings = Settings(probe_seconds=3)
    assert (settings.drain_seconds, settings.events_max, settings.probe_seconds) == (1, 2, 3)
    assert (settings.tenant_weights, settings.deliveries_max) == ({"ours": 4}, 3)


def test_unknown_field_in_the_file_is_refused(tmp_path: Path) -> None:
    """A misspelt name in the file is an error that names it."""
    (tmp_path / "embedfarm.toml").write_text("lease_second = 20\n")
    with pytest.raises(ValidationError, match="lease_second"):
        Settings()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window_bytes_max": 48 * MEBIBYTE}, r"window_bytes_max .* 2 \* part_bytes_max, .* 5033"),
        ({"results_bytes_max": 9}, r"results_bytes_max must be more than 1 \* window_bytes_max"),
        ({"part_bytes_max": 60 * MEBIBYTE}, r"window_bytes_max must be more than 2"),
        ({"lease_seconds": 3.0}, r"lease_seconds must be more than 3 \* heartbeat_seconds"),
        ({"heartbeat_seconds": 3.0}, r"heartbeat_ttl_seconds must be more than 2"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"deliveries_max": 0}, "deliveries_max"),
        ({"batch_tokens_max": -1}, "batch_tokens_max"),
    ],
)
def test_limits_that_do_not_work_are_refused(changed: dict[str, Any], message: str) -> None:
    """Limits that would stop the farm, or make it do its work twice, are refused by name."""
    with pytest.raises(ValidationError, match=message):
        Settings(**{"lease_seconds": 30.0, **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {
            "redis_url": "redis://:p%40ss@host:1/0?x=1",
            "model_cache": Path("/models of mine"),
            "lease_seconds": 0.5,
            "heartbeat_seconds": 0.1,
            "events_max": 7,
            "tenant_weights": {"ours": 4},
            "webhook_secret": "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        },
    ],
)
def test_child_gets_our_settings(tmp_path: Path, changed: dict[str, Any]) -> None:
    """A child process has our settings exactly, whatever the file in its directory says."""
    settings = Settings(**changed)
    (tmp_path / "embedfarm.toml").write_text("events_max = 1\n")
    child = subprocess.run(
        [sys.executable, "-c", PRINT],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), **settings.environment()},
        capture_output=True,
        check=True,
        timeout=60,
    )
    dump, secret = child.stdout.decode().splitlines()
    assert json.loads(dump) == settings.model_dump(mode="json")
    assert secret == settings.webhook_secret.get_secret_value()


def test_a_misspelt_variable_is_refused() -> None:
    """A variable whose name is nearly a setting's ends a command with what is meant."""
    done = run("doctor", environment={"EMBEDFARM_REDIS_ULR": "redis://127.0.0.1:1"})
    assert done.returncode == 2
    assert "there is no EMBEDFARM_REDIS_ULR; EMBEDFARM_REDIS_URL is meant" in done.stderr
    assert misspelt(["EMBEDFARM_REDIS_URL", "EMBEDFARM_TEST_SERVERS", "HOME"]) == {}


def test_settings_do_not_change() -> None:
    """A setting is the same for all who hold the object."""
    with pytest.raises(ValidationError, match="frozen"):
        Settings().lease_seconds = 1.0


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_other_defaults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile's limits are used unless one is set by name."""
    monkeypatch.setenv("EMBEDFARM_PROFILE", name)
    changed = {field: getattr(Settings(), field) for field in PROFILES[name]}
    assert changed == PROFILES[name]
    assert all(value != getattr(Settings(profile=""), field) for field, value in changed.items())
    monkeypatch.setenv("EMBEDFARM_MICRO_BATCH_SECONDS_MAX", "7")
    assert Settings().micro_batch_seconds_max == 7
