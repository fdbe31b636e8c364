"""Tests of directories that nobody else may look into."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedfarm.contract.private_directories import make_private


@pytest.fixture(params=[0, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set a umask during the test: 000, 022 or 077."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_only_the_last_is_private(umask: int, tmp_path: Path) -> None:
    """Only the last directory of a path is private; those above it have the umask's modes."""
    make_private(tmp_path / "chosen" / "logs")
    assert (tmp_path / "chosen" / "logs").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "chosen").stat().st_mode & 0o777 == 0o777 & ~umask


def test_one_that_is_there_is_closed(tmp_path: Path) -> None:
    """A directory that exists becomes private, and what is in it stays."""
    (logs := tmp_path / "logs").mkdir()
    logs.chmod(0o2775)
    (logs / "a").touch()
    make_private(logs)
    assert logs.stat().st_mode & 0o777 == 0o700
    assert (logs / "a").exists()
