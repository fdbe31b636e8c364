"""Tests of what errors of torch mean."""

import pytest
import torch

from embedfarm.workers.engines.device_errors import device_errors
from embedfarm.workers.engines.engine import DeviceFailed, OutOfMemory


@pytest.mark.parametrize(
    ("raised", "meant"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceFailed),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
    ],
)
def test_errors_of_torch(raised: Exception, meant: type[Exception]) -> None:
    """Full memory makes device batches smaller, a failed device ends the process; others stay."""
    with pytest.raises(meant) as found, device_errors():
        raise raised
    assert found.type is meant
