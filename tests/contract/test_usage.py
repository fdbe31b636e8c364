"""Tests of the accounts of what workers did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.encoding import decode, encode
from embedfarm.contract.usage import LATEST, SUMS, Account, Parity, describe, split

activities = st.dictionaries(st.sampled_from(["queue", "forward", "commit"]), st.floats(0, 100))
accounts = st.builds(
    Account,
    engine=st.sampled_from(["", "torch float32"]),
    device=st.just("a kind"),
    **{name: st.integers(0, 1000) for name in SUMS},
    budget_tokens=st.integers(0, 1000),
    peak_flops_per_second=st.floats(0, 1e12),
    seconds=activities,
    parity=st.none() | st.builds(Parity, texts=st.integers(1, 8)),
)


@given(accounts, accounts)
def test_accounts_add_up(one: Account, other: Account) -> None:
    """Counts and seconds are added up, and the other fields are those of the last account."""
    total = decode(Account, encode(one))
    total.add(other)
    for name in SUMS:
        assert getattr(total, name) == getattr(one, name) + getattr(other, name)
    for name in LATEST:
        assert getattr(total, name) in (getattr(one, name), getattr(other, name))
    for activity in {*one.seconds, *other.seconds}:
        parts = [each.seconds.get(activity, 0.0) for each in (one, other)]
        assert total.seconds[activity] == sum(parts)
    assert {*SUMS, *LATEST, "seconds"} == set(Account.__struct_fields__)


@given(accounts, st.lists(st.integers(0, 10**9), min_size=1, max_size=8).filter(any))
def test_parts_of_an_account_add_up_to_it(whole: Account, weights: list[int]) -> None:
    """Parts of an account lose no count; a weight of 0 gets none, and a single one gets all."""
    parts = split(whole, weights)
    for name in SUMS:
        found = [getattr(part, name) for part in parts]
        assert sum(found) == getattr(whole, name)
        assert all(n == 0 for n, weight in zip(found, weights, strict=True) if weight == 0)
    for activity, seconds in whole.seconds.items():
        assert sum(part.seconds[activity] for part in parts) == pytest.approx(seconds)
    for name in LATEST:
        assert {str(getattr(part, name)) for part in parts} == {str(getattr(whole, name))}
    assert split(whole, weights[:1] if weights[0] else [1]) == [whole]


def test_ratios_are_those_of_the_figures() -> None:
    """Padding, speed, busy share and share of the peak are given where they are known."""
    account = Account(
        real_tokens=900,
        padded_tokens=1000,
        flops=6e9,
        peak_flops_per_second=4e9,
        seconds={"forward": 2.0, "queue": 0.5, "tokenise": 9.0},
        parity=Parity(texts=8, reference_least=0.5),
    )
    told = describe(account)
    assert told["padding_ratio"] == 0.1
    assert told["tokens_per_second"] == 450
    assert told["busy_ratio"] == 0.8
    assert told["peak_ratio"] == 0.75
    assert told["parity"]["reference_least"] == 0.5
    assert "peak_ratio" not in describe(Account(seconds={"forward": 1.0}))
    assert describe(Account())["parity"] is None
