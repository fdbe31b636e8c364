"""Tests that a soak that was stopped and goes on finds what one run without a stop finds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.soak import without_collection


def soak(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command with some arguments."""
    command = [sys.executable, "-m", "tests.simulation", *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def figures(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the figures of a successful soak, but for the time that it took."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "processor time" not in line]


def test_it_goes_on(tmp_path: Path) -> None:
    """A soak that finds an earlier tally goes on from its seeds, to the same figures in the end."""
    kept = tmp_path / "kept.json"
    first = soak("--seeds", 2, "--keep", kept)
    assert "| seeds | 0 to 1 |" in figures(first)
    again = soak("--seeds", 5, "--keep", kept)
    assert figures(again) == figures(soak("--seeds", 5))
    assert soak("--seeds", 5, "--keep", kept).stdout == again.stdout  # nothing was run


@pytest.mark.parametrize("other", [["--seed0", 4], []], ids=["seeds", "code"])
def test_not_from_what_is_of_others(tmp_path: Path, other: list[object]) -> None:
    """A soak refuses a tally of other code or of other seeds."""
    kept = tmp_path / "kept.json"
    figures(soak("--seeds", 1, "--keep", kept))
    if not other:
        kept.write_text(kept.read_text().replace('"of":["', '"of":["0'))
    done = soak("--seeds", 5, "--keep", kept, *other)
    assert done.returncode
    assert "is of code and seed" in done.stderr


class Closed:
    """An object in a cycle that tells when the garbage collector takes it."""

    def __init__(self, told: list[str]) -> None:
        self.itself, self.told = self, told

    def __del__(self) -> None:
        self.told.append("closed")


def test_a_run_collects_no_garbage() -> None:
    """Garbage is not collected within a run, but after it."""
    told: list[str] = []
    with without_collection():
        Closed(told)
        assert [[number] for number in range(100_000)], "enough for a collection of everything"
        assert not told
    assert told
