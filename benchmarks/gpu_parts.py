"""Measurement of where a GPU's time goes, model by model, with the engine in one process.

    python -m benchmarks.gpu_parts [--models A B] [--device cuda|cpu] [--rounds N] [--compile]
                                   [--build DIRECTORY]

Each model has a file of its own, BUILD/gpu/NAME-parts.json: tokens per second by size of the device
batch, with and without padding; the share of the time in which the device works and copies; what
the host needs for a device batch and for tokens; what compiled layers give.
"""

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from benchmarks.compare import BATCH_SIZES, BUILD
from benchmarks.corpora import mixed
from benchmarks.gpu import CHUNKS, find_model
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.workers.cores import available_cores
from embedfarm.workers.engines.compiled import compile_layers
from embedfarm.workers.engines.engine import Finish, OutOfMemory, Tokenised
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.engines.unpadded import unpad
from embedfarm.workers.packing import STARTED_MAX, pack

SIZES: Final = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
SHARE: Final = 10  # of a model's corpus in `benchmarks.gpu`, so many times fewer chunks are enough
BATCHES_MIN: Final = 4  # of the largest size, or its figure would say little
BATCHES_MAX: Final = 48  # evenly spaced over the lengths
WATCHED_BATCHES: Final = 8  # that are profiled, and whose time on the host is taken
Batches = Sequence[NDArray[np.intp]]


class Parts(msgspec.Struct, kw_only=True):
    """Figures of one model on one device; seconds are medians of some rounds.

    Attributes:
        model: Name of the model.
        chunks: Texts that went through the engine.
        tokens: Tokens of them.
        dtype: Type in which the engine computed.
        load_seconds: Time in which the engine was opened, with padding.
        batch_tokens: Tokens of a device batch, as the engine chose.
        peak: Operations per second of the device at best.
        flops: Operations that the texts take without padding.
        padded: Tokens per second by tokens of a device batch, with padding.
        unpadded: Tokens per second by tokens of a device batch, without padding.
        why_padded: Reason why there are no figures without padding, "" where there are some.
        busy: Share of the time in which the device computed or copied, as the profiler saw it.
        copying: Share of the time in which it copied.
        kernels: Kernels of a device batch.
        start_seconds: Time in which the host starts a device batch.
        features_seconds: Time of it in which tokens are laid out and copied to the device.
        pageable_seconds: Time that `features_seconds` would be from memory that is not pinned.
        tokenise: Tokens per second of the host's tokenizer, with all cores.
        compile_seconds: Time of the first pass with compiled layers, 0 where that was not tried.
        compiled: Tokens per second with compiled layers.
        why_not_compiled: Reason why it did not work.
    """

    model: str
    chunks: int
    tokens: int
    dtype: str
    load_seconds: float
    batch_tokens: int
    peak: float
    flops: float
    padded: dict[int, float] = {}  # msgspec makes a new dictionary for each
    unpadded: dict[int, float] = {}  # the same
    why_padded: str = ""
    busy: float = 0.0
    copying: float = 0.0
    kernels: float = 0.0
    start_seconds: float = 0.0
    features_seconds: float = 0.0
    pageable_seconds: float = 0.0
    tokenise: float = 0.0
    compile_seconds: float = 0.0
    compiled: float = 0.0
    why_not_compiled: str = ""

    def save(self, directory: Path) -> None:
        """Write the figures as JSON."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.model}-parts.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def run(engine: SentenceTransformerEngine, batch: Tokenised, batches: Batches) -> float:
    """Return the seconds that device batches take, begun one before the other as a worker does."""
    waiting: deque[Finish] = deque()
    began = time.perf_counter()
    for rows in batches:
        waiting.append(engine.start(batch, rows))
        if len(waiting) >= STARTED_MAX:
            waiting.popleft()()
    for finish in waiting:
        finish()
    return time.perf_counter() - began


def cut(engine: SentenceTransformerEngine, batch: Tokenised, size: int) -> Batches:
    """Pack texts into device batches of so many tokens."""
    return pack(batch.lengths, size, engine.launch_tokens, padded=engine.padded)


def measure_sizes(
    engine: SentenceTransformerEngine, batch: Tokenised, rounds: int
) -> dict[int, float]:
    """Return tokens per second by size of the device batch; a size without room is left out."""
    total = int(batch.lengths.sum())
    speeds: defaultdict[int, list[float]] = defaultdict(list)
    for turn in range(1 + rounds):  # the first one warms up
        for size in SIZES:
            if size * BATCHES_MIN > total:
                continue
            batches = cut(engine, batch, size)
            some = batches[:: -(-len(batches) // BATCHES_MAX)]
            try:
                took = run(engine, batch, some)
            except OutOfMemory:
                continue
            if turn:
                speeds[size].append(int(batch.lengths[np.concatenate(some)].sum()) / took)
    return {size: statistics.median(each) for size, each in speeds.items()}


def measure_device(engine: SentenceTransformerEngine, batch: Tokenised, parts: Parts) -> None:
    """Find how long the device works while texts go through it, and how long it copies."""
    batches = cut(engine, batch, engine.batch_tokens)[:WATCHED_BATCHES]
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run(engine, batch, batches)
    spans, copies = [], []
    for event in profiler.events() or ():
        if str(event.device_type).endswith("CUDA"):
            span = (event.time_range.start, event.time_range.end)
            spans.append(span)
            if "memcpy" in event.name.lower():
                copies.append(span)
    if spans:
        whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
        parts.busy, parts.copying = union(spans) / whole, union(copies) / whole
        parts.kernels = (len(spans) - len(copies)) / len(batches)


def union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of what some spans of time cover together."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def measure_host(engine: SentenceTransformerEngine, batch: Tokenised, parts: Parts) -> None:
    """Find what the host needs for a device batch: all of it, its features, and without pins."""
    batches = cut(engine, batch, engine.batch_tokens)[:WATCHED_BATCHES]

    def median_seconds(work: Callable[[NDArray[np.intp]], Any]) -> float:
        seconds = []
        for rows in batches:
            wait(engine)
            began = time.perf_counter()
            work(rows)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    parts.start_seconds = median_seconds(lambda rows: engine.start(batch, rows))
    parts.features_seconds = median_seconds(lambda rows: engine.features(batch, rows))
    pinned, engine._to_device = engine._to_device, lambda values: values.to(engine.device)  # type: ignore[method-assign] # noqa: SLF001 # to be measured without
    try:
        parts.pageable_seconds = median_seconds(lambda rows: engine.features(batch, rows))
    finally:
        engine._to_device = pinned  # type: ignore[method-assign] # noqa: SLF001 # as before


def measure_compiled(engine: SentenceTransformerEngine, batch: Tokenised, parts: Parts) -> None:
    """Find what compiled layers give."""
    batches = cut(engine, batch, engine.batch_tokens)
    total = int(batch.lengths.sum())
    began = time.perf_counter()
    try:
        compiled = compile_layers(engine)
        run(compiled, batch, batches)
        parts.compile_seconds = time.perf_counter() - began
        parts.compiled = total / statistics.median(run(compiled, batch, batches) for _ in range(3))
    except Exception as error:  # noqa: BLE001 # a compiler may raise anything
        parts.why_not_compiled = " ".join(f"{type(error).__name__}: {error}".split())[:200]


def wait(engine: SentenceTransformerEngine) -> None:
    """Wait until the device has nothing to do."""
    if engine.asynchronous:
        torch.cuda.synchronize()


def measure(name: str, directory: Path, device: str, rounds: int) -> tuple[Any, ...]:
    """Open a model and measure all but what compiling gives."""
    texts = mixed(directory, CHUNKS[name] // SHARE)
    began = time.perf_counter()
    spec = JobSpec(model=str(find_model(name, directory)), engine="torch")
    engine = SentenceTransformerEngine.open(spec, device, None)
    loaded = time.perf_counter()
    batch = engine.tokenise(texts)
    tokenised = time.perf_counter()
    total = int(batch.lengths.sum())
    parts = Parts(
        model=name,
        chunks=len(texts),
        tokens=total,
        dtype=engine.fingerprint["dtype"],
        load_seconds=loaded - began,
        batch_tokens=engine.batch_tokens,
        peak=engine.peak_flops_per_second,
        flops=engine.flops(batch.lengths),
        tokenise=total / (tokenised - loaded),
    )
    parts.padded = measure_sizes(engine, batch, rounds)
    try:
        undo = unpad(engine)
    except ModelError as error:
        parts.why_padded = str(error)
    else:
        try:
            parts.unpadded = measure_sizes(engine, batch, rounds)
        except Exception as error:  # noqa: BLE001 # a kernel may raise anything
            parts.why_padded = f"{type(error).__name__}: {error}"
        if parts.why_padded or max(parts.padded.values()) > max(parts.unpadded.values()):
            undo()
    if engine.asynchronous:
        measure_device(engine, batch, parts)
    measure_host(engine, batch, parts)
    return engine, batch, parts


def main() -> None:
    """Measure some models, and keep the figures of each as soon as there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(CHUNKS), default=list(CHUNKS))
    parser.add_argument("--device", choices=tuple(BATCH_SIZES), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--build", type=Path, default=BUILD)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # as in a worker
    torch.set_num_threads(len(available_cores()))
    device = "cuda:0" if arguments.device == "cuda" else arguments.device
    for name in arguments.models:
        engine, batch, parts = measure(name, arguments.build, device, arguments.rounds)
        parts.save(arguments.build / "gpu")
        if arguments.compile:
            measure_compiled(engine, batch, parts)
            parts.save(arguments.build / "gpu")
        sys.stdout.write(msgspec.json.encode(parts).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
