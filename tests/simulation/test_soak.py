"""Tests that a soak that was stopped and goes on finds what one run without a stop finds."""

import subprocess
import sys
from pathlib import Path
from typing import Final

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


NESTED: Final = """
import logging, sys, types
from tests.simulation.library import production

production("tests.simulation.shrink")
from tests.simulation.soak import run_seeds

def depth(function):
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    inner = [each for each in cells if isinstance(each, types.FunctionType)]
    return max(map(depth, inner), default=-1) + 1

def depths():
    modules = [vars(sys.modules[name]) for name in sorted(sys.modules) if "embedfarm." in name]
    classes = [each for one in modules for each in one.values() if type(each) is type]
    found = [each for one in (*modules, *map(vars, classes)) for each in one.values()]
    return [depth(each) for each in found if isinstance(each, types.FunctionType)]

logging.disable()
run_seeds(range(3))
before = depths()
run_seeds(range(3))
assert depths() == before
"""


def test_no_run_wraps_what_the_one_before_has_wrapped() -> None:
    """What a run puts in the place of functions goes in the next one, or stays as it is.

    Else calls would be nested ever deeper, until after a thousand runs the stack is too small.
    """
    subprocess.run([sys.executable, "-c", NESTED], check=True)


def test_it_goes_on(tmp_path: Path) -> None:
    """A soak that finds an earlier tally goes on from its seeds, to the same figures in the end."""
    kept = tmp_path / "kept.json"
    first = soak("--seeds", 2, "--keep", kept)
    assert "| seeds | 0 to 1 |" in figures(first)
    again = soak("--seeds", 4, "--keep", kept)
    assert figures(again) == figures(soak("--seeds", 4))
    assert soak("--seeds", 4, "--keep", kept).stdout == again.stdout  # nothing was run


@pytest.mark.parametrize("other", [["--seed0", 4], []], ids=["seeds", "code"])
def test_not_from_what_is_of_others(tmp_path: Path, other: list[object]) -> None:
    """A soak refuses a tally of other code or of other seeds."""
    kept = tmp_path / "kept.json"
    figures(soak("--seeds", 1, "--keep", kept))
    if not other:
        kept.write_text(kept.read_text().replace('"of":["', '"of":["0'))
    done = soak("--seeds", 2, "--keep", kept, *other)
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
