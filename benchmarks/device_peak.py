"""How fast a device multiplies matrices of a model's own shapes, and what the model needs of that.

python -m benchmarks.device_peak MODEL DEVICE DTYPE
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

ROWS: Final = {"cpu": (256, 1024, 4096), "cuda": (4096, 16384, 65536)}
SHAPE_SECONDS: Final = 0.2  # of multiplying, for each shape
GATED: Final = {"modernbert", "qwen3"}  # their feed-forward has three matrices, not two


@dataclass(frozen=True)
class Shape:
    """What decides how much a transformer computes.

    Attributes:
        layers: Number of them.
        hidden: Width of a token.
        inner: Width of the feed-forward.
        query: Width of all heads together.
        keys: Width of all keys together: less than `query` where heads share them.
        gated: Whether the feed-forward has a gate.
    """

    layers: int
    hidden: int
    inner: int
    query: int
    keys: int
    gated: bool

    @classmethod
    def read(cls, model: Path) -> "Shape":
        """The shape of the model in a directory, from its config.json."""
        config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        width = config.get("head_dim") or hidden // heads
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            inner=config["intermediate_size"],
            query=heads * width,
            keys=config.get("num_key_value_heads", heads) * width,
            gated=config["model_type"] in GATED,
        )

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the matrices of a layer."""
        attention = [(self.hidden, self.query), (self.query, self.hidden)]
        attention += 2 * [(self.hidden, self.keys)]
        forward = [(self.hidden, self.inner), (self.inner, self.hidden)]
        return attention + forward + self.gated * forward[:1]

    def flops(self, lengths: NDArray[np.int64]) -> float:
        """Operations for texts of so many tokens, without padding.

        A layer of s tokens takes 2 for each weight and token, and 4 * query * s * s for attention
        to all of the text: for BERT 2·L·(4d² + 2·d·f) + 4·L·d·s a token. Where a model looks at
        less than the whole text this is more than it needs.
        """
        weights = sum(inputs * outputs for inputs, outputs in self.matrices)
        each = 2 * weights * lengths + 4 * self.query * lengths.astype(np.float64) ** 2
        return float(self.layers * each.sum())


def measure_rate(device: str, dtype: torch.dtype, rows: int, matrix: tuple[int, int]) -> float:
    """Operations per second of (rows, inputs) @ (inputs, outputs), repeated."""
    inputs, outputs = matrix
    left = torch.randn(rows, inputs, device=device).to(dtype)
    right = torch.randn(inputs, outputs, device=device).to(dtype)
    out = torch.empty(rows, outputs, device=device, dtype=dtype)
    torch.matmul(left, right, out=out)
    _wait(device)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SHAPE_SECONDS:
        for _ in range(8):
            torch.matmul(left, right, out=out)
        _wait(device)
        count += 8
    return 2.0 * rows * inputs * outputs * count / (time.perf_counter() - began)


def measure_peak(shape: Shape, device: str, dtype: torch.dtype) -> float:
    """The best rate of any of the model's matrices with any number of rows."""
    matrices = sorted(set(shape.matrices))
    return max(
        measure_rate(device, dtype, rows, matrix) for rows in ROWS[device] for matrix in matrices
    )


def _wait(device: str) -> None:
    """Returns when the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Print the peak as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("device", choices=tuple(ROWS))
    parser.add_argument("dtype")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    peak = measure_peak(Shape.read(arguments.model), arguments.device, dtype)
    sys.stdout.write(json.dumps({"flops_per_second": peak}) + "\n")


if __name__ == "__main__":
    main()
