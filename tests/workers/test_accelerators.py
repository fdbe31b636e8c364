"""Tests of GPUs that are not NVIDIA's, on what stands for torch: none was at hand to be tried."""

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from embedfarm.workers import accelerators
from embedfarm.workers.accelerators import Accelerator, AcceleratorError
from embedfarm.workers.engines import device_module, memory
from embedfarm.workers.engines.device_module import AppleModule
from embedfarm.workers.engines.sentence_transformer import resolve_dtype
from embedfarm.workers.host_memory import AvailableMemory

GIB: Final = 1 << 30
BUILDS: Final = {
    "None": False,
    "'6.4.43482'": True,
}


def fake_torch(kind: str, *, library: bool = True) -> Any:  # noqa: ANN401 -- stands for a module
    """What torch says on a host with two GPUs of a kind, with the maker's library or without."""

    def read(value: float) -> float:
        if not library:
            raise ModuleNotFoundError("amdsmi")
        return value

    properties = SimpleNamespace(name="Delta 192", total_memory=192 * GIB)
    if kind == "cuda":
        vars(properties).update(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    module = SimpleNamespace(
        get_device_properties=lambda _: properties,
        mem_get_info=lambda _: (100 * GIB, 192 * GIB),
        utilization=lambda _: read(50),
        temperature=lambda _: read(61),
        power_draw=lambda _: read(250),
    )
    mps = SimpleNamespace(
        recommended_max_memory=lambda: 36 * GIB,
        driver_allocated_memory=lambda: 10 * GIB,
        current_allocated_memory=lambda: 7 * GIB,
    )
    return SimpleNamespace(
        accelerator=SimpleNamespace(
            current_accelerator=lambda **_: kind and torch.device(kind),
            device_count=lambda: 2,
        ),
        get_device_module=lambda _: module,
        mps=mps,
        version=SimpleNamespace(hip="6.4" if kind == "cuda" else None),
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cuda", Accelerator("rocm", 1, "Delta 192", 192 * GIB, "0000:c1:00.0")),
        ("xpu", Accelerator("xpu", 1, "Delta 192", 192 * GIB)),
    ],
)
def test_each_gpu_is_described(kind: str, expected: Accelerator) -> None:
    """GPUs are named, numbered and budgeted; those of AMD have torch's name for NVIDIA's."""
    first, second = accelerators.look(fake_torch(kind))
    assert (first.number, second) == (0, expected)


def test_a_gpu_of_apple_has_what_metal_recommends() -> None:
    """The memory of a GPU that shares the host's is what it should use of that."""
    (found,) = accelerators.look(fake_torch("mps"))
    assert (found.kind, found.memory_total_bytes) == ("mps", 36 * GIB)


def test_no_gpu_is_an_error() -> None:
    """A process that was pinned to a GPU and finds none says so."""
    nothing = fake_torch("mps")
    nothing.accelerator.current_accelerator = lambda **_: None
    with pytest.raises(AcceleratorError, match="finds no GPU"):
        accelerators.look(nothing)


def test_metrics_of_a_gpu() -> None:
    """A heartbeat has the metrics that NVML gives of others, as far as torch can read them."""
    memory = {"memory_total_bytes": 192.0 * GIB, "memory_used_bytes": 92.0 * GIB}
    more = {"utilization_ratio": 0.5, "temperature_celsius": 61.0, "power_watts": 250.0}
    assert accelerators.measure(fake_torch("xpu")) == memory | more
    assert accelerators.measure(fake_torch("cuda", library=False)) == memory
    assert accelerators.measure(fake_torch("mps")) == {
        "memory_total_bytes": 36.0 * GIB,
        "memory_used_bytes": 10.0 * GIB,
    }


def test_memory_of_a_gpu_of_apple_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free on it is no more than what is free of the host's memory."""
    module = AppleModule(fake_torch("mps").mps)
    for free, expected in ((3, 3), (60, 26)):
        host = AvailableMemory(64 * GIB, free * GIB)
        monkeypatch.setattr(device_module, "host_memory", lambda host=host: host)
        assert module.mem_get_info() == (expected * GIB, 36 * GIB)
    assert (module.memory_allocated(), module.memory_reserved()) == (7 * GIB, 10 * GIB)


def test_limits_of_a_gpu_of_apple(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device batches get what they may have beside what is taken; without a limit, all of it."""
    limits: list[float] = []
    emptied: list[bool] = []
    apple = fake_torch("mps").mps
    fake = SimpleNamespace(
        **vars(apple) | {"device_count": lambda: 1, "empty_cache": lambda: emptied.append(True)},
        set_per_process_memory_fraction=limits.append,
    )
    monkeypatch.setattr(torch, "mps", fake)
    monkeypatch.setattr(device_module, "host_memory", lambda: AvailableMemory(64 * GIB, 60 * GIB))
    assert memory.device_memory("mps") == AvailableMemory(36 * GIB, 26 * GIB)
    assert memory.allocated_bytes("mps") == 7 * GIB
    memory.limit_batches("mps", 8 * GIB)
    memory.limit_batches("mps", 80 * GIB)
    memory.limit_batches("mps", 0)
    assert limits == [0.5, 1.0, 1.0]  # 10 GiB are taken, of 36
    memory.free_memory("mps")
    assert emptied


def test_auto_is_half_precision_on_a_gpu_of_apple() -> None:
    """A GPU of Apple computes in float16."""
    assert resolve_dtype("auto", "mps:0") == "float16"


@pytest.mark.parametrize("system", ["linux", "darwin"])
@pytest.mark.parametrize("name", ["hip", "xpu"])
@pytest.mark.parametrize("build", BUILDS)
def test_only_a_torch_that_was_built_for_it_is_asked(
    build: str, name: str, system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether torch may find such a GPU is seen without importing it."""
    text = f"cuda: Optional[str] = '13.0'\n{name}: Optional[str] = {build}\n"
    (tmp_path / "version.py").write_text(text)
    origin = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(accelerators, "find_spec", lambda _: origin)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert accelerators.may_have_any() == (BUILDS[build] or system == "darwin")


def test_torch_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's torch is asked, and finds nothing; one that fails is told from that."""
    assert accelerators.find() == [], "it was not built for any"
    monkeypatch.setattr(accelerators, "may_have_any", lambda: True)
    assert accelerators.find() == []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(AcceleratorError, match="cannot be asked"):
        accelerators.find()


def test_to_be_told_of_none_takes_no_torch() -> None:
    """A host without such a GPU does not pay for torch when its devices are listed."""
    program = (
        "import sys; from embedfarm.workers import accelerators;"
        "accelerators.find(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
