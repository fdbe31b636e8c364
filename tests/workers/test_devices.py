"""Tests of device discovery against a fake NVML, the only part that needs a GPU's driver."""

import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import msgspec
import psutil
import pynvml
import pytest

from embedfarm.workers import accelerators, cores, devices
from embedfarm.workers.accelerators import Accelerator
from embedfarm.workers.devices import (
    DeviceError,
    describe_devices,
    discover,
    endpoints,
    facts,
    pinned,
)

GIB: Final = 2**30
NAMES: Final = ("Alpha 80", "Beta 24", "Gamma 8")


class FakeNvml(ModuleType):
    """NVML with `gpus` GPUs; `errors` maps a function's name to the NVML error it raises."""

    def __init__(self, gpus: int = 3, errors: dict[str, int] | None = None) -> None:
        super().__init__("pynvml")
        self.opened = 0
        self.errors = errors or {}
        self.NVMLError = pynvml.NVMLError
        self.NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
        for name in ("LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "GPU_NOT_FOUND", "NOT_SUPPORTED"):
            setattr(self, f"NVML_ERROR_{name}", getattr(pynvml, f"NVML_ERROR_{name}"))
        memory = SimpleNamespace(total=80 * GIB, used=20 * GIB, free=60 * GIB)
        answers: dict[str, Any] = {
            "Count": lambda: gpus,
            "HandleByIndex": lambda index: index,
            "HandleByUUID": lambda uuid: int(uuid.removeprefix("GPU-")),
            "UUID": lambda handle: f"GPU-{handle}",
            "Name": lambda handle: NAMES[handle],
            "PciInfo": lambda handle: SimpleNamespace(busId=f"00000000:{handle}A:00.0"),
            "MemoryInfo": lambda _: memory,
            "UtilizationRates": lambda _: SimpleNamespace(gpu=50, memory=10),
            "Temperature": lambda _handle, _sensor: 61,
            "PowerUsage": lambda _: 250_000,
        }
        for name, answer in answers.items():
            setattr(self, f"nvmlDeviceGet{name}", self._guard(name, answer))
        self.nvmlInit = self._guard("Init", lambda: self._count(1))
        self.nvmlShutdown = lambda: self._count(-1)

    def _count(self, step: int) -> None:
        self.opened += step

    def _guard(self, name: str, answer: Any) -> Any:  # noqa: ANN401 -- any NVML function
        def call(*arguments: object) -> object:
            if name != "Init":
                assert self.opened == 1, f"{name} outside of a session"
            if name in self.errors:
                raise pynvml.NVMLError(self.errors[name])
            return answer(*arguments)

        return call


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use the cores 10 to 17 of its host."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 18)), raising=False)
    monkeypatch.setattr(cores, "cgroup_quota", lambda _root, _membership: math.inf)


def uuids(selection: str, nvml: ModuleType) -> list[str]:
    """UUIDs of the devices that a selection finds."""
    return [device.uuid for device in discover(selection, nvml=nvml)]


def test_all_is_every_gpu_in_order() -> None:
    """`all` finds each GPU of the host once, labelled by NVML index, and no CPU worker."""
    found = discover("all", cpu_workers=4, nvml=FakeNvml())
    assert [(d.kind, d.label, d.uuid, d.name) for d in found] == [
        ("cuda", f"cuda-{i}", f"GPU-{i}", name) for i, name in enumerate(NAMES)
    ]
    assert {d.memory_total_bytes for d in found} == {80 * GIB}


@pytest.mark.parametrize(
    ("selection", "expected"),
    [("2,0", [2, 0]), ("GPU-1", [1]), ("1, GPU-2", [1, 2]), ("0,GPU-0,0", [0])],
)
def test_indices_and_uuids_select(selection: str, expected: list[int]) -> None:
    """Indices and UUIDs may be mixed, keep their order, and name a GPU once."""
    assert uuids(selection, FakeNvml()) == [f"GPU-{i}" for i in expected]


@pytest.mark.parametrize("selection", ["3", "GPU-9", "0,x", "", "gpu"])
def test_unknown_device_lists_what_there_is(selection: str) -> None:
    """An unknown index or UUID is an error that lists every device by index, UUID and name."""
    with pytest.raises(DeviceError, match=r"no such device.*1 \(GPU-1, Beta 24\).*cpu"):
        discover(selection, nvml=FakeNvml())


def test_unknown_device_says_why_there_is_no_gpu() -> None:
    """The error for an unknown GPU on a host without a driver gives NVML's reason."""
    nvml = FakeNvml(errors={"Init": pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
    with pytest.raises(DeviceError, match=r"'0'; there is: cpu \(no GPUs: Driver Not Loaded\)"):
        discover("0", nvml=nvml)


@pytest.mark.parametrize(
    "nvml",
    [
        FakeNvml(gpus=0),
        FakeNvml(errors={"Init": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}),
        FakeNvml(errors={"Init": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}),
    ],
)
def test_all_without_gpus_is_the_cpu_workers(nvml: ModuleType) -> None:
    """`all` falls back to CPU workers when there is no GPU, and the report says why."""
    assert [d.label for d in discover("all", cpu_workers=2, nvml=nvml)] == ["cpu-0", "cpu-1"]
    report = describe_devices(nvml)
    assert report.gpus == ()
    assert report.reason
    assert not report.broken


def test_broken_nvml_is_not_mistaken_for_no_gpu() -> None:
    """A host whose driver and library disagree does not start CPU workers in silence."""
    nvml = FakeNvml(errors={"Init": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
    with pytest.raises(DeviceError, match="--devices cpu goes on"):
        discover("all", nvml=nvml)
    assert describe_devices(nvml).broken
    assert discover("cpu", cpu_workers=1, nvml=nvml)[0].kind == "cpu"


def test_facts_of_a_gpu() -> None:
    """Facts come in bytes, a ratio, degrees Celsius and watts."""
    nvml = FakeNvml()
    assert facts(discover("1", nvml=nvml)[0], nvml) == {
        "memory_used_bytes": 20.0 * GIB,
        "memory_total_bytes": 80.0 * GIB,
        "utilization_ratio": 0.5,
        "temperature_celsius": 61.0,
        "power_watts": 250.0,
    }


def test_unsupported_metric_is_left_out() -> None:
    """A GPU without a power sensor or memory counter has every other fact, and is still found."""
    unsupported = pynvml.NVML_ERROR_NOT_SUPPORTED
    nvml = FakeNvml(errors={"PowerUsage": unsupported, "MemoryInfo": unsupported})
    report = describe_devices(nvml)
    assert len(report.gpus) == 3
    assert report.gpus[0].memory_total_bytes == 0
    assert report.facts["cuda-0"] == {"utilization_ratio": 0.5, "temperature_celsius": 61.0}


def test_lost_gpu_is_an_error_that_names_it() -> None:
    """An NVML error such as a lost GPU names the device, and NVML is closed all the same."""
    device = discover("0", nvml=FakeNvml())[0]
    lost = FakeNvml(errors={"Temperature": pynvml.NVML_ERROR_GPU_IS_LOST})
    with pytest.raises(DeviceError, match=r"cuda-0 \(GPU-0\): GPU is lost"):
        facts(device, lost)
    assert lost.opened == 0


def test_nvml_is_closed_again() -> None:
    """Each question to NVML ends with a shutdown."""
    nvml = FakeNvml()
    facts(discover("all", nvml=nvml)[0], nvml)
    assert nvml.opened == 0


def test_facts_of_a_cpu_worker() -> None:
    """A CPU worker reports this process's resident memory and the host's total."""
    reading = facts(discover("cpu", cpu_workers=1)[0])
    assert 0 < reading["rss_bytes"] < reading["memory_total_bytes"]
    assert reading["memory_total_bytes"] == psutil.virtual_memory().total


@pytest.mark.usefixtures("eight_cores")
def test_cpu_workers_split_the_cores() -> None:
    """Three workers on eight cores get contiguous, disjoint groups of what the process may use."""
    assert [d.cores for d in discover("cpu", cpu_workers=3)] == [
        (10, 11),
        (12, 13, 14),
        (15, 16, 17),
    ]
    assert len(discover("cpu")) == 2


@pytest.mark.usefixtures("eight_cores")
def test_environment_pins_before_cuda_starts() -> None:
    """A GPU worker sees its GPU alone, a CPU worker none; thread pools get the worker's cores."""
    gpu = discover("1", nvml=FakeNvml())[0].environment()
    cpu = discover("cpu", cpu_workers=4)[0].environment()
    assert gpu == {
        "EMBEDFARM_ENDPOINT_URL": "",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "OMP_NUM_THREADS": "8",
        "MKL_NUM_THREADS": "8",
        "RAYON_NUM_THREADS": "8",
        "TOKENIZERS_PARALLELISM": "true",
    }
    assert (cpu["CUDA_VISIBLE_DEVICES"], cpu["OMP_NUM_THREADS"]) == ("", "2")


@pytest.mark.usefixtures("eight_cores")
def test_groups_of_gpus_are_devices() -> None:
    """Devices with + between are one: its memory is that of all, and its processes split cores."""
    group, single = discover("2+GPU-0,1", nvml=FakeNvml())
    assert (group.label, group.ranks, group.name) == ("cuda-2-0", 2, "1 x Gamma 8 + 1 x Alpha 80")
    assert (group.uuid, group.memory_total_bytes) == ("GPU-2,GPU-0", 160 * GIB)
    assert (group.cores, single.cores) == ((10, 11, 12, 13, 14), (15, 16, 17))
    assert group.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-0"
    assert group.environment()["OMP_NUM_THREADS"] == "2"
    assert (single.label, single.ranks) == ("cuda-1", 1)


@pytest.mark.usefixtures("eight_cores")
def test_groups_of_cpu_workers_split_the_cores() -> None:
    """CPU workers with + between are groups, whose processes have equal parts of the cores."""
    first, second = discover("cpu+cpu,cpu+cpu", cpu_workers=1)
    assert (first.label, second.label) == ("cpu-0-1", "cpu-2-3")
    assert (first.cores, second.cores) == ((10, 11, 12, 13), (14, 15, 16, 17))
    assert first.name == f"2 x {cores.cpu_name()}"
    assert first.memory_total_bytes == psutil.virtual_memory().total
    assert first.environment()["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("selection", ["0+0", "0+1,1+2", "0+1,1", "0+1,1+0"])
def test_a_device_is_in_one_worker_only(selection: str) -> None:
    """A device that two workers would share, or one would have twice, is refused."""
    with pytest.raises(DeviceError, match="one worker only"):
        discover(selection, nvml=FakeNvml())


@pytest.mark.parametrize("selection", ["0+x", "cpu+0", "0+"])
def test_unknown_devices_of_groups_are_refused(selection: str) -> None:
    """A group of something unknown, or of GPUs and CPUs, lists what there is."""
    with pytest.raises(DeviceError, match=r"no such device.*1 \(GPU-1, Beta 24\).*cpu"):
        discover(selection, nvml=FakeNvml())


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize("selection", ["0+1,2", "cpu+cpu", "cpu+cpu+cpu,cpu"])
def test_a_process_knows_what_it_is_pinned_to(
    selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first device of a selection is known again by its label and its environment."""
    chosen = discover(selection, nvml=FakeNvml())[0]
    for name, value in chosen.environment().items():
        monkeypatch.setenv(name, value)
    found = devices.pinned(chosen.label, FakeNvml())
    assert (found.product, found.ranks, found.uuid) == (chosen.product, chosen.ranks, chosen.uuid)
    assert found.label == chosen.label
    assert len(found.cores) == len(chosen.cores) // chosen.ranks * chosen.ranks


def test_facts_of_a_group() -> None:
    """Facts of several GPUs are sums, but a mean of utilizations and the highest temperature."""
    nvml = FakeNvml()
    assert facts(discover("0+1", nvml=nvml)[0], nvml) == {
        "memory_used_bytes": 40.0 * GIB,
        "memory_total_bytes": 160.0 * GIB,
        "utilization_ratio": 0.5,
        "temperature_celsius": 61.0,
        "power_watts": 500.0,
    }


def test_facts_of_a_cpu_group_count_its_processes() -> None:
    """Memory of a CPU group is that of this process and of those that it has started."""
    group = discover("cpu+cpu")[0]
    before = facts(group)["rss_bytes"]
    command = [sys.executable, "-c", "held = bytearray(200 << 20); print(); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as rank:  # type: ignore[call-overload] # pipes by name
        rank.stdout.readline()
        assert facts(group)["rss_bytes"] - before > 190 << 20
        rank.communicate(b"\n", timeout=60)


@pytest.mark.usefixtures("eight_cores")
def test_gpus_have_the_cores_of_their_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is known by its PCI address, and where each node has one, has cores of its node."""
    monkeypatch.setattr(devices, "PCI_DEVICES", tmp_path)
    for number, node in ((0, 1), (1, 0), (2, 1)):
        (tmp_path / f"0000:{number}a:00.0").mkdir()
        (tmp_path / f"0000:{number}a:00.0" / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr(cores, "core_nodes", lambda: {core: core % 2 for core in range(20)})
    found = discover("all", nvml=FakeNvml())
    assert [(gpu.pci, gpu.node) for gpu in found] == [
        ("0000:0a:00.0", 1),
        ("0000:1a:00.0", 0),
        ("0000:2a:00.0", 1),
    ]
    assert [gpu.cores for gpu in found] == [(11, 13), (10, 12, 14, 16), (15, 17)]
    assert discover("0", nvml=FakeNvml())[0].cores == (10, 12, 14, 16, 11, 13, 15, 17)


# GPUs of other makers.

WITHOUT_NVML: Final = {"Init": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}
OTHERS: Final = [
    Accelerator("rocm", 0, "Delta 192", 192 * GIB, "0000:c1:00.0"),
    Accelerator("xpu", 1, "Epsilon 48", 48 * GIB),
    Accelerator("mps", 0, "Zeta", 36 * GIB),
]


@pytest.mark.parametrize(
    ("found", "torch_device", "pins"),
    [
        (OTHERS[0], "cuda:0", {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}),
        (OTHERS[1], "xpu:0", {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "1"}),
        (OTHERS[2], "mps:0", {"CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_gpus_of_other_makers_are_devices(
    found: Accelerator,
    torch_device: str,
    pins: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs that torch finds are devices on a host without NVML, each with a worker of its own."""
    monkeypatch.setattr(accelerators, "find", lambda: [found])
    (gpu,) = discover("all", nvml=FakeNvml(errors=WITHOUT_NVML))
    label = f"{found.kind}-{found.number}"
    assert (gpu.label, gpu.product) == (label, f"{found.name}, {gpu.memory_total_bytes >> 30} GiB")
    assert gpu.torch_device == torch_device
    assert gpu.environment().items() >= pins.items()
    for name in ("0", label):
        assert discover(name, nvml=FakeNvml(errors=WITHOUT_NVML)) == [gpu]
    with pytest.raises(DeviceError, match=rf"there is: 0 \({label}, {found.name}\), cpu"):
        discover("7", nvml=FakeNvml(errors=WITHOUT_NVML))
    monkeypatch.setattr(accelerators, "look", lambda _torch: [found])
    assert pinned(label).product == gpu.product
    assert pinned(label).kind == found.kind


def test_groups_are_of_gpus_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of other makers work one by one: groups of them were never tried."""
    pair = [OTHERS[0], msgspec.structs.replace(OTHERS[0], number=1)]
    monkeypatch.setattr(accelerators, "find", lambda: pair)
    with pytest.raises(DeviceError, match="groups are of NVIDIA's GPUs"):
        discover("0+1", nvml=FakeNvml(errors=WITHOUT_NVML))


def test_torch_that_fails_is_not_mistaken_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose torch was built for a GPU and cannot be asked starts no CPU workers."""

    def fail() -> list[Accelerator]:
        raise accelerators.AcceleratorError("no libamdhip64.so")

    monkeypatch.setattr(accelerators, "find", fail)
    with pytest.raises(DeviceError, match=r"libamdhip64.so; --devices cpu goes on"):
        discover("all", nvml=FakeNvml(errors=WITHOUT_NVML))


def test_discovery_loads_neither_torch_nor_cuda() -> None:
    """Asking this host for all its devices, through the real NVML bindings, never imports torch."""
    program = (
        "import sys; from embedfarm.workers.devices import describe_devices, discover;"
        "discover('cpu'); describe_devices(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# Servers in place of devices.


def test_endpoints_are_devices() -> None:
    """Each server is a device with a name of its own, whose process knows its URL."""
    one, two = endpoints(["http://gpu_1:8080/v1", "https://[::1]/v1"])
    assert [one.label, two.label] == ["endpoint-gpu-1-8080", "endpoint--1-443"]
    assert one.environment()["EMBEDFARM_ENDPOINT_URL"] == "http://gpu_1:8080/v1"
    assert one.environment()["CUDA_VISIBLE_DEVICES"] == ""
    assert one.product != two.product
    assert pinned(one.label).product == one.product
    assert facts(pinned(one.label))["rss_bytes"] > 0


def test_devices_have_no_endpoint() -> None:
    """A worker with a device takes none from its environment."""
    (device,) = discover("cpu", 1)
    assert device.environment()["EMBEDFARM_ENDPOINT_URL"] == ""


@pytest.mark.parametrize(
    "url", ["gpu1:8080", "redis://gpu1", "http://", "http://gpu1:x", "http://a:0"]
)
def test_what_is_no_endpoint(url: str) -> None:
    """A URL that is none of HTTP is refused by name."""
    with pytest.raises(DeviceError, match="is no URL of a server"):
        endpoints([url])


def test_one_worker_for_one_endpoint() -> None:
    """Two workers of one name would end each other."""
    with pytest.raises(DeviceError, match="two servers at gpu1, port 80"):
        endpoints(["http://gpu1/a", "http://gpu1:80/b"])
