"""Tests of the search for ids that occur more than once."""

import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.collector import id_digests
from embedfarm.collector.id_digests import DIGEST, IdDigests, RepeatedIds


def find_by_hand(ids: Sequence[str]) -> RepeatedIds | None:
    """Find ids that occur more than once, with all of them in memory."""
    last: dict[str, int] = {}
    pairs = []
    for index, name in enumerate(ids):
        if name in last:
            pairs.append((index, last[name]))
        last[name] = index
    return RepeatedIds(len(pairs), *pairs[0]) if pairs else None


@pytest.mark.parametrize("compared_max", [1, 3, 1000])
@given(names=st.lists(st.text(max_size=2), max_size=40), cut=st.integers(0, 40))
def test_every_repeated_id_is_found(compared_max: int, names: list[str], cut: int) -> None:
    """What is found is what a search in memory finds, in shares and after an interruption."""
    with TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_digests, "COMPARED_MAX", compared_max)
        kept = min(cut, len(names))
        before = IdDigests(Path(home) / "ids")
        before.add(0, names[:kept])
        before.add(kept, ["half", "of", "the", "next", "part"])
        after = IdDigests(Path(home) / "ids")
        after.resume(kept)
        after.add(kept, names[kept:])
        if names:
            assert after.find_repeated(len(names)) == find_by_hand(names)
        after.remove()
        assert list(Path(home).iterdir()) == []


def test_memory_is_that_of_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen times as many ids as are compared at a time take 64 bytes for each of those."""
    most = 1 << 16
    monkeypatch.setattr(id_digests, "COMPARED_MAX", most)
    (tmp_path / "ids").write_bytes(random.Random(0).randbytes(16 * most * DIGEST.itemsize))
    tracemalloc.start()
    try:
        assert IdDigests(tmp_path / "ids").find_repeated(16 * most) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * most


def test_nothing_is_claimed_where_digests_are_missing(tmp_path: Path) -> None:
    """An output whose first chunks have no digests, or fewer than are needed, is not judged."""
    digests = IdDigests(tmp_path / "ids")
    assert digests.find_repeated(2) is None
    digests.add(1, ["a"])  # one was not kept: what follows would stand in its place
    assert digests.holds(0)
    digests.add(0, ["a", "a"])
    assert digests.find_repeated(3) is None
    assert digests.find_repeated(2) == RepeatedIds(1, 1, 0)
    with (tmp_path / "ids").open("ab") as file:
        file.write(bytes(DIGEST.itemsize - 1))  # half of what was written when power failed
    digests.resume(2)
    assert digests.find_repeated(2) == RepeatedIds(1, 1, 0)
