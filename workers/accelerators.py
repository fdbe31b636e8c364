"""GPUs of AMD, Intel and Apple, as torch sees them.

torch is asked in a process of its own, and only where it was built for such a GPU: to import it
takes seconds, and a process that has looked at a GPU keeps some of its memory.
"""

import importlib
import logging
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["rocm", "xpu", "mps"]
BUILT_FOR: Final = re.compile(r"^(hip|xpu)\b.*= *['\"]", re.MULTILINE)  # in torch/version.py
SECONDS_MAX: Final = 120.0  # to import torch on a slow disk, and to wake a GPU


log = logging.getLogger(__name__)


class AcceleratorError(RuntimeError):
    """Raised when torch does not find a GPU that it was built for, or fails; it says why."""


class Accelerator(msgspec.Struct):
    """A GPU of this host.

    Attributes:
        kind: "rocm" for one of AMD, "xpu" of Intel, "mps" of Apple.
        number: Index among those of its kind, as torch counts them.
        name: Product name.
        memory_total_bytes: Its memory; of Apple's, what Metal recommends to use of the host's.
        pci: PCI address, such as "0000:65:00.0"; "" where torch does not say.
    """

    kind: Kind
    number: int
    name: str
    memory_total_bytes: int
    pci: str = ""


def find() -> list[Accelerator]:
    """Find the GPUs of this host that torch was built for and that are not NVIDIA's.

    Raises:
        AcceleratorError: torch cannot be asked.
    """
    if not may_have_any():
        return []
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS_MAX, check=True)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise AcceleratorError(f"torch cannot be asked for GPUs: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise AcceleratorError(f"torch finds no GPUs in {SECONDS_MAX:.0f} s") from error
    return msgspec.json.decode(done.stdout, type=list[Accelerator])


def may_have_any() -> bool:
    """Tell whether torch, which is not imported for this, was built for such a GPU."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    version = Path(torch.origin).with_name("version.py")
    return version.exists() and bool(BUILT_FOR.search(version.read_text(encoding="utf-8")))


def load_torch() -> ModuleType:
    """Import torch, which takes seconds."""
    return importlib.import_module("torch")


def look(torch: Any) -> list[Accelerator]:  # noqa: ANN401 -- or what stands for it
    """Return the GPUs that this process sees and that are not NVIDIA's.

    Args:
        torch: The module.

    Raises:
        AcceleratorError: There is none.
    """
    current = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if current is None else torch.accelerator.device_count()
    if current is not None and current.type == "mps":
        memory = torch.mps.recommended_max_memory()
        return [Accelerator("mps", 0, platform.processor() or "Apple GPU", memory)]
    if current is not None and (current.type == "xpu" or torch.version.hip):
        kind: Kind = "xpu" if current.type == "xpu" else "rocm"
        module = torch.get_device_module(current)
        return [_describe(kind, n, module.get_device_properties(n)) for n in range(count)]
    raise AcceleratorError("torch finds no GPU that it was built for")


def _describe(kind: Kind, number: int, properties: Any) -> Accelerator:  # noqa: ANN401 -- torch's
    """Make a record of what torch says of a GPU."""
    pci = ""
    if hasattr(properties, "pci_bus_id"):  # of a GPU of AMD
        places = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        pci = "{:04x}:{:02x}:{:02x}.0".format(*places)
    return Accelerator(kind, number, properties.name, properties.total_memory, pci)


def measure(torch: Any) -> dict[str, float]:  # noqa: ANN401 -- or what stands for it
    """Measure the GPU of this process; a metric that torch cannot read is left out.

    Returns:
        Of memory_used_bytes, memory_total_bytes, utilization_ratio (0 to 1), temperature_celsius
        and power_watts what there is.
    """
    found, *_ = look(torch)
    facts = {"memory_total_bytes": float(found.memory_total_bytes)}
    if found.kind == "mps":
        return facts | {"memory_used_bytes": float(torch.mps.driver_allocated_memory())}
    module = torch.get_device_module("xpu" if found.kind == "xpu" else "cuda")
    free, total = module.mem_get_info(0)
    facts["memory_used_bytes"] = float(total - free)
    for name, read in _readers(module).items():
        try:
            facts[name] = read()
        except Exception as error:  # noqa: BLE001 # without the maker's library, or the right to ask it
            log.debug("no %s: %s", name, error)
    return facts


def _readers(module: Any) -> dict[str, Callable[[], float]]:  # noqa: ANN401 -- torch's
    """Return what reads the metrics for which torch needs a library of the maker."""
    return {
        "utilization_ratio": lambda: float(module.utilization(0)) / 100,
        "temperature_celsius": lambda: float(module.temperature(0)),
        "power_watts": lambda: float(module.power_draw(0)),
    }


if __name__ == "__main__":
    try:
        seen = look(load_torch())
    except AcceleratorError:
        seen = []
    sys.stdout.buffer.write(msgspec.json.encode(seen))
