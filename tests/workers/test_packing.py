"""Which chunks go through the model together."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from workers.packing import batch_tokens, pack

lengths_lists = st.lists(st.integers(0, 600), max_size=200)
budgets = st.integers(1, 5000)
launches = st.integers(0, 3000)


def sizes(lengths: list[int], batch: NDArray[np.intp]) -> NDArray[np.int64]:
    """Tokens of the chunks of one batch; an empty one takes a place as well."""
    return np.maximum(np.asarray(lengths, dtype=np.int64)[batch], 1)


@given(lengths=lengths_lists, budget=budgets, launch=launches, padded=st.booleans())
def test_each_position_is_in_exactly_one_batch(
    lengths: list[int], budget: int, launch: int, *, padded: bool
) -> None:
    """No chunk is left out, none goes twice, and no batch is empty."""
    batches = pack(lengths, budget, launch, padded=padded)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(lengths)))
    assert all(len(batch) for batch in batches)


@given(lengths=lengths_lists, budget=budgets, launch=launches, padded=st.booleans())
def test_budget_is_kept(lengths: list[int], budget: int, launch: int, *, padded: bool) -> None:
    """A batch costs at most the budget, unless it is one chunk that alone costs more."""
    for batch in pack(lengths, budget, launch, padded=padded):
        cost = batch_tokens(sizes(lengths, batch), padded=padded)
        assert cost <= budget or len(batch) == 1


@given(lengths_lists, budgets, launches)
def test_padding_of_a_batch_is_worth_less_than_a_launch(
    lengths: list[int], budget: int, launch: int
) -> None:
    """Padding tokens in a batch never exceed what another batch would have cost."""
    for batch in pack(lengths, budget, launch, padded=True):
        chosen = sizes(lengths, batch)
        assert batch_tokens(chosen, padded=True) - chosen.sum() <= launch


@given(lengths=lengths_lists, budget=budgets, launch=launches, padded=st.booleans())
def test_longest_first(lengths: list[int], budget: int, launch: int, *, padded: bool) -> None:
    """Lengths never grow from one chunk to the next, within a batch and over all batches."""
    batches = pack(lengths, budget, launch, padded=padded)
    ordered = [size for batch in batches for size in sizes(lengths, batch).tolist()]
    assert ordered == sorted(ordered, reverse=True)


@given(lengths=lengths_lists, budget=budgets, launch=launches, padded=st.booleans())
def test_batches_are_full(lengths: list[int], budget: int, launch: int, *, padded: bool) -> None:
    """The next chunk stays out only where it would break the budget or the bound on padding."""
    batches = pack(lengths, budget, launch, padded=padded)
    for batch, following in pairwise(batches):
        grown = sizes(lengths, np.append(batch, following[0]))
        cost = batch_tokens(grown, padded=padded)
        assert cost > budget or (padded and cost - grown.sum() > launch)


def test_equal_lengths_fill_the_budget() -> None:
    """Where there is nothing to pad, only the budget ends a batch."""
    assert [len(batch) for batch in pack([100] * 7, 300, 0, padded=True)] == [3, 3, 1]


def test_plain_tokens_count_where_nothing_is_padded() -> None:
    """An engine without padding takes a long chunk and many short ones together."""
    lengths = [90, *[1] * 10]
    assert [len(batch) for batch in pack(lengths, 100, 0, padded=False)] == [11]
    assert [len(batch) for batch in pack(lengths, 100, 0, padded=True)] == [1, 10]
    assert batch_tokens(np.asarray(lengths), padded=False) == 100
    assert batch_tokens(np.asarray(lengths), padded=True) == 990


def test_nothing_packs_to_nothing() -> None:
    """No chunks, no batches."""
    assert pack([], 100, 10, padded=True) == []
    assert batch_tokens(np.asarray([], dtype=np.int64), padded=True) == 0
