"""Memory of a device: what is free, what a model takes of it, and a limit on device batches."""

import functools
import gc
import math
import resource
import sys
from pathlib import Path
from typing import Final

import psutil

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.device_module import device_module
from embedfarm.workers.engines.group import current_group
from embedfarm.workers.host_memory import AvailableMemory, host_memory

CPU_FACTS: Final = Path("/proc/cpuinfo")
HALF: Final = " avx512_bf16"  # as torch and OpenVINO ask the processor
ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def device_memory(device: str) -> AvailableMemory:
    """Return the memory of a device; that of the host for a CPU.

    What torch keeps for the next device batches counts as taken, until `free_memory`. Several GPUs
    of a group have equal parts of a model, so that all have as much as the one that has least.

    Args:
        device: torch's name of the device, of the first one for a group.
    """
    if device == "cpu":
        return host_memory()
    module = device_module(device)
    devices = range(module.device_count())  # this process sees no others
    free, total = map(min, zip(*map(module.mem_get_info, devices), strict=True))
    return AvailableMemory(total * len(devices), free * len(devices))


def predict_bytes(spec: JobSpec, device: str, settings: Settings) -> int | None:
    """Predict the memory that a model's weights take, by its files; None where there are none.

    That is the number of elements in the headers of its safetensors, times the bytes of the type
    that the job computes in; files of another format count as they are.

    Args:
        spec: The job.
        device: torch's name of the device.
        settings: Settings, which say where models are kept.
    """
    if model_files.is_null(spec.model):
        return 0
    directory = model_files.find_local(spec.model, settings.model_cache)
    if directory is None:
        return None
    dtype = "float32" if settings.endpoint_url else spec.dtype  # the model here is the reference
    width = ELEMENT_BYTES.get(dtype) or (2 if device != "cpu" or _computes_in_half() else 4)
    return sum(_file_bytes(file, width) for file in model_files.weight_files(directory))


@functools.cache
def _computes_in_half() -> bool:
    """Tell whether this processor computes in bfloat16, which "auto" then stands for."""
    try:
        return HALF in CPU_FACTS.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False  # no Linux


def _file_bytes(file: Path, width: int) -> int:
    """Return the memory that the weights of a file take, `width` bytes for an element."""
    if file.suffix != ".safetensors":
        return file.stat().st_size
    from safetensors import safe_open  # noqa: PLC0415 # a null engine does without it

    with safe_open(file, framework="numpy") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.offset_keys()]
    return width * sum(map(math.prod, shapes))


def limit_batches(device: str, bytes_max: int) -> None:
    """Limit the memory that this process may allocate on its device from now on.

    What does not fit then raises like a device that is full. On a CPU it is a limit on all data of
    the process, which only Linux keeps.

    Args:
        device: torch's name of the device.
        bytes_max: Most bytes; 0 for no limit.
    """
    if device == "cpu":
        _limit_data(bytes_max)
    else:
        module = device_module(device)
        total = module.get_device_properties(device).total_memory
        taken = module.memory_reserved(device) + bytes_max if bytes_max else total
        module.set_per_process_memory_fraction(min(1.0, taken / total), device)


def allocated_bytes(device: str) -> int:
    """Return what this process has allocated on a device; on a CPU, all that it has in memory."""
    if device == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(device_module(device).memory_allocated(device))


def free_memory(device: str) -> None:
    """Give back the memory of models that nobody refers to any more, also to other programs."""
    gc.collect()  # the modules of a model refer to each other
    group = current_group()
    if group is not None:
        group.free()
    if device != "cpu":
        device_module(device).empty_cache()


def _limit_data(bytes_max: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard
    if bytes_max and sys.platform == "linux":
        soft = psutil.Process().memory_info().data + bytes_max
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
