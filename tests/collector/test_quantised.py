"""Tests that quantised vectors mean nearly what the floats did."""

from pathlib import Path

import numpy as np
import pytest

from embedfarm.collector.dequantisation import restore
from embedfarm.collector.manifest import OutputError
from embedfarm.collector.ranges import component_ranges, read_ranges
from embedfarm.collector.sinks import Vectors

RANDOM = np.random.default_rng(3)
ROWS = RANDOM.standard_normal((200, 21)).astype(np.float32)


def part(rows: np.ndarray) -> Vectors:
    """Return rows as a sink reads them."""
    return Vectors(np.arange(len(rows)), None, rows)


def test_ranges_are_over_all_parts() -> None:
    """Ranges are the least and greatest of each component over all parts."""
    ranges = component_ranges([part(ROWS[:0]), part(ROWS[:50]), part(ROWS[50:])])
    np.testing.assert_array_equal(ranges, [ROWS.min(axis=0), ROWS.max(axis=0)])


@pytest.mark.parametrize("parts", [[], [part(ROWS[:0])], [part(ROWS.astype(np.int8))]])
def test_ranges_need_floats(parts: list[Vectors]) -> None:
    """Ranges of no rows, or of integers, are refused."""
    with pytest.raises(OutputError, match="ranges come from"):
        component_ranges(parts)


def test_ranges_from_a_file(tmp_path: Path) -> None:
    """An array of two rows is taken; anything else is named."""
    np.save(tmp_path / "good.npy", np.array([[0, 1], [2, 3]], np.float64))
    assert read_ranges(tmp_path / "good.npy", "any").tolist() == [[0, 1], [2, 3]]
    np.save(tmp_path / "bad.npy", np.zeros((3, 2)))
    (tmp_path / "text.npy").write_text("no array")
    np.save(tmp_path / "words.npy", np.array([["a"], ["b"]]))
    np.save(tmp_path / "complex.npy", np.array([[0j], [1j]]))
    np.save(tmp_path / "large.npy", np.array([[-1e300], [1e300]]))
    np.savez(tmp_path / "several.npz", ranges=np.array([[0.0], [1.0]]))
    several = ("words.npy", "complex.npy", "large.npy", "several.npz")
    for name in ("bad.npy", "text.npy", "missing.npy", *several):
        with pytest.raises(OutputError, match=name):
            read_ranges(tmp_path / name, "any")


def test_int8_is_restored_to_half_a_step() -> None:
    """A restored component is off by half a step at most."""
    ranges = component_ranges([part(ROWS)])
    step = (ranges[1] - ranges[0]) / 255
    stored = np.clip(np.floor((ROWS - ranges[0]) / step), 0, 255) - 128
    restored = restore(stored.astype(np.int8), 21, ranges.tolist())
    assert (np.abs(restored - ROWS) <= step * 0.501).all()


def test_bits_are_restored_to_signs() -> None:
    """A bit says on which side of zero a component was; filling bits are dropped."""
    restored = restore(np.packbits(ROWS > 0, axis=1), 21, [])
    np.testing.assert_array_equal(restored, np.sign(ROWS))
