"""Speed at which a device multiplies matrices, measured by a process of its own.

python -m benchmarks.device_peak DEVICE DTYPE
"""

import argparse
import json
import os
import sys

import torch

from embedfarm.workers.engines.measurement import measure_peak


def main() -> None:
    """Print the device's peak as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("dtype")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    peak = measure_peak(torch.device(arguments.device), dtype)
    sys.stdout.write(json.dumps({"flops_per_second": peak}) + "\n")


if __name__ == "__main__":
    main()
