"""Test that a seed gives the same run in whatever process it runs."""

import os
import subprocess
import sys
from typing import Final

import pytest

SEEDS: Final = (9, 11, 600_154, 600_185)


def begin(seed: int, hash_seed: int) -> "subprocess.Popen[bytes]":
    """Start a run with a detailed log, in a process with a hash seed of its own."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--detailed"]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


@pytest.mark.parametrize("seed", SEEDS)
def test_traces_are_the_same(seed: int) -> None:
    """Two runs of a seed have the same detailed log, whatever the order of their sets."""
    runs = [begin(seed, hash_seed) for hash_seed in (1, 2)]
    one, other = (run.communicate()[0] for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(one.splitlines()) > 500
    assert one == other


NUMBERS: Final = """
import logging, types
from tests.simulation.library import production

production("tests.simulation.shrink")
from tests.simulation import soak

logging.disable()
outcomes = []
for number in (1, 1 << 22):
    soak.os = types.SimpleNamespace(getpid=lambda: number)
    outcomes.append(soak.run_seed(3).outcome)
assert outcomes[0] and outcomes[0] == outcomes[1]
"""


def test_the_number_of_the_process_is_of_no_matter() -> None:
    """A run has the same outcome in any process: paths are in records, and records fill servers."""
    subprocess.run([sys.executable, "-c", NUMBERS], check=True)
