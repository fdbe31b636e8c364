"""Tests of the messages between the ranks of a group."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from embedfarm.workers.engines.rank_orders import (
    DropOrder,
    JoinOrder,
    LoadOrder,
    MeetOrder,
    Order,
    RankAnswer,
    forward_order,
    read_answer,
    read_order,
    write_message,
)

ARRAYS = st.one_of(
    *(arrays(dtype, array_shapes(max_dims=3, min_side=0)) for dtype in ("<i8", "?", "<f4"))
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text()


@given(st.dictionaries(st.text(), ARRAYS), st.dictionaries(st.text(), PLAIN))
def test_a_forward_pass_comes_as_it_went(
    tensors: dict[str, NDArray[Any]], plain: dict[str, Any]
) -> None:
    """Arrays of any type and shape, and plain values, are read as they were written."""
    features = plain | tensors
    pipe = io.BytesIO()
    order, values = forward_order(7, features)
    write_message(pipe, order, values)
    pipe.seek(0)
    read, found = read_order(pipe)
    assert read == order
    assert order.rest == {name: value for name, value in features.items() if name not in found}
    assert found.keys() == tensors.keys()
    for name, array in found.items():
        assert array.dtype == tensors[name].dtype
        np.testing.assert_array_equal(array, tensors[name])
        assert array.flags.writeable  # or torch warns of it
    assert not pipe.read()


def test_an_array_need_not_be_contiguous() -> None:
    """Every other column of an array comes as such."""
    columns = np.arange(12).reshape(3, 4)[:, ::2]
    pipe = io.BytesIO()
    order, values = forward_order(0, {"columns": columns})
    write_message(pipe, order, values)
    pipe.seek(0)
    np.testing.assert_array_equal(read_order(pipe)[1]["columns"], columns)


@pytest.mark.parametrize(
    "order",
    [JoinOrder(1234, 5.0), LoadOrder(3, "/models/one", "float32", "query"), DropOrder((1, 2)),
     MeetOrder()],
)  # fmt: skip
def test_other_orders_come_as_they_went(order: Order) -> None:
    """Each kind of order is told from the others."""
    pipe = io.BytesIO()
    write_message(pipe, order)
    pipe.seek(0)
    assert read_order(pipe) == (order, {})


def test_a_pipe_that_ends_is_no_message() -> None:
    """The end of a pipe, between messages or in the midst of one, is told as such."""
    pipe = io.BytesIO()
    write_message(pipe, RankAnswer("no memory", full=True))
    whole = pipe.getvalue()
    assert read_answer(io.BytesIO(whole)) == RankAnswer("no memory", full=True)
    for length in range(len(whole)):
        with pytest.raises(EOFError):
            read_answer(io.BytesIO(whole[:length]))
