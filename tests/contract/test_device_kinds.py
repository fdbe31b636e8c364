"""Tests of the names under which workers are counted."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.device_kinds import kind_of, name_kind, price_of
from embedfarm.contract.settings.advice_limits import KIND_PATTERN
from tests.contract.little_job import heartbeat


@pytest.mark.parametrize(
    ("device", "product", "kind"),
    [
        ("cpu-0", "AMD EPYC 7543, 251 GiB", "cpu"),
        ("cpu-0-1", "2 x AMD EPYC 7543, 251 GiB", "cpu"),
        ("endpoint-tei-8080", "endpoint-tei-8080", "endpoint"),
        ("cuda-0", "NVIDIA L4, 22 GiB", "NVIDIA L4, 22 GiB"),
        ("cuda-0-1", "2 x NVIDIA L4, 44 GiB", "2 x NVIDIA L4, 44 GiB"),
        ("mps-0", "???", "gpu"),
        ("rocm-0", "Radeon™ 9{0}", "Radeon 9 0"),
    ],
)
def test_kinds_of_devices(device: str, product: str, kind: str) -> None:
    """A GPU is of its product's kind, and all CPUs and endpoints are of one."""
    assert name_kind(device, product) == kind


@given(st.text(), st.text())
def test_a_kind_is_a_name(device: str, product: str) -> None:
    """Any device has a kind whose name settings would take."""
    assert re.fullmatch(KIND_PATTERN, name_kind(device, product))


def test_what_a_heartbeat_says_counts() -> None:
    """A worker says its kind; one of an older version has that of its device."""
    beat = heartbeat("one")
    assert kind_of(beat) == "cpu"
    assert kind_of(msgspec.structs.replace(beat, device="cuda-0")) == "gpu"
    said = msgspec.structs.replace(beat, kind="spot", devices=2, device_cost_per_hour=1.5)
    assert (kind_of(said), price_of(said)) == ("spot", 3.0)
