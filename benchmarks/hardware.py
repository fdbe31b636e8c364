"""Description of the hardware and the libraries that a benchmark ran on."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Final

import psutil

from embedfarm.workers.cores import available_cores
from embedfarm.workers.devices import describe_devices

GIBIBYTE: Final = 1 << 30
CPUINFO: Final = Path("/proc/cpuinfo")
# Extensions that decide how fast a processor multiplies matrices.
EXTENSIONS: Final = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "bf16", "i8mm"),
)
LIBRARIES: Final = ("torch", "sentence-transformers", "transformers", "tokenizers", "numpy")


def describe_hardware() -> dict[str, str]:
    """Describe processor, memory, GPUs and versions of the farm's libraries, by name."""
    cpu = parse_cpuinfo(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else "")
    facts = {
        "Processor": cpu.get("model name", platform.machine()),
        "Cores": str(len(available_cores())),
        "Instruction sets": " ".join(name for name in EXTENSIONS if name in find_flags(cpu)),
        "Memory": f"{psutil.virtual_memory().total / GIBIBYTE:.0f} GiB",
        "GPUs": ", ".join(gpu.name for gpu in describe_devices().gpus) or "none",
        "System": platform.platform(),
        "Python": platform.python_version(),
    }
    return facts | {name: importlib.metadata.version(name) for name in LIBRARIES}


def parse_cpuinfo(text: str) -> dict[str, str]:
    """Return the fields of the first processor in Linux' /proc/cpuinfo; the others say the same."""
    first = text.partition("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def find_flags(cpu: dict[str, str]) -> set[str]:
    """Return a processor's instruction sets: x86 calls them flags, ARM features."""
    return set(cpu.get("flags", cpu.get("Features", "")).split())
