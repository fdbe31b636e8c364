"""What torch raises where a device's memory is full, or the device has failed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from embedfarm.workers.engines.engine import DeviceFailed, OutOfMemory

# What torch says when memory is full: on Linux, elsewhere, in oneDNN, in cuBLAS, and in Metal.
NO_MEMORY: Final = (
    "can't allocate memory",
    "not enough memory",
    "could not create a ",
    "ALLOC_FAILED",
    "MPS backend out of memory",
)
# What it says of a GPU that no program gets an answer from until it starts anew.
DEVICE_FAILED: Final = ("CUDA error", "HIP error", "DEVICE_LOST")


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise `OutOfMemory` or `DeviceFailed` in place of the errors of torch that mean it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        raise OutOfMemory(str(error)) from error
    except MemoryError as error:
        raise OutOfMemory("the host's memory is full") from error
    except RuntimeError as error:
        if any(words in str(error) for words in NO_MEMORY):
            raise OutOfMemory(str(error)) from error
        if any(words in str(error) for words in DEVICE_FAILED):
            raise DeviceFailed(str(error)) from error
        raise
