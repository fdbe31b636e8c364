"""Tests of docs/runbook.md: what it names exists, such as commands, alerts and settings."""

import re
import shlex
from typing import Final

import pytest
import yaml
from typer.main import get_command

from embedfarm.cli.app import app
from embedfarm.contract.settings import PREFIX, Settings
from embedfarm.watch.bottlenecks import RULES
from tests.deploy.manifests import OVERLAYS, ROOT

TEXT: Final = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
BLOCKS: Final = "".join(re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL))
COMMANDS: Final = [line.removeprefix("$ ") for line in BLOCKS.splitlines()]
# Those that stand in a sentence or a table, as far as a verb goes.
INLINE: Final = re.findall(r"`(embedfarm [a-z][^`…]*)`", TEXT)
OTHERS: Final = {"export", "redis-cli", "journalctl", "dmesg", "systemctl", "valkey-check-aof"}
ALERTS: Final = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", sorted({*COMMANDS, *INLINE}))
def test_commands_exist(command: str) -> None:
    """Each command is one of ours with options that it takes, or is of a program that is named."""
    program, *words = shlex.split(command)
    if program != "embedfarm":
        assert program in OTHERS | {"kubectl", "pip"}, command
        return
    group = get_command(app)
    with group.make_context("embedfarm", list(words)) as context:
        found = group
        while hasattr(found, "resolve_command"):
            _, found, words = found.resolve_command(context, words)
            assert found is not None, command
        found.make_context(str(found.name), words, parent=context)


def test_alerts_are_those_of_the_rules() -> None:
    """Every alert that is named exists, and those that page have a section."""
    rules = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
    named = set(re.findall(r"\bEmbedfarm[A-Z]\w+", TEXT))
    assert named <= rules.keys()
    paging = {name for name, rule in rules.items() if rule["labels"]["severity"] == "page"}
    assert paging <= named


def test_settings_and_units_are_those_of_the_farm() -> None:
    """Every setting, unit, overlay and deployment that is named exists."""
    named = set(re.findall(rf"{PREFIX}(\w+)", TEXT))
    assert {name.lower() for name in named} <= set(Settings.model_fields)
    units = {path.stem.partition("@")[0] for path in (ROOT / "deploy" / "systemd").iterdir()}
    restarted = re.findall(r"systemctl (?:re|)st(?:art|op) (.*)", BLOCKS)
    ours = [unit for line in restarted for unit in shlex.split(line) if unit != "valkey"]
    assert {unit.partition("@")[0] for unit in ours} <= units
    assert set(re.findall(r"overlays/(\w+)", TEXT)) <= set(OVERLAYS)
    defaults = Settings()
    assert defaults.lease_seconds == 12
    assert (defaults.heartbeat_ttl_seconds, defaults.scheduler_ttl_seconds) == (6, 5)
    assert "full_server" in {rule.__name__ for rule in RULES}
