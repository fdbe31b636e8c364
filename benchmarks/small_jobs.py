"""Many small jobs beside a large one of the same texts.

    python -m benchmarks.small_jobs [--jobs 100] [--chunks 20] [--model M] [--workers 1]
        [--rounds 5] [--devices cpu|0]

A farm embeds the same docstrings as one job and as many, in turn. Times are from the first block
that is pushed to the last commit: how corpora are read and results are written is measured
elsewhere.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.corpora import MODEL
from embedfarm.contract.broker import closing_client
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.records import Block
from embedfarm.contract.settings import Settings
from embedfarm.producer.docstrings import docstrings
from embedfarm.runs.private_farm import run_local_farm

LOOK_SECONDS: Final = 0.005
BLOCK_CHUNKS: Final = 20
CHARACTERS_PER_TOKEN: Final = 4


def measure(farm: FarmClient, spec: JobSpec, texts: Sequence[str], count: int) -> float:
    """Return the seconds in which workers embed some texts as so many jobs of equal size."""
    size, wait = len(texts) // count, threading.Event()
    jobs = [farm.job(f"small-{time.monotonic_ns()}-{number}") for number in range(count)]
    began = time.monotonic()
    for number, job in enumerate(jobs):
        part = texts[number * size : (number + 1) * size]
        blocks = []
        for start in range(0, size, BLOCK_CHUNKS):
            some = list(part[start : start + BLOCK_CHUNKS])
            tokens = sum(map(len, some)) // CHARACTERS_PER_TOKEN
            blocks.append(Block(start=start, texts=some, token_count=tokens))
        job.create(spec, 0)
        job.push([(block, encode(block)) for block in blocks])
        job.close(size)
    for job in jobs:
        while job.status().chunks_done < size:
            wait.wait(LOOK_SECONDS)
    seconds = time.monotonic() - began
    for job in jobs:
        job.delete()
    return seconds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", default="cpu")
    arguments = parser.parse_args()
    chunks = arguments.jobs * arguments.chunks
    texts = [text for _, text in itertools.islice(docstrings(), chunks)]
    spec = JobSpec(model=arguments.model)
    with (
        tempfile.TemporaryDirectory() as name,
        run_local_farm(Path(name), Settings(), arguments.devices, arguments.workers) as local,
        closing_client(local.url) as client,
    ):
        farm = FarmClient(client)
        measure(farm, spec, texts, 1)  # loads the model
        rows = [
            [measure(farm, spec, texts, count) for count in (1, arguments.jobs)]
            for _ in range(arguments.rounds)
        ]
    sys.stdout.write(f"| one job of {chunks:,}, s | {arguments.jobs} jobs, s | ratio |\n")
    sys.stdout.write("|--:|--:|--:|\n")
    for one, many in rows:
        sys.stdout.write(f"| {one:.2f} | {many:.2f} | {many / one:.3f} |\n")
    ratios = [many / one for one, many in rows]
    sys.stdout.write(f"median of the ratios {statistics.median(ratios):.3f}\n")


if __name__ == "__main__":
    main()
