"""Tests of the ranks of a group: how many there are, how they end, and what fails in them."""

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from embedfarm.contract.similarity import cosine
from embedfarm.workers.engines.engine import DeviceFailed, NoRoom, OutOfMemory
from tests.support import wait_until
from tests.workers.groups import TEXTS, alone, embed, formed, open_model

SECONDS_MAX = 40.0  # that the ranks may take for anything, where a test waits for longer


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_vectors_are_those_of_one_process(size: int, models: Callable[[str], Path]) -> None:
    """Several ranks give each text the vector that one process gives it, and count its work."""
    single = alone(models("shared"))
    with formed(size) as (_, ends):
        engine = open_model(models("shared"))
        assert cosine(embed(engine), embed(single)).min() >= 0.9999
        assert engine.name == f"torch, tensor parallel on {size}"
        assert engine.fingerprint == single.fingerprint
        lengths = np.asarray([10, 60])
        assert engine.flops(lengths) == pytest.approx(single.flops(lengths), rel=0.05)
    assert not ends


def test_an_idle_rank_dies_and_it_is_known_at_once() -> None:
    """The end of a rank that has nothing to do is told at once, with how it ended."""
    with formed(2) as (group, ends):
        os.kill(group.pids[0], signal.SIGKILL)
        wait_until(lambda: ends, 5)
        assert ends == ["rank 1 of the group: killed by SIGKILL"]
        with pytest.raises(DeviceFailed, match="killed by SIGKILL"):
            group.load("anywhere", "float32", "", lambda: None)


def test_a_rank_that_dies_at_work_fails_the_device(models: Callable[[str], Path]) -> None:
    """A forward pass without one of the ranks ends soon, and is no failure but the group's."""
    with formed(2) as (group, ends):
        engine = open_model(models("shared"))
        batch = engine.tokenise(TEXTS)
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(DeviceFailed, match="killed by SIGKILL"):
            engine.forward(batch, np.arange(len(TEXTS)))
        wait_until(lambda: ends, 5)


def test_a_signal_to_all_processes_is_for_the_first(models: Callable[[str], Path]) -> None:
    """SIGTERM and SIGINT, with which a worker is asked to drain, do not end another rank."""
    with formed(2) as (group, ends):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(group.pids[0], number)
        engine = open_model(models("shared"))
        assert np.isfinite(embed(engine)).all()
        assert not ends


def test_a_rank_without_memory_makes_batches_smaller(models: Callable[[str], Path]) -> None:
    """A rank for which a batch is too large says so, once: after that the group has to end."""
    with formed(2) as (group, ends):
        engine = open_model(models("shared"))
        process = psutil.Process(group.pids[0])
        limit = process.memory_info().data + (64 << 20)
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit, limit))
        batch = engine.tokenise(["long " * 2000] * 4000)
        with pytest.raises(OutOfMemory):
            engine.forward(batch, np.arange(4000))
        with pytest.raises(DeviceFailed):
            engine.forward(batch, np.arange(1))
        wait_until(lambda: ends, 10)


@pytest.mark.slow
def test_an_idle_group_waits_for_ever(models: Callable[[str], Path]) -> None:
    """A group that has nothing to do for longer than anything may take is as good as before."""
    with formed(2, seconds=SECONDS_MAX) as (_, ends):
        engine = open_model(models("shared"))
        over = time.monotonic() + 1.2 * SECONDS_MAX
        wait_until(lambda: time.monotonic() > over, 2 * SECONDS_MAX)
        assert np.isfinite(embed(engine)).all()
        assert not ends


@pytest.mark.slow
def test_ranks_that_lost_step_end(models: Callable[[str], Path]) -> None:
    """A load that fails on this rank alone is the end of the group, before the next one hangs."""
    with formed(2, seconds=SECONDS_MAX) as (group, _):
        assert np.isfinite(embed(open_model(models("shared")))).all()

        def fail() -> None:
            raise NoRoom("no memory here")

        began = time.monotonic()
        with pytest.raises(DeviceFailed, match="as far"):
            group.load(str(models("shared")), "float32", "", fail)
        assert time.monotonic() - began < 2 * SECONDS_MAX
