"""Tests of which actors are asked for, from described clusters."""

from collections import Counter

import pytest

from embedfarm.workers.placement import (
    CPUS,
    ActorPlace,
    FleetWish,
    Node,
    PlacementError,
    changes,
    cores_of,
    parse_kinds,
    places,
)

HEAD = Node("head", 0, 0)
CPU = Node("cpu", 16, 0)
GPU = Node("gpu", 32, 4)


def test_workers_follow_the_devices_of_a_cluster() -> None:
    """Each GPU has an actor, and a node without any has one on all of its CPUs."""
    found = places(FleetWish(), [HEAD, CPU, GPU])
    assert found == Counter({ActorPlace(16, 0, "cpu"): 1, ActorPlace(0, 1, "gpu"): 4})


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (FleetWish("gpu"), {ActorPlace(0, 1, "gpu"): 4}),
        (FleetWish("gpu", cpus=2), {ActorPlace(2, 1, "gpu"): 4}),
        (FleetWish("cpu"), {ActorPlace(16, 0, "cpu"): 1, ActorPlace(32, 0, "gpu"): 1}),
        (FleetWish("cpu", cpus=20), {ActorPlace(16, 0, "cpu"): 1, ActorPlace(20, 0, "gpu"): 1}),
        (FleetWish("gpu", workers=9), {ActorPlace(0, 1): 9}),
        (FleetWish("cpu", workers=2), {ActorPlace(CPUS, 0): 2}),
        (FleetWish("cpu", workers=2, cpus=8), {ActorPlace(8, 0): 2}),
    ],
)
def test_places_are_those_of_the_wish(wish: FleetWish, expected: dict[ActorPlace, int]) -> None:
    """A wish says which devices, and with a number the cluster chooses, and may have none yet."""
    assert places(wish, [HEAD, CPU, GPU]) == expected
    if wish.workers:
        assert places(wish, []) == expected


def test_what_cannot_be_said_of_a_cluster_is_refused() -> None:
    """A number of workers needs their kind, and no device of one host is meant."""
    with pytest.raises(PlacementError, match="give --devices gpu or --devices cpu"):
        FleetWish("all", workers=3)
    with pytest.raises(PlacementError, match="devices of one host"):
        parse_kinds("0,1")
    assert [parse_kinds(each) for each in ("all", "gpu", "cpu")] == ["all", "gpu", "cpu"]


def test_changes_are_what_is_missing_and_what_is_too_much() -> None:
    """The oldest of several actors at a place stay; a node that is gone wants none."""
    gpu, gone = ActorPlace(0, 1, "gpu"), ActorPlace(16, 0, "gone")
    held = {1: gpu, 2: gone, 3: gpu, 4: gpu}
    assert changes(Counter({gpu: 2, ActorPlace(4, 0): 1}), held) == ({ActorPlace(4, 0): 1}, [2, 4])
    assert changes(Counter(), {}) == ({}, [])


def test_a_worker_uses_its_share_of_the_cores() -> None:
    """What is asked for counts; a GPU's worker has its part of its node's CPUs otherwise."""
    assert cores_of(ActorPlace(6, 0, "cpu"), CPU) == 6
    assert cores_of(ActorPlace(0, 1), GPU) == 8
    assert cores_of(ActorPlace(3, 1), GPU) == 3
    assert cores_of(ActorPlace(0, 1), Node("bare", 0, 1)) == 0
