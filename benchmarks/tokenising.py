"""Benchmark of tokenising: by the model's preprocessing, by a producer, and out of a block.

    python -m benchmarks.tokenising [--chunks N] [--rounds N]

Docstrings of the standard library and the tokenizer of all-MiniLM-L6-v2, on one core and on all of
them, in turn, medians of the rounds, in tokens per second.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import islice
from typing import TYPE_CHECKING, Final

from embedfarm.contract import model_files
from embedfarm.contract.encoding import decode, encode
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.records import Block, Rows
from embedfarm.contract.settings import Settings
from embedfarm.producer.blocks import Blocker
from embedfarm.producer.docstrings import docstrings
from embedfarm.workers.cores import available_cores

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS: Final = ("preprocessing", "producer", "out of blocks")
MODEL: Final = "sentence-transformers/all-MiniLM-L6-v2"
CORES: Final = "EMBEDFARM_BENCH_CORES"


def measure(chunks: int, rounds: int) -> dict[str, float]:
    """Return the tokens per second of each way, on the cores that this process may use."""
    from embedfarm.contract.token_ids import TokenEncoder  # noqa: PLC0415 # its threads are as many as cores
    from embedfarm.workers.engines.sentence_transformer import (  # noqa: PLC0415 # the same
        SentenceTransformerEngine,
    )

    texts = [text for _, text in islice(docstrings(), chunks)]
    spec = JobSpec(model=MODEL, dtype="float32")
    engine = SentenceTransformerEngine.open(spec, "cpu", None, measured=False)
    tokenisation = engine.tokenisation
    if tokenisation is None:
        raise model_files.ModelError(f"{MODEL} has no tokenisation settings")
    encoder = TokenEncoder.open(model_files.resolve(MODEL), tokenisation)
    blocker = Blocker(0, Settings(), tokens_target=1e4)
    blocks = [
        encode(block) for block in [*blocker.add(Rows(texts, None), encoder), *blocker.flush()]
    ]
    tokens = int(encoder.encode(texts)[1].sum())

    def produce() -> None:
        for block in Blocker(0, Settings(), tokens_target=1e4).add(Rows(texts, None), encoder):
            encode(block)

    def take() -> None:
        for data in blocks:
            engine.tokenise(decode(Block, data).chunks())

    made: tuple[Callable[[], object], ...] = (
        lambda: engine.tokenizer.truncate(texts),
        produce,
        take,
    )
    ways = dict(zip(WAYS, made, strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    return {name: tokens / statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Print a table; each number of cores is measured in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    cores = sorted(available_cores())
    if CORES in os.environ:
        os.sched_setaffinity(0, cores[: int(os.environ[CORES])])
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        found = measure(arguments.chunks, arguments.rounds)
        cells = (f"{found[name]:16,.0f}" for name in found)
        sys.stdout.write(f"{os.environ[CORES]:>5}{''.join(cells)}\n")
        return
    sys.stdout.write("cores" + "".join(f"{name:>16}" for name in WAYS) + "\n")
    sys.stdout.flush()
    for count in sorted({1, len(cores)}):
        command = [sys.executable, "-m", "benchmarks.tokenising", *sys.argv[1:]]
        subprocess.run(command, check=True, env=os.environ | {CORES: str(count)})


if __name__ == "__main__":
    main()
