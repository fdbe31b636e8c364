"""Tests of the benchmark of GPUs, with a tiny model on the CPU."""

import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.random_models import Architecture
from benchmarks.results import BARE_ENGINE, BASELINE, FARM, Bench
from embedfarm.workers.devices import describe_devices
from tests.benchmarks.test_random_models import TINY


def measure(monkeypatch: pytest.MonkeyPatch, directory: Path, model: str, device: str) -> str:
    """Run the benchmark on 40 chunks in one round without the best batch size; give its report."""
    monkeypatch.setattr(gpu, "SHOWN", (FARM, BARE_ENGINE, BASELINE))
    monkeypatch.setattr(gpu, "architectures", lambda: {model: Architecture(TINY["bert"], "cls")})
    words = ["--models", model, "--device", device, "--chunks", "40", "--rounds", "1"]
    report = directory / "gpu.md"
    words += ["--build", str(directory), "--report", str(report)]
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    gpu.main()
    return report.read_text(encoding="utf-8")


def row(report: str, model: str) -> dict[str, str]:
    """The line of a model in a report, by head of the column."""
    line = next(line for line in report.splitlines() if line.startswith(f"| {model} |"))
    return dict(zip(gpu.HEADS, (cell.strip() for cell in line.strip("|").split("|")), strict=True))


@pytest.mark.skipif(bool(describe_devices().gpus), reason="there is a GPU to be measured")
def test_where_there_is_no_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The benchmark says that there is no GPU before it makes any file."""
    with pytest.raises(SystemExit, match="no GPU here"):
        measure(monkeypatch, tmp_path, "bge-base", "cuda")
    assert not list(tmp_path.iterdir())


def test_a_model_is_made_and_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The report has the figures that were kept, and a model is made only once."""
    found = row(measure(monkeypatch, tmp_path, "bge-base", "cpu"), "bge-base")
    kept = Bench.load(tmp_path / "gpu" / "bge-base.json").comparisons[0]
    farm = kept.find(FARM)
    assert farm is not None
    assert found["chunks"] == f"{kept.chunks:,}" == "40"
    assert found["tokens/s"] == f"{kept.tokens / farm.seconds:,.0f}"
    assert float(found["least cosine"]) >= 0.999
    assert float(found["of encode"]) > 0
    assert float(found["of bare engine"]) > 0
    assert found["of best batch"] == "", "it was left out"
    assert found["share of peak"] == f"{kept.peak_share(farm):.1%}"
    assert kept.peak_share(farm) > 0  # of a model as small as this it may be anything
    assert 0 <= float(found["idle"].rstrip("%")) < 100
    built = (tmp_path / "models" / "bge-base").stat().st_mtime_ns
    assert gpu.find_model("bge-base", tmp_path).is_dir()
    assert (tmp_path / "models" / "bge-base").stat().st_mtime_ns == built
