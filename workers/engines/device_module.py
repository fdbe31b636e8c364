"""The functions that torch has for a kind of GPU, under the same names for all kinds."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from embedfarm.workers.host_memory import host_memory


@dataclass(frozen=True)
class AppleModule:
    """What `torch.mps` has, under the names that `torch.cuda` has.

    Memory is the host's, of which Metal recommends to use a part.

    Attributes:
        mps: The module `torch.mps`.
    """

    mps: Any

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- as in a module
        """Return what has one name in both, such as `Event` and `empty_cache`."""
        return getattr(self.mps, name)

    def mem_get_info(self, _device: object = None) -> tuple[int, int]:
        """Return the bytes that are free, and all that there are."""
        total = self.mps.recommended_max_memory()
        left = total - self.mps.driver_allocated_memory()
        return max(0, min(left, host_memory().free)), total

    def memory_allocated(self, _device: object = None) -> int:
        """Return the bytes that tensors take."""
        return int(self.mps.current_allocated_memory())

    def memory_reserved(self, _device: object = None) -> int:
        """Return the bytes that this process has, with those that it keeps for later."""
        return int(self.mps.driver_allocated_memory())

    def set_per_process_memory_fraction(self, fraction: float, _device: object = None) -> None:
        """Limit the memory of this process to a share of all."""
        self.mps.set_per_process_memory_fraction(fraction)

    def get_device_properties(self, _device: object = None) -> SimpleNamespace:
        """Return the properties of the GPU: its memory."""
        return SimpleNamespace(total_memory=self.mps.recommended_max_memory())

    def synchronize(self, _device: object = None) -> None:
        """Wait until the GPU has nothing to do."""
        self.mps.synchronize()


def device_module(device: str) -> Any:  # noqa: ANN401 -- a module, or what stands for it
    """Return the functions for a kind of GPU.

    Args:
        device: torch's name of the GPU, such as "cuda:0".
    """
    import torch  # noqa: PLC0415 # a null engine does without it

    if device.startswith("mps"):
        return AppleModule(torch.mps)
    return torch.get_device_module(device)
