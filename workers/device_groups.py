"""The choice of devices by the models that are wanted: GPUs in groups where a model fits no one."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Final

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.devices import Device, discover, join
from embedfarm.workers.engines.memory import predict_bytes

AUTO: Final = "auto"
WEIGHTS_SHARE: Final = 0.8  # of a GPU's memory: device batches need some, and so does CUDA

log = logging.getLogger(__name__)


def choose_devices(
    selection: str, cpu_workers: int, settings: Settings, nvml: ModuleType | None = None
) -> list[Device]:
    """Find the devices that `--devices` names; "auto" is all, in groups that models need.

    Args:
        selection: "auto", or what `discover` takes.
        cpu_workers: Number of CPU workers, 0 for the default.
        settings: Settings, whose `models_pinned` are the models that are wanted.
        nvml: The NVML module.

    Raises:
        DeviceError: There is no such device.
        ModelError: The files of a wanted model are not what they should be.
    """
    if selection != AUTO:
        return discover(selection, cpu_workers, nvml)
    wanted = [JobSpec(model=name) for name in settings.models_pinned]
    sizes = [predict_bytes(spec, "cuda:0", settings) for spec in wanted]
    return list(
        form_groups(discover("all", cpu_workers, nvml), max(filter(None, sizes), default=0))
    )


def form_groups(devices: Sequence[Device], weights_bytes: int) -> Iterator[Device]:
    """Yield devices, GPUs that are alike in groups just large enough for a model.

    The number of a group's GPUs is a power of two, since a model's attention heads must divide by
    it. What is left of the GPUs, and those of which not even all have enough memory, stay single.

    Args:
        devices: Single devices.
        weights_bytes: Memory that the weights of the model take; 0 for one that fits anywhere.
    """
    alike: defaultdict[str, list[Device]] = defaultdict(list)
    for device in devices:
        alike[device.product].append(device)
    for product, members in alike.items():
        size = _group_size(members[0], weights_bytes)
        grouped = len(members) - len(members) % size
        if not grouped:
            log.warning("%d of %s have too little memory for a wanted model", len(members), product)
        yield from (join(members[first : first + size]) for first in range(0, grouped, size))
        yield from members[grouped:]


def _group_size(device: Device, weights_bytes: int) -> int:
    """Return how many such devices have memory for a model; 1 for a CPU, or if that is unknown."""
    usable = int(WEIGHTS_SHARE * device.memory_total_bytes) if device.kind == "cuda" else 0
    size = 1
    while usable and size * usable < weights_bytes:
        size *= 2
    return size
