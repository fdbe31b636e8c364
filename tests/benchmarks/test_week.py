"""Tests of the week in fast-forward: many small jobs through one farm, and what they leave."""

from collections import Counter
from pathlib import Path

from benchmarks.week import KINDS, Moment, Process, Week, measure


def test_nothing_is_left_of_many_jobs(tmp_path: Path) -> None:
    """Jobs of every kind leave no key, file or thread, and memory as it was before."""
    week = measure(tmp_path, 210)
    assert week.ended.total() == 210
    assert week.ended.keys() == KINDS.keys()
    assert not week.faults


def moment(jobs: int, size: int, keys: int = 20, files: int = 9) -> Moment:
    """A moment of a farm with one role."""
    roles = {"scheduler": Process(size, files, 3)}
    return Moment(jobs, 1.0, 2 << 20, Counter({"farm:x": keys}), roles)


def test_what_grows_is_a_fault() -> None:
    """Growing memory, and keys and files added since the first moments, are faults by name."""
    flat = [moment(n, 100 << 20) for n in range(10)]
    assert not Week(moments=flat).faults
    slope = [moment(n, (100 + 2 * n) << 20) for n in range(10)]
    assert Week(moments=slope).faults == ["memory of scheduler grew by 7.0%"]
    assert Week(moments=[*flat, moment(10, 100 << 20, 21)]).faults == ["1 more keys farm:x"]
    (files,) = Week(moments=[*flat, moment(10, 100 << 20, files=99)]).faults
    assert "files=99" in files
