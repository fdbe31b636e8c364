"""Test that a seed gives the same run in whatever process it runs."""

import os
import subprocess
import sys
from typing import Final

import pytest

SEEDS: Final = (9, 11)


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
