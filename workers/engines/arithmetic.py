"""How much arithmetic a model is, and how much the device can do: a worker's share of the peak."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

PEAK_SIZE: Final = {"cpu": 1024, "cuda": 8192}  # of square matrices, for which a peak is reached
PEAK_SECONDS: Final = 0.2
PEAK_ROUNDS_MIN: Final = 3


@dataclass(frozen=True)
class Arithmetic:
    """Operations of a model, and the device's peak; a multiplication and an addition count two.

    Attributes:
        per_token: For each token, whatever the length of its text.
        per_token_squared: For each pair of tokens of a text: attention.
        peak_per_second: What the device does when it multiplies large matrices; 0 when unknown.
    """

    per_token: float = 0.0
    per_token_squared: float = 0.0
    peak_per_second: float = 0.0

    def flops(self, lengths: NDArray[np.integer]) -> float:
        """Operations for texts of these lengths without padding.

        For a plain encoder it is 2 L (4 d^2 + 2 d f) for a token and 4 L d for a pair (Kaplan et
        al. 2020, table 1, without the causal half).
        """
        sizes = lengths.astype(np.float64)
        return float(self.per_token * sizes.sum() + self.per_token_squared * (sizes**2).sum())


def count_flops(embed: Callable[[int], Any], lengths: Sequence[int]) -> tuple[float, float]:
    """Operations per token and per pair of tokens, from two texts.

    Args:
        embed: Runs the model over the first (0) or the second text (1).
        lengths: Their tokens; the second is the longer one.
    """
    counts = []
    for text, tokens in enumerate(lengths):
        # Fused attention is not counted on every device; what it replaces is.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as mode:
            embed(text)
        counts.append(mode.get_total_flops() / tokens)
    short, long = lengths
    per_pair = (counts[1] - counts[0]) / (long - short) if long > short else 0.0
    return counts[0] - per_pair * short, per_pair


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second in multiplying square matrices, the best of some rounds."""
    size = PEAK_SIZE[device.type]
    one, other = (torch.ones((size, size), dtype=dtype, device=device) for _ in range(2))
    best = 0.0
    rounds = 0
    ends = time.perf_counter() + PEAK_SECONDS
    while rounds < PEAK_ROUNDS_MIN or time.perf_counter() < ends:
        best = max(best, 2 * size**3 / _time(lambda: torch.mm(one, other), device))
        rounds += 1
    return best


def _time(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that some work takes on a device."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
