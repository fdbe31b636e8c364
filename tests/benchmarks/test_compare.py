"""A short comparison with the real processes: the farm, its bare engine and `encode`."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare import (
    CONTENDERS,
    PEERS,
    Contender,
    Place,
    Unavailable,
    compare,
    measure_cosines,
)
from benchmarks.corpora import MODEL
from benchmarks.hardware import describe_hardware, find_flags, parse_cpuinfo
from benchmarks.processes import CommandFailed, run_watched
from benchmarks.results import BARE_ENGINE, BASELINE, FARM
from embedfarm.contract import model_files

ABSENT = Contender("absent", "infinity")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A build directory without any environment in it."""
    return Place(model_files.resolve(MODEL), "cpu", tmp_path)


@pytest.mark.slow  # `tests/benchmarks/test_gpu.py` has the three on a tiny model
def test_the_farm_its_engine_and_encode_agree(place: Place) -> None:
    """Contenders have figures and the same vectors of 50 texts; a missing one has its reason."""
    chosen = [each for each in CONTENDERS if each.name in {FARM, BARE_ENGINE, BASELINE}]
    found = compare("mixed", [*chosen, ABSENT], chunks=50, rounds=1, place=place)
    ran = {each.contender: each for each in found.outcomes if each.runs}
    assert ran.keys() == {FARM, BARE_ENGINE, BASELINE}
    for outcome in ran.values():
        assert outcome.cosine_min > 0.999
        assert outcome.seconds < outcome.wall_seconds
        assert outcome.rss_bytes_max > 100e6
        assert found.peak_share(outcome) > 0
    assert found.chunks == 50
    assert found.outcomes[-1].reason == "not installed: not tried"


def test_the_reason_of_a_missing_peer_is_what_pip_said(place: Place) -> None:
    """The reason of a peer that is not installed is the last line of pip's log."""
    log = place.build / "peers" / "infinity.log"
    log.parent.mkdir()
    log.write_text("Collecting it\nERROR: no matching distribution\n")
    with pytest.raises(Unavailable, match="not installed: ERROR: no matching"):
        place.python(ABSENT.peer)


def test_every_contender_has_a_script() -> None:
    """Each contender has a module below benchmarks/peers, each requirements file as well."""
    scripts = {path.stem for path in PEERS.glob("*.py")} - {"__init__", "protocol"}
    assert {each.peer for each in CONTENDERS} == scripts
    assert {path.stem for path in PEERS.glob("*.txt")} < scripts


def test_cosines_do_not_depend_on_length() -> None:
    """A cosine depends on the direction only; shorter vectors are as good."""
    exact = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32)
    ours = np.array([[3.0, 0.0], [1.0, 1.0]], np.float32)
    np.testing.assert_allclose(measure_cosines(ours, exact), [1.0, 0.5**0.5])


def test_memory_is_of_the_whole_tree() -> None:
    """The memory of a child process counts, here 200 MB that are held for ten samples."""
    child = """import threading
data = b"x" * 200_000_000
threading.Event().wait(5)
print("done")"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    finished = run_watched([sys.executable, "-c", parent])
    assert finished.output == "done\n"
    assert finished.rss_bytes_max > 200e6


def test_a_command_that_fails_says_why() -> None:
    """The end of a failed command's output is in the message."""
    with pytest.raises(CommandFailed, match="ended with 3: it is broken"):
        run_watched([sys.executable, "-c", "import sys; print('it is broken'); sys.exit(3)"])


def test_hardware_is_named() -> None:
    """Each fact about this machine is known, but perhaps its instruction sets."""
    facts = describe_hardware()
    assert all(value for name, value in facts.items() if name != "Instruction sets")
    assert facts["Memory"].endswith("GiB")


def test_the_first_processor_speaks_for_all() -> None:
    """The first processor's fields are read, and the instruction sets of x86 and of ARM."""
    intel = parse_cpuinfo("model name\t: Some CPU\nflags\t\t: fpu avx2\n\nmodel name\t: Other\n")
    assert intel["model name"] == "Some CPU"
    assert find_flags(intel) == {"fpu", "avx2"}
    assert find_flags(parse_cpuinfo("Features : asimd bf16\n")) == {"asimd", "bf16"}
