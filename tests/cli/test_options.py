"""Tests of what options of the command line make of the settings."""

import pytest

from embedfarm.cli.options import pin
from embedfarm.contract.settings import Settings


def test_pins_reach_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins of the command line come beside those of the settings, also in a worker's process."""
    settings = pin(Settings(models_pinned=("a/b",)), ["null:8"])
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert Settings().models_pinned == ("a/b", "null:8")
