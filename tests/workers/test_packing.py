"""Tests of packing: which chunks go through the model together."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from embedfarm.workers.packing import batch_tokens, pack

lengths_lists = st.lists(st.integers(0, 600), max_size=200)
budgets = st.integers(1, 5000)
launches = st.integers(0, 3000)


def sizes(lengths: list[int], batch: NDArray[np.intp]) -> NDArray[np.int64]:
    """The tokens of one batch's chunks; an empty chunk counts as one token."""
    return np.maximum(np.asarray(lengths, dtype=np.int64)[batch], 1)


@given(lengths=lengths_lists, budget=budgets, launch=launches, padded=st.booleans())
def test_each_position_is_in_exactly_one_batch(
    lengths: list[int], budget: int, launch: int, *, padded: bool
) -> None:
    """Each chunk is in exactly one batch, and no batch is empty."""
    batches = pack(lengths, budget, launch, padded=padded)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(lengths)))
    assert all(len(batch) for batch in batches)


@given(lengths=lengths_lists, budget=budgets, launch=launches, padded=st.booleans())
def test_budget_is_kept(lengths: list[int], budget: int, launch: int, *, padded: bool) -> None:
    """A batch costs at most the budget, unless it is one chunk that alone costs more."""
    for batch in pack(lengths, budget, launch, padded=padded):
        cost = batch_tokens(sizes(lengths, batch), padded=padded)
        assert cost <= budget or len(batch) == 1


def total_cost(batches: Sequence[NDArray[np.int64]], launch: int) -> int:
    """The cost of all batches with padding, of chunks of these sizes."""
    return sum(int(batch.max()) * len(batch) + launch for batch in batches)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 300), st.integers(0, 90)
)
def test_nothing_cheaper_fits(lengths: list[int], budget: int, launch: int) -> None:
    """Packing costs as little as the best way to cut the sorted chunks within the budget."""
    ordered = np.sort(np.asarray(lengths))[::-1]
    inner = range(1, len(ordered))
    ways = (
        np.split(ordered, cuts)
        for count in range(len(ordered))
        for cuts in combinations(inner, count)
    )
    fits = (way for way in ways if all(b.max() * len(b) <= budget or len(b) == 1 for b in way))
    batches = [sizes(lengths, batch) for batch in pack(lengths, budget, launch, padded=True)]
    assert total_cost(batches, launch) == min(total_cost(way, launch) for way in fits)


@pytest.mark.parametrize(("launch", "budget"), [(0, 2048), (24, 2048), (64, 2048), (2048, 65536)])
@pytest.mark.parametrize("longest", [16, 256])
def test_many_chunks_cost_hardly_more(
    launch: int, budget: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shorter search over many chunks costs at most 1 % more than the exact one."""
    drawn = np.random.default_rng(launch).lognormal(3.4, 0.9, 3000)
    lengths = np.clip(drawn, 3, longest).astype(np.int64)
    found = pack(lengths, budget, launch, padded=True)
    monkeypatch.setattr("embedfarm.workers.packing.EXACT_CHUNKS_MAX", 3000)
    exact = pack(lengths, budget, launch, padded=True)
    ours, best = (total_cost([lengths[b] for b in way], launch) for way in (found, exact))
    assert best <= ours <= 1.01 * best


@given(lengths=lengths_lists, budget=budgets, launch=launches, padded=st.booleans())
def test_longest_first(lengths: list[int], budget: int, launch: int, *, padded: bool) -> None:
    """Lengths never grow from one chunk to the next, within a batch and over all batches."""
    batches = pack(lengths, budget, launch, padded=padded)
    ordered = [size for batch in batches for size in sizes(lengths, batch).tolist()]
    assert ordered == sorted(ordered, reverse=True)


@given(lengths_lists, budgets)
def test_unpadded_batches_are_full(lengths: list[int], budget: int) -> None:
    """A batch without padding ends only where the next chunk would break the budget."""
    for batch, following in pairwise(pack(lengths, budget, 0, padded=False)):
        assert sizes(lengths, np.append(batch, following[0])).sum() > budget


def test_equal_lengths_fill_the_budget() -> None:
    """Chunks of equal lengths fill each batch up to the budget."""
    assert [len(batch) for batch in pack([100] * 7, 300, 1, padded=True)] == [3, 3, 1]


def test_plain_tokens_count_where_nothing_is_padded() -> None:
    """An engine without padding takes a long chunk and many short ones together."""
    lengths = [90, *[1] * 10]
    assert [len(batch) for batch in pack(lengths, 100, 0, padded=False)] == [11]
    assert [len(batch) for batch in pack(lengths, 100, 1, padded=True)] == [1, 10]
    assert batch_tokens(np.asarray(lengths), padded=False) == 100
    assert batch_tokens(np.asarray(lengths), padded=True) == 990


def test_nothing_packs_to_nothing() -> None:
    """Packing no chunks gives no batches."""
    assert pack([], 100, 10, padded=True) == []
    assert batch_tokens(np.asarray([], dtype=np.int64), padded=True) == 0
