"""The devices a worker can be pinned to, found before CUDA or torch is loaded.

NVIDIA's GPUs are found through NVML, which sees every physical GPU whatever CUDA_VISIBLE_DEVICES
says and makes no CUDA context. NVML is opened for each question and always closed again. Every
function that asks it takes the NVML module (`pynvml`) as an argument; None imports it. On a host
without NVML, those of other makers are found through torch, by `embedfarm.workers.accelerators`.
"""

import importlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, Final, Literal, TypeAlias, get_args
from urllib.parse import SplitResult, urlsplit

import psutil

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.workers import accelerators
from embedfarm.workers.cores import available_cores, cpu_name, cpu_workers_default, share_cores

PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
PCI_LENGTH: Final = len("0000:65:00.0")  # of an address there; NVML's have more zeros in front
Kind: TypeAlias = Literal["cpu", "cuda", "rocm", "xpu", "mps", "endpoint"]


class DeviceError(EmbedfarmError, ValueError):
    """Raised when there is no such device, with a list of what there is, or when NVML fails."""

    exit_status = 2


@dataclass(frozen=True)
class Device:
    """A device to which one worker process is pinned, or several devices that work as one.

    Attributes:
        kind: "cpu"; "cuda" for a GPU of NVIDIA, "rocm" of AMD, "xpu" of Intel, "mps" of Apple; or
            "endpoint" for a server that embeds.
        label: "cpu-0", "cuda-0" or "endpoint-HOST-PORT"; the number of a GPU is its NVML index (PCI
            order), or torch's. A group has the numbers of all its devices, such as "cuda-0-1".
        uuid: NVML's UUID of a GPU, "" for another device; those of a group with commas between.
        name: Product name.
        cores: The worker's share of the available cores; its thread pools get this size, those of
            a group's processes equal parts of it.
        memory_total_bytes: Memory of the GPUs, or of the host; 0 where NVML cannot tell.
        url: URL of the server that embeds, "" for another device.
        ranks: Number of devices, each of which has a process of its own; 1 for a single one.
        pci: PCI address of a GPU, such as "0000:65:00.0"; "" where it is not known.
        node: NUMA node of a GPU, -1 where it is not known, or there is only one.
    """

    kind: Kind
    label: str
    uuid: str
    name: str
    cores: tuple[int, ...]
    memory_total_bytes: int
    url: str = ""
    ranks: int = 1
    pci: str = ""
    node: int = -1

    @property
    def torch_device(self) -> str:
        """The name that torch has for the device in a process that is pinned to it."""
        if self.kind in {"cpu", "endpoint"}:
            return "cpu"
        return "cuda:0" if self.kind == "rocm" else f"{self.kind}:0"

    @property
    def product(self) -> str:
        """Name that devices share that can do the same: product and memory."""
        if self.kind == "endpoint":
            return self.label
        return f"{self.name}, {self.memory_total_bytes >> 30} GiB"

    def environment(self) -> dict[str, str]:
        """Return the variables that pin a process; set them before it loads CUDA or torch."""
        threads = str(max(1, len(self.cores) // self.ranks))
        number = self.label.rpartition("-")[2]
        visible = {
            "rocm": {"CUDA_VISIBLE_DEVICES": number, "HIP_VISIBLE_DEVICES": number},
            "xpu": {"ZE_AFFINITY_MASK": number},
        }
        return {
            "EMBEDFARM_ENDPOINT_URL": self.url,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": self.uuid,
            **visible.get(self.kind, {}),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # The tokenizer's pool would otherwise take every core of the host.
            "RAYON_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "true",
        }


@dataclass(frozen=True)
class DeviceReport:
    """What NVML, or else torch, says about this host.

    Attributes:
        gpus: Every GPU, in NVML's or torch's order, each with its share of the cores.
        facts: Metrics of each GPU by its label.
        reason: Why there are no GPUs, "" when there are some.
        broken: Whether NVML is there but failed, such as after half a driver update.
    """

    gpus: tuple[Device, ...]
    facts: dict[str, dict[str, float]]
    reason: str = ""
    broken: bool = False


def discover(selection: str, cpu_workers: int = 0, nvml: ModuleType | None = None) -> list[Device]:
    """Find the devices that `--devices` names, one per worker to start.

    Args:
        selection: "all" (every GPU, or the CPU workers on a host without any), "cpu", or GPU
            indices, UUIDs and labels with commas between them; one named twice counts once. Devices
            with "+" between them, such as "0+1,2+3" or "cpu+cpu", are one worker.
        cpu_workers: Number of CPU workers, 0 for `cpu_workers_default`.
        nvml: The NVML module.

    Raises:
        DeviceError: There is no such device, or "all" is selected on a host whose NVML is broken:
            going on without its GPUs in silence would cost hours.
    """
    if selection == "cpu":
        return _cpu_devices(cpu_workers)
    groups = [[name.strip() for name in group.split("+")] for group in selection.split(",")]
    if all(name == "cpu" for group in groups for name in group):
        members = iter(_cpu_devices(sum(map(len, groups))))
        return [join([next(members) for _ in group]) for group in groups]
    report = describe_devices(nvml)
    if selection != "all":
        return _pick(report, groups)
    if report.broken:
        raise DeviceError(f"NVML failed: {report.reason}; --devices cpu goes on without GPUs")
    return list(report.gpus) or _cpu_devices(cpu_workers)


def endpoints(urls: Sequence[str]) -> list[Device]:
    """Return a device for each server that embeds, one per worker to start.

    Args:
        urls: What stands before `/embeddings` on each of them.

    Raises:
        DeviceError: A URL is none, or two of them have one host and port.
    """
    total = psutil.virtual_memory().total
    found: dict[str, Device] = {}
    for url in urls:
        parts = _split(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        label = f"endpoint-{re.sub(r'[^a-z0-9.]+', '-', parts.hostname or '')}-{port}"
        if label in found:
            raise DeviceError(f"two servers at {parts.hostname}, port {port}: give one of them")
        found[label] = Device("endpoint", label, "", cpu_name(), (), total, url)
    return _share_cores(list(found.values()))


def _split(url: str) -> SplitResult:
    """Take apart the URL of a server.

    Raises:
        DeviceError: It is none, or not one of HTTP.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise DeviceError(f"{url!r} is no URL of a server, such as http://host:8080/v1")
    return parts


def describe_devices(nvml: ModuleType | None = None) -> DeviceReport:
    """Describe the GPUs of this host, or the reason why there are none."""
    nvml = nvml or _load_nvml()
    try:
        with _session(nvml):
            found = dict(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        absence = "" if found else "NVML reports no devices"
    except nvml.NVMLError as error:
        if error.value not in _absences(nvml):
            return DeviceReport((), {}, str(error), broken=True)
        found, absence = {}, str(error)
    try:
        found = found or dict(map(_of_torch, accelerators.find()))
    except accelerators.AcceleratorError as error:
        return DeviceReport((), {}, str(error), broken=True)
    gpus = tuple(_share_cores(list(found)))
    readings = {gpu.label: reading for gpu, reading in found.items()}
    return DeviceReport(gpus, readings, "" if gpus else absence)


def facts(device: Device, nvml: ModuleType | None = None) -> dict[str, float]:
    """Measure a device for a heartbeat; a metric that it does not support is left out.

    Returns:
        For a GPU memory_used_bytes, memory_total_bytes, utilization_ratio (0 to 1),
        temperature_celsius and power_watts, as far as they can be read; for a worker without GPU
        rss_bytes of the calling process
        and memory_total_bytes of the host. Those of a group are sums, of temperatures the highest
        and of utilizations the mean.

    Raises:
        DeviceError: NVML failed, or the GPU is lost.
    """
    if device.kind in get_args(accelerators.Kind):
        try:
            return accelerators.measure(accelerators.load_torch())
        except accelerators.AcceleratorError as error:
            raise DeviceError(f"{device.label}: {error}") from error
    if device.kind != "cuda":
        return {
            "rss_bytes": float(sum(map(_rss_bytes, _processes(device)))),
            "memory_total_bytes": float(device.memory_total_bytes),
        }
    nvml = nvml or _load_nvml()
    try:
        with _session(nvml):
            handles = map(nvml.nvmlDeviceGetHandleByUUID, device.uuid.split(","))
            return _summarise([_read_metrics(nvml, handle) for handle in handles])
    except nvml.NVMLError as error:
        raise DeviceError(f"{device.label} ({device.uuid}): {error}") from error


def pinned(label: str, nvml: ModuleType | None = None) -> Device:
    """Return the device that this process was pinned to, as its `environment` says.

    Raises:
        accelerators.AcceleratorError: torch does not find it.
    """
    kind: Kind = next((kind for kind in get_args(Kind) if label.startswith(f"{kind}-")), "cpu")
    uuids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    ranks = {"cuda": len(uuids), "cpu": max(1, label.count("-"))}.get(kind, 1)
    cores = available_cores()[: ranks * int(os.environ.get("OMP_NUM_THREADS", "1"))]
    if kind in get_args(accelerators.Kind):
        first, *_ = accelerators.look(accelerators.load_torch())
        return replace(_of_torch(first)[0], label=label, cores=cores)
    if kind != "cuda":
        one = Device(kind, label, "", cpu_name(), (), psutil.virtual_memory().total)
        return replace(join([one] * ranks), label=label, cores=cores)
    listed = {gpu.uuid: gpu for gpu in describe_devices(nvml).gpus}
    unlisted = Device("cuda", label, "", label, (), 0)  # such as a slice of a GPU
    found = [replace(listed.get(uuid, unlisted), uuid=uuid) for uuid in uuids]
    return replace(join(found), label=label, cores=cores)


def _share_cores(devices: Sequence[Device]) -> list[Device]:
    """Return the devices, each with its share of the available cores."""
    shares = share_cores([device.node for device in devices])
    return [replace(device, cores=share) for device, share in zip(devices, shares, strict=True)]


def _cpu_devices(workers: int) -> list[Device]:
    """Return the devices of CPU workers that split the available cores."""
    count = workers or cpu_workers_default(len(available_cores()))
    name = cpu_name()
    total = psutil.virtual_memory().total
    devices = [Device("cpu", f"cpu-{i}", "", name, (), total) for i in range(count)]
    return _share_cores(devices)


def join(members: Sequence[Device]) -> Device:
    """Return the device that several are together; one is itself."""
    first, *others = members
    if not others:
        return first
    names = Counter(member.name for member in members)
    memory = sum(member.memory_total_bytes for member in members)
    return Device(
        kind=first.kind,
        label="-".join([first.label, *(each.label.rpartition("-")[2] for each in others)]),
        uuid=",".join(filter(None, (member.uuid for member in members))),
        name=" + ".join(f"{count} x {name}" for name, count in names.items()),
        cores=tuple(dict.fromkeys(chain.from_iterable(member.cores for member in members))),
        memory_total_bytes=memory if first.kind == "cuda" else first.memory_total_bytes,
        ranks=len(members),
    )


def _pick(report: DeviceReport, groups: Sequence[Sequence[str]]) -> list[Device]:
    """Return the GPUs, or groups of them, that are named, each once and with its share of cores.

    Raises:
        DeviceError: There is no such device, or one would be in two workers.
    """
    by_name = {gpu.uuid: gpu for gpu in report.gpus if gpu.uuid}
    for index, gpu in enumerate(report.gpus):
        by_name |= {str(index): gpu, gpu.label: gpu}
    unknown = [name for group in groups for name in group if name not in by_name]
    if unknown:
        there = [f"{i} ({gpu.uuid or gpu.label}, {gpu.name})" for i, gpu in enumerate(report.gpus)]
        reason = f" (no GPUs: {report.reason})" if report.reason else ""
        raise DeviceError(
            f"no such device: {', '.join(map(repr, unknown))}; "
            f"there is: {', '.join([*there, 'cpu'])}{reason}"
        )
    picked = dict.fromkeys(tuple(by_name[name] for name in group) for group in groups)
    members = list(chain.from_iterable(picked))
    chosen = list(dict.fromkeys(members))
    if len(chosen) < len(members):
        raise DeviceError("a device is part of one worker only, and once")
    if any(gpu.kind != "cuda" for group in picked if len(group) > 1 for gpu in group):
        raise DeviceError("groups are of NVIDIA's GPUs, or of CPU workers")
    shared = dict(zip(chosen, _share_cores(chosen), strict=True))
    return [join([shared[member] for member in group]) for group in picked]


def _load_nvml() -> ModuleType:
    """Import the NVML bindings, for which a host that asks for no GPU does not pay."""
    return importlib.import_module("pynvml")


@contextmanager
def _session(nvml: ModuleType) -> Iterator[None]:
    """Initialise NVML for the body, and shut it down whatever happens."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _absences(nvml: ModuleType) -> set[int]:
    """Return NVML's errors that mean that the host has no GPU to use."""
    return {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        nvml.NVML_ERROR_GPU_NOT_FOUND,
    }


def _gpu(nvml: ModuleType, index: int) -> tuple[Device, dict[str, float]]:
    """Return one GPU, still without cores, and its metrics."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    metrics = _read_metrics(nvml, handle)
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    total = int(metrics.get("memory_total_bytes", 0))
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    pci = (bus.decode() if isinstance(bus, bytes) else bus)[-PCI_LENGTH:].lower()
    one = Device("cuda", f"cuda-{index}", uuid, name, (), total, pci=pci, node=numa_node(pci))
    return one, metrics


def _of_torch(found: accelerators.Accelerator) -> tuple[Device, dict[str, float]]:
    """Return a GPU that torch has found, still without cores, and its metrics."""
    label, node = f"{found.kind}-{found.number}", numa_node(found.pci)
    total, pci = found.memory_total_bytes, found.pci
    one = Device(found.kind, label, "", found.name, (), total, pci=pci, node=node)
    return one, {"memory_total_bytes": float(total)}


def numa_node(pci: str) -> int:
    """Return the NUMA node of a PCI device by its address; -1 for none, or where none is known."""
    file = PCI_DEVICES / pci / "numa_node"
    return int(file.read_text()) if pci and file.exists() else -1


def _processes(device: Device) -> list[psutil.Process]:
    """Return this process, and those of a group's other ranks."""
    own = psutil.Process()
    return [own, *own.children()] if device.ranks > 1 else [own]


def _rss_bytes(process: psutil.Process) -> int:
    """Return the memory of a process, 0 if it has just ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _summarise(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of several GPUs as those of one, as far as all have them."""
    together: dict[str, Callable[[Sequence[float]], float]] = {
        "temperature_celsius": max,
        "utilization_ratio": fmean,
    }
    common = [name for name in metrics[0] if all(name in each for each in metrics)]
    return {name: together.get(name, sum)([each[name] for each in metrics]) for name in common}


def _read_metrics(nvml: ModuleType, handle: Any) -> dict[str, float]:  # noqa: ANN401 -- NVML's handles are opaque
    """Read the metrics that the GPU supports."""
    readers: dict[str, Callable[[], float]] = {
        "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "utilization_ratio": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(
            handle, nvml.NVML_TEMPERATURE_GPU
        ),
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }
    metrics = {}
    for name, read in readers.items():
        try:
            metrics[name] = float(read())
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                raise
    return metrics
