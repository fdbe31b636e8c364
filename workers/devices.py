"""The devices a worker can be pinned to, found before CUDA or torch is loaded.

GPUs are found through NVML, which sees every physical GPU whatever CUDA_VISIBLE_DEVICES says and
makes no CUDA context. NVML is opened for each question and always closed again. Every function
that asks it takes the NVML module (`pynvml`) as an argument; None imports it.
"""

import importlib
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, Final, Literal
from urllib.parse import SplitResult, urlsplit

import psutil

from embedfarm.contract.errors import EmbedfarmError

CPU_FACTS: Final = Path("/proc/cpuinfo")
CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP: Final = Path("/proc/self/cgroup")


class DeviceError(EmbedfarmError, ValueError):
    """Raised when there is no such device, with a list of what there is, or when NVML fails."""

    exit_status = 2


@dataclass(frozen=True)
class Device:
    """A device to which one worker process is pinned, or several devices that work as one.

    Attributes:
        kind: "cpu", "cuda", or "endpoint" for a server that embeds.
        label: "cpu-0", "cuda-0" or "endpoint-HOST-PORT"; the number of a GPU is its NVML index (PCI
            order). A group has the numbers of all its devices, such as "cuda-0-1".
        uuid: NVML's UUID of a GPU, "" for another device; those of a group with commas between.
        name: Product name.
        cores: The worker's share of the available cores; its thread pools get this size, those of
            a group's processes equal parts of it.
        memory_total_bytes: Memory of the GPUs, or of the host; 0 where NVML cannot tell.
        url: URL of the server that embeds, "" for another device.
        ranks: Number of devices, each of which has a process of its own; 1 for a single one.
    """

    kind: Literal["cpu", "cuda", "endpoint"]
    label: str
    uuid: str
    name: str
    cores: tuple[int, ...]
    memory_total_bytes: int
    url: str = ""
    ranks: int = 1

    @property
    def product(self) -> str:
        """Name that devices share that can do the same: product and memory."""
        if self.kind == "endpoint":
            return self.label
        return f"{self.name}, {self.memory_total_bytes >> 30} GiB"

    def environment(self) -> dict[str, str]:
        """Return the variables that pin a process; set them before it loads CUDA or torch."""
        threads = str(max(1, len(self.cores) // self.ranks))
        return {
            "EMBEDFARM_ENDPOINT_URL": self.url,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": self.uuid,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # The tokenizer's pool would otherwise take every core of the host.
            "RAYON_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "true",
        }


@dataclass(frozen=True)
class DeviceReport:
    """What NVML says about this host.

    Attributes:
        gpus: Every GPU, in NVML's order, each with its share of the cores.
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
            indices and UUIDs with commas between them; one named twice counts once. Devices with
            "+" between them, such as "0+1,2+3" or "cpu+cpu", are one worker.
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
    except nvml.NVMLError as error:
        return DeviceReport((), {}, str(error), broken=error.value not in _absences(nvml))
    gpus = tuple(_share_cores(list(found)))
    readings = {gpu.label: reading for gpu, reading in found.items()}
    return DeviceReport(gpus, readings, "" if gpus else "NVML reports no devices")


def facts(device: Device, nvml: ModuleType | None = None) -> dict[str, float]:
    """Measure a device for a heartbeat; a metric that it does not support is left out.

    Returns:
        For a GPU memory_used_bytes, memory_total_bytes, utilization_ratio (0 to 1),
        temperature_celsius and power_watts; for another worker rss_bytes of the calling process
        and memory_total_bytes of the host. Those of a group are sums, of temperatures the highest
        and of utilizations the mean.

    Raises:
        DeviceError: NVML failed, or the GPU is lost.
    """
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
    """Return the device that this process was pinned to, as its `environment` says."""
    uuids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    is_gpu, is_endpoint = label.startswith("cuda"), label.startswith("endpoint-")
    ranks = len(uuids) if is_gpu else max(1, 0 if is_endpoint else label.count("-"))
    cores = available_cores()[: ranks * int(os.environ.get("OMP_NUM_THREADS", "1"))]
    if not is_gpu:
        kind: Literal["cpu", "endpoint"] = "endpoint" if is_endpoint else "cpu"
        one = Device(kind, label, "", cpu_name(), (), psutil.virtual_memory().total)
        return replace(join([one] * ranks), label=label, cores=cores)
    listed = {gpu.uuid: gpu for gpu in describe_devices(nvml).gpus}
    unlisted = Device("cuda", label, "", label, (), 0)  # such as a slice of a GPU
    found = [replace(listed.get(uuid, unlisted), uuid=uuid) for uuid in uuids]
    return replace(join(found), label=label, cores=cores)


def available_cores() -> tuple[int, ...]:
    """Return the cores this process may use: its affinity, cut to the CPU quota of its cgroup."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    quota = cgroup_quota(CGROUP_ROOT, CGROUP_MEMBERSHIP)
    return tuple(cores[: max(1, math.floor(min(quota, len(cores))))])


def cgroup_quota(root: Path, membership: Path) -> float:
    """Return the cores that cgroup v2 grants in CPU time: the least of a group and those above.

    Args:
        root: Where cgroup v2 is mounted.
        membership: The process's `/proc/<pid>/cgroup`.
    """
    lines = membership.read_text().splitlines() if membership.exists() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folders = [root / own, *(root / parent for parent in Path(own).parents)]
    limits = [folder / "cpu.max" for folder in folders]
    return min((_quota(limit.read_text()) for limit in limits if limit.exists()), default=math.inf)


def cpu_workers_default(cores: int) -> int:
    """Return the usual number of CPU workers: one for four cores, but two on a small host.

    Two workers hide each other's waits. There are no more workers than cores.
    """
    return min(cores, max(2, cores // 4))


def split_cores(cores: tuple[int, ...], groups: int) -> list[tuple[int, ...]]:
    """Split cores into contiguous groups, equal to within one; disjoint if cores are enough."""
    edges = [group * len(cores) // groups for group in range(groups + 1)] if groups else []
    return [cores[first : max(last, first + 1)] for first, last in pairwise(edges)]


def _quota(cpu_max: str) -> float:
    """Read the cores in a `cpu.max` line: "<quota> <period>" in microseconds, or "max <period>"."""
    quota, period = cpu_max.split()
    return math.inf if quota == "max" else int(quota) / int(period)


def _cpu_devices(workers: int) -> list[Device]:
    """Return the devices of CPU workers that split the available cores."""
    count = workers or cpu_workers_default(len(available_cores()))
    name = cpu_name()
    total = psutil.virtual_memory().total
    devices = [Device("cpu", f"cpu-{i}", "", name, (), total) for i in range(count)]
    return _share_cores(devices)


def cpu_name() -> str:
    """Return the processor's product name as the kernel knows it, else its architecture."""
    lines = CPU_FACTS.read_text().splitlines() if CPU_FACTS.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def _share_cores(devices: list[Device]) -> list[Device]:
    """Return the devices, each with its share of the available cores."""
    shares = split_cores(available_cores(), len(devices))
    return [replace(device, cores=share) for device, share in zip(devices, shares, strict=True)]


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
    by_name = {gpu.uuid: gpu for gpu in report.gpus}
    by_name |= {str(index): gpu for index, gpu in enumerate(report.gpus)}
    unknown = [name for group in groups for name in group if name not in by_name]
    if unknown:
        there = [f"{i} ({gpu.uuid}, {gpu.name})" for i, gpu in enumerate(report.gpus)]
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
    return Device("cuda", f"cuda-{index}", uuid, name, (), total), metrics


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
