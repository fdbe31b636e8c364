"""Measurement of a model's arithmetic, and of how much its device can do, with torch."""

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from embedfarm.workers.engines.device_module import device_module

CPU_PEAK_SIZE: Final = 1024  # of square matrices, for which a peak is reached
GPU_PEAK_SIZE: Final = 8192
PEAK_SECONDS: Final = 0.2
PEAK_ROUNDS_MIN: Final = 3
SMALLER: Final = 8  # times smaller matrices are tried first


def count_flops(embed: Callable[[int], Any], lengths: Sequence[int]) -> tuple[float, float]:
    """Count the operations per token and per pair of tokens, from two texts.

    Args:
        embed: Runs the model over the first (0) or the second text (1).
        lengths: Tokens of the two texts; the second is the longer one.
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


@cache
def known_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return `measure_peak`, which a process does once for each device and dtype."""
    return measure_peak(device, dtype)


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure operations per second in multiplying square matrices, the best of some rounds.

    A processor that does not have the dtype is as slow with small matrices, which have to do then.
    """
    size = CPU_PEAK_SIZE if device.type == "cpu" else GPU_PEAK_SIZE
    small = size // SMALLER
    seconds = _multiply(small, device, dtype, 0.0)
    if seconds * SMALLER**3 > PEAK_SECONDS:
        return 2 * small**3 / seconds
    return 2 * size**3 / _multiply(size, device, dtype, PEAK_SECONDS)


def _multiply(size: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Multiply square matrices for so long; return the least seconds that it took once.

    Their values are random: a GPU multiplies matrices of ones faster than those of any model.
    """
    one, other = (torch.randn((size, size), device=device).to(dtype) for _ in range(2))
    took: list[float] = []
    ends = time.perf_counter() + seconds
    while len(took) < PEAK_ROUNDS_MIN or time.perf_counter() < ends:
        took.append(_time(lambda: torch.mm(one, other), device))
    return min(took)


def _time(work: Callable[[], Any], device: torch.device) -> float:
    """Measure the seconds that some work takes on a device."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        device_module(str(device)).synchronize(device)
