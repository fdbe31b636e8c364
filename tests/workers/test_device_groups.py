"""Tests of groups of GPUs that are formed for a model; the GPUs are no real ones."""

from pathlib import Path

import pytest

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.device_groups import choose_devices, form_groups
from embedfarm.workers.devices import Device
from embedfarm.workers.engines.memory import predict_bytes
from tests.workers.test_devices import FakeNvml
from tests.workers.tiny_models import build

GIB = 2**30


def gpus(count: int, memory_gib: int = 80, name: str = "Alpha", first: int = 0) -> list[Device]:
    """Single GPUs that are alike."""
    indices = range(first, first + count)
    return [
        Device("cuda", f"cuda-{each}", f"GPU-{each}", name, (each,), memory_gib * GIB)
        for each in indices
    ]


def labels(devices: list[Device], weights_gib: int) -> list[str]:
    """Labels of the devices and groups that are chosen for a model."""
    return [device.label for device in form_groups(devices, weights_gib * GIB)]


@pytest.mark.parametrize(
    ("weights_gib", "expected"),
    [
        (0, ["cuda-0", "cuda-1", "cuda-2", "cuda-3", "cuda-4"]),
        (64, ["cuda-0", "cuda-1", "cuda-2", "cuda-3", "cuda-4"]),
        (65, ["cuda-0-1", "cuda-2-3", "cuda-4"]),
        (128, ["cuda-0-1", "cuda-2-3", "cuda-4"]),
        (129, ["cuda-0-1-2-3", "cuda-4"]),
        (257, ["cuda-0", "cuda-1", "cuda-2", "cuda-3", "cuda-4"]),
    ],
)
def test_groups_are_as_small_as_a_model_allows(weights_gib: int, expected: list[str]) -> None:
    """Four fifths of each GPU's 80 GiB are for weights; GPUs that cannot help stay single."""
    assert labels(gpus(5), weights_gib) == expected


def test_a_group_is_of_gpus_that_are_alike() -> None:
    """Large GPUs take a model alone for which small ones need each other."""
    mixed = [*gpus(1, 24, "Beta"), *gpus(2, 80, "Alpha", first=1), *gpus(1, 24, "Beta", first=3)]
    assert labels(mixed, 30) == ["cuda-0-3", "cuda-1", "cuda-2"]


def test_cpu_workers_stay_single() -> None:
    """Memory of a host is one, however many processes have a part of it."""
    workers = [Device("cpu", f"cpu-{each}", "", "a processor", (each,), GIB) for each in range(2)]
    assert labels(workers, 100) == ["cpu-0", "cpu-1"]


def test_wanted_models_are_the_pinned_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is pinned and here is looked at, and one that is not here is not waited for."""
    model = str(build("shared", tmp_path))
    nvml = FakeNvml()
    wanted = Settings(models_pinned=(model, "somebody/somewhere"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [each.label for each in choose_devices("auto", 0, wanted, nvml)] == [
        *("cuda-0", "cuda-1", "cuda-2")
    ]
    weights = predict_bytes(JobSpec(model=model), "cuda:0", wanted)
    assert weights
    share = 0.75 * weights / (80 * GIB)
    monkeypatch.setattr("embedfarm.workers.device_groups.WEIGHTS_SHARE", share)
    monkeypatch.setattr("tests.workers.test_devices.NAMES", ["Alpha"] * 3)
    chosen = choose_devices("auto", 0, wanted, nvml)
    assert [each.label for each in chosen] == ["cuda-0-1", "cuda-2"]
    assert len(choose_devices("0,1", 0, wanted, nvml)) == 2
