"""A limit on the memory of device batches, for a device that others use as well."""

import resource
import sys

import psutil


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
    elif bytes_max:
        import torch  # noqa: PLC0415 # a null engine does without it

        total = torch.cuda.get_device_properties(device).total_memory
        taken = torch.cuda.memory_reserved(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (taken + bytes_max) / total), device)


def model_bytes(device: str) -> int:
    """Return the bytes of the loaded model on its device; 0 on a CPU, whose memory many share."""
    if device == "cpu":
        return 0
    import torch  # noqa: PLC0415 # as above

    return int(torch.cuda.memory_allocated(device))


def _limit_data(bytes_max: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard
    if bytes_max and sys.platform == "linux":
        soft = psutil.Process().memory_info().data + bytes_max
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
