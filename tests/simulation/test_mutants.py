"""Tests that the simulation finds defects: each patch in `mutants` puts one into the code."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
MUTANTS: Final = sorted((Path(__file__).parent / "mutants").glob("*.patch"))
COPIED: Final = (
    "embedfarm", "contract", "readers", "producer", "scheduler", "workers", "collector", "runs",
    "watch", "ingest", "cli", "web", "benchmarks", "tests/simulation",
)  # fmt: skip
SEEDS: Final = os.environ.get("EMBEDFARM_MUTANT_SEEDS", "10000")  # of which far fewer are needed


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy the production code and the simulation."""
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "mutants")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "tests" / "__init__.py", tmp_path / "tests")
    return tmp_path


@pytest.mark.parametrize("patch", MUTANTS, ids=lambda path: path.stem)
def test_it_fits(patch: Path) -> None:
    """A patch still applies to the production code."""
    done = subprocess.run(
        ["git", "apply", "--check", str(patch)],  # noqa: S607 # whichever is there
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_what_runs_is_the_copy(tree: Path) -> None:
    """A soak of the copied tree imports the files that a patch would change there."""
    code = "import embedfarm.contract.wire as wire; print(wire.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert Path(done.stdout.strip()).resolve() == (tree / "contract" / "wire.py").resolve()


@pytest.mark.slow
@pytest.mark.parametrize("patch", MUTANTS, ids=lambda path: path.stem)
def test_it_is_found(patch: Path, tree: Path) -> None:
    """A soak fails over the defect that a patch puts in."""
    subprocess.run(["git", "apply", str(patch)], cwd=tree, check=True)  # noqa: S607 # whichever is there
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--first", "--seeds", SEEDS],
        check=False,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.search(r"again: python -m tests\.simulation --seed (\d+)", done.stdout)
    assert found, done.stdout + done.stderr
    print(f"{patch.stem}: seed {found[1]}")  # noqa: T201 # `make mutants` shows it
