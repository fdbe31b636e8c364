"""Canaries of one model by every engine and precision: do they agree, and do others not?

    python -m benchmarks.canaries

A run compares the canaries that two engines make for one job, as a worker of a job does, and as
`embedfarm check` does. Engines that compute in the same type must agree, whatever the job asks for
and whatever goes through the model together; what is another model must not.
"""

import argparse
import itertools
import json
import logging
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from benchmarks.corpora import MODEL
from benchmarks.random_models import architectures, build
from embedfarm.contract import model_files
from embedfarm.contract.canaries import TEXTS, Canaries, canaries_of, disagreement, likeness
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.canary_keeper import embed_texts
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.opening import open_engine

ENGINES: Final = (
    ("torch", "float32"), ("openvino", "float32"), ("torch", "bfloat16"), ("openvino", "bfloat16"),
    ("openvino", "int8"),
)  # fmt: skip
JOBS: Final[tuple[dict[str, Any], ...]] = (
    {}, {"prompt": "query: "}, {"normalize": True}, {"max_length": 16}, {"max_length": 128},
    {"dimensions": 64, "normalize": True}, {"long": "error"},
    {"long": "windows", "max_length": 64, "long_overlap": 8},
)  # fmt: skip
NOISE: Final = 0.01


def make(engine: Engine, *, mixed: bool) -> Canaries:
    """Make an engine's canaries, with `mixed` among other texts and in another order."""
    if not mixed:
        return canaries_of(embed_texts(engine, TEXTS))
    others = [f"{text[:40]} and something else {number}" for number, text in enumerate(TEXTS)]
    made = embed_texts(engine, [*others, *TEXTS[::-1]])
    return canaries_of(made[len(others) :][::-1])


def compare(model: str, settings: Settings) -> Iterator[tuple[str, str, float]]:
    """Yield for each run the pair of engines, in which way they disagree, and the least cosine."""
    opened = [
        open_engine(JobSpec(model=model, engine=name, dtype=dtype), "cpu", settings)
        for name, dtype in ENGINES
    ]
    for number, asked in enumerate(JOBS, start=1):
        sys.stderr.write(f"{model}: job {number} of {len(JOBS)}\n")
        made: defaultdict[str, list[tuple[str, Canaries]]] = defaultdict(list)
        for (name, dtype), engine in zip(ENGINES, opened, strict=True):
            variant = engine.for_job(JobSpec(model=model, engine=name, dtype=dtype, **asked))
            if variant is None:
                raise TypeError(f"{name} {dtype} does no other job")
            for mixed in (False, True):
                made[dtype].append((name, make(variant, mixed=mixed)))
        for dtype, each in made.items():
            for (one, known), (other, again) in itertools.combinations(each, 2):
                least = likeness(known.matrix(), again.matrix()).least
                yield f"{one} and {other}, {dtype}", disagreement(known, again, dtype), least


def others(directory: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield what is not the model: in words, the model's directory, and what a job asks for."""
    yield "bfloat16", MODEL, {"dtype": "bfloat16"}
    yield "float16", MODEL, {"dtype": "float16"}
    yield "int8", MODEL, {"dtype": "int8", "engine": "openvino"}
    yield "another prompt", MODEL, {"prompt": "query: "}
    yield f"{NOISE:.0%} noise on the weights", str(noisy(directory / "noisy")), {}
    yield "another tokenizer", str(other_tokenizer(directory / "tokenizer")), {}
    build(architectures()["all-minilm-l6"], directory / "random")
    yield "another model of the size", str(directory / "random" / "model"), {}


def noisy(directory: Path) -> Path:
    """Write the model with noise on each weight."""
    model = SentenceTransformer(str(model_files.resolve(MODEL)), device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(1 + NOISE * torch.randn(weights.shape, generator=generator))
    model.save(str(directory))
    return directory


def other_tokenizer(directory: Path) -> Path:
    """Write the model with two words of its vocabulary exchanged."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(model_files.resolve(MODEL), directory, ignore=ignored)
    file = directory / "tokenizer.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    words = said["model"]["vocab"]
    words["the"], words["fox"] = words["fox"], words["the"]
    file.write_text(json.dumps(said), encoding="utf-8")
    return directory


def report(settings: Settings) -> Iterator[str]:
    """Yield the lines of two tables in Markdown, and the number of false alarms."""
    least: defaultdict[str, list[float]] = defaultdict(list)
    alarms = 0
    with tempfile.TemporaryDirectory() as home:
        build(architectures()["all-minilm-l6"], Path(home), seed=1)
        for model in (MODEL, str(Path(home) / "model")):
            for pair, words, cosine in compare(model, settings):
                least[pair].append(cosine)
                alarms += bool(words)
        yield "| engines that must agree | runs | least cosine |\n|---|---:|---:|"
        for pair, cosines in sorted(least.items()):
            yield f"| {pair} | {len(cosines)} | {min(cosines):.6f} |"
        yield f"\n{sum(map(len, least.values()))} runs, {alarms} false alarms.\n"
        spec = JobSpec(model=MODEL, engine="torch", dtype="float32")
        known = canaries_of(embed_texts(open_engine(spec, "cpu", settings), TEXTS))
        yield "| beside float32 | least cosine | mean cosine |\n|---|---:|---:|"
        for words, model, asked in others(Path(home)):
            other = JobSpec(**({"model": model, "engine": "torch", "dtype": "float32"} | asked))
            made = embed_texts(open_engine(other, "cpu", settings), TEXTS)
            found = likeness(known.matrix(), np.asarray(made))
            yield f"| {words} | {found.least:.5f} | {found.mean:.5f} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    logging.disable(logging.WARNING)
    for line in report(Settings()):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
