"""Engines and precisions side by side on one device: how fast each is, and what it loses."""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.contract.similarity import cosine
from embedfarm.workers.cores import available_cores
from embedfarm.workers.engines.engine import Engine, Tokenised
from embedfarm.workers.engines.measurement import measure_peak
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.engines.sentence_transformer import resolve_dtype
from embedfarm.workers.packing import pack

NEIGHBOURS: Final = 10
ROWS_AT_A_TIME: Final = 1000


@dataclass
class Contender:
    """An engine in one precision.

    Attributes:
        engine: Name of the engine.
        dtype: Type in which the engine computes.
        reason: Why the engine cannot be had, "" if it can.
        tokens_per_second: Median of the rounds, tokenising not included.
        times_first: Speed over that of the first one, median of the ratios within each round.
        peak_ratio: Share of what the device reaches in multiplying matrices; 0 when unknown.
        cosine_mean: Mean cosine with the vectors of the first one, over all texts.
        cosine_least: Least cosine with the vectors of the first one, that of the worst text.
        recall: Share of each text's ten nearest neighbours that stays among them, on average.
    """

    engine: str
    dtype: str
    reason: str = ""
    tokens_per_second: float = 0.0
    times_first: float = 0.0
    peak_ratio: float = 0.0
    cosine_mean: float = 0.0
    cosine_least: float = 0.0
    recall: float = 0.0
    seconds: list[float] = field(default_factory=list)


def contenders(device: str) -> list[Contender]:
    """Return what a device can be asked for; the others are compared with the first one."""
    half = resolve_dtype("auto", device)
    if device != "cpu":
        dtypes = sorted({"float16", half})
        return [Contender("torch", dtype) for dtype in ("float32", *dtypes)]
    dtypes = ["float32"] if half == "float32" else ["float32", half]
    found = [Contender(engine, dtype) for dtype in dtypes for engine in ("torch", "openvino")]
    return [*found, Contender("openvino", "int8")]


def compare_engines(
    spec: JobSpec, device: str, texts: Sequence[str], rounds: int, settings: Settings
) -> list[Contender]:
    """Embed texts with each engine in turn, round by round, with all cores.

    Args:
        spec: The job; its engine and dtype are overruled.
        device: torch's name of the device.
        texts: Texts to embed, at least two.
        rounds: How often each engine embeds the texts.
        settings: Settings, which say where models are kept.

    Raises:
        ModelError: The model is not to be had at all.
    """
    torch.set_num_threads(len(available_cores()))
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    all_of_them = contenders(device)
    engines: list[Engine] = []
    for each in all_of_them:
        wanted = msgspec.structs.replace(spec, engine=each.engine, dtype=each.dtype)
        try:
            engines.append(open_engine(wanted, device, settings))
        except ModelError as error:
            if not engines:
                raise
            each.reason = str(error)
    ran = [each for each in all_of_them if not each.reason]
    batch = engines[0].tokenise(texts)
    vectors, peaks = _run_rounds(ran, engines, batch, rounds, torch.device(device))
    for each, engine, made in zip(ran, engines, vectors, strict=True):
        seconds = statistics.median(each.seconds)
        pairs = zip(ran[0].seconds, each.seconds, strict=True)
        each.tokens_per_second = float(batch.lengths.sum()) / seconds
        each.times_first = statistics.median(theirs / ours for theirs, ours in pairs)
        if each.dtype in peaks:
            each.peak_ratio = engine.flops(batch.lengths) / seconds / peaks[each.dtype]
        cosines = cosine(made, vectors[0])
        each.cosine_mean, each.cosine_least = float(cosines.mean()), float(cosines.min())
        each.recall = recall(made, vectors[0])
    return all_of_them


def _run_rounds(
    ran: Sequence[Contender],
    engines: Sequence[Engine],
    batch: Tokenised,
    rounds: int,
    device: torch.device,
) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
    """Return each contender's vectors, and the device's best in operations per second by dtype.

    That best is measured between the runs: on a machine that others use too, one moment says
    little.
    """
    vectors: list[NDArray[np.float32]] = []
    peaks: dict[str, float] = {}
    for _ in range(rounds):
        vectors = []
        for each, engine in zip(ran, engines, strict=True):
            began = time.perf_counter()
            vectors.append(embed(engine, batch))
            each.seconds.append(time.perf_counter() - began)
            if each.dtype != "int8":
                peak = measure_peak(device, getattr(torch, each.dtype))
                peaks[each.dtype] = max(peak, peaks.get(each.dtype, 0.0))
    return vectors, peaks


def embed(engine: Engine, batch: Tokenised) -> NDArray[np.float32]:
    """Embed all rows in the farm's own device batches."""
    batches = pack(batch.lengths, engine.batch_tokens, engine.launch_tokens, padded=engine.padded)
    vectors = np.empty((len(batch.lengths), engine.dimensions), np.float32)
    for rows in batches:
        vectors[rows] = engine.forward(batch, rows)
    return vectors


def recall(vectors: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """Return the share of each text's nearest neighbours that stays among them, on average."""
    count = min(NEIGHBOURS, len(vectors) - 1)
    found, expected = _neighbours(vectors, count), _neighbours(exact, count)
    kept = [len(np.intersect1d(*each)) for each in zip(found, expected, strict=True)]
    return float(np.mean(kept)) / count


def _neighbours(vectors: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Return the indices of the nearest other texts by cosine, shape (n, count)."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found = []
    for first in range(0, len(unit), ROWS_AT_A_TIME):
        scores = unit[first : first + ROWS_AT_A_TIME] @ unit.T
        np.fill_diagonal(scores[:, first:], -np.inf)
        found.append(np.argpartition(-scores, count - 1, axis=1)[:, :count])
    return np.concatenate(found)
