"""Tests of the record that says which job fills an output."""

from pathlib import Path

import pytest

from embedfarm.collector.manifest import STATE_DIRECTORY, OutputError
from embedfarm.runs.own_job import make_own_job


def test_another_name_is_refused(tmp_path: Path) -> None:
    """An output keeps its job: without a name or with that one it goes on, with no other."""
    (tmp_path / STATE_DIRECTORY).mkdir()
    first = make_own_job(tmp_path, "nightly")
    assert first.name == "nightly"
    assert make_own_job(tmp_path, "") == make_own_job(tmp_path, "nightly") == first
    with pytest.raises(OutputError, match="filled by job nightly, and not by weekly"):
        make_own_job(tmp_path, "weekly")
    assert make_own_job(tmp_path, "") == first
