"""The vector cache: what finding and keeping a vector takes, and a job of which half is there.

    python -m benchmarks.vector_cache [--rates] [--dimensions 384] [--entries 100000]
                                      [--corpus short|mixed] [--chunks 20000] [--model M]

With `--rates`, vectors per second of one core, in micro-batches of 8,192 texts of 200 characters.
Else a corpus is embedded with a cache, and then another one, of which every second text is of the
first: without a cache, with it, and once more, when all of it is there. Each vector is compared
with that of the run without.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np

import embedfarm
from benchmarks.corpora import MODEL
from benchmarks.reuse import CORPORA, SEED, compare, embed, forward_seconds, write
from embedfarm.workers.vector_cache import VectorCache

VARIABLE: Final = "EMBEDFARM_VECTOR_CACHE_DIRECTORY"
BATCH: Final = 8192
TEXT: Final = "x" * 192
SPARE: Final = 3  # times the bytes of all vectors, of which none is to go


def measure_rates(home: Path, dimensions: int, entries: int) -> None:
    """Measure digests, misses, hits and new entries."""
    random_vectors = np.random.default_rng(SEED).standard_normal((BATCH, dimensions))
    vectors = random_vectors.astype(np.float32)
    cache = VectorCache(home, max(64 << 20, SPARE * entries * 4 * dimensions))
    spent = dict.fromkeys(("digests", "misses", "new", "hits"), 0.0)
    batches = []
    for first in range(0, entries, BATCH):
        texts = [f"{number:08}{TEXT}" for number in range(first, first + BATCH)]
        began = time.perf_counter()
        keys = [blake2b(text.encode(), digest_size=16, key=b"salt").digest() for text in texts]
        looked = time.perf_counter()
        cache.find(keys)
        missed = time.perf_counter()
        cache.keep(dict(zip(keys, vectors, strict=True)))
        kept = time.perf_counter()
        spent["digests"] += looked - began
        spent["misses"] += missed - looked
        spent["new"] += kept - missed
        batches.append(keys)
    began = time.perf_counter()
    found = sum(len(cache.find(keys)) for keys in batches)
    spent["hits"] = time.perf_counter() - began
    total = BATCH * len(batches)
    if found != total:
        raise SystemExit(f"{found:,} of {total:,} vectors were found")
    size = sum(path.stat().st_size for path in home.iterdir())
    rates = ", ".join(f"{name} {total / seconds:,.0f}/s" for name, seconds in spent.items())
    sys.stdout.write(
        f"{total:,} vectors of {dimensions} dimensions, {size / total:,.0f} bytes each: "
    )
    sys.stdout.write(f"{rates}\n")


def measure(corpus: Path, out: Path, model: str) -> str:
    """Embed a corpus, and describe how long it took and how much of it was cached."""
    seconds = embed(corpus, out, model, "--format", "npy")
    manifest = embedfarm.open(out).manifest
    cached = sum(each["chunks_cached"] for each in manifest.accounts.values())
    return (
        f"{out.name}: {manifest.count:,} chunks, {cached:,} cached; {seconds:.1f} s, of which "
        f"{manifest.embed_seconds:.1f} s from the first block to the last result; forward passes "
        f"{forward_seconds(out):.1f} s\n"
    )


def measure_jobs(home: Path, texts: Sequence[str], model: str) -> None:
    """Embed a corpus, and one of which half is of the first, with a cache and without."""
    half = len(texts) // 3
    before = list(texts[: 2 * half])
    now = [*before[:half], *texts[2 * half :]]
    random.Random(SEED).shuffle(now)  # noqa: S311 # no secret: the same corpus each time
    first, second = write(home / "first.jsonl", before), write(home / "second.jsonl", now)
    whole, old, part, again = (home / name for name in ("without", "first", "half", "all"))
    sys.stdout.write(measure(second, whole, model))
    os.environ[VARIABLE] = str(home / "cache")
    try:
        sys.stdout.write(measure(first, old, model))
        for out in (part, again):
            sys.stdout.write(measure(second, out, model))
            compare([out, whole, old], [], now)
    finally:
        del os.environ[VARIABLE]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--corpus", choices=CORPORA, default="short")
    parser.add_argument("--chunks", type=int, default=20_000)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="embedfarm-cache-") as name:
        home = Path(name)
        if options.rates:
            measure_rates(home, options.dimensions, options.entries)
            return
        measure_jobs(home, CORPORA[options.corpus](home, options.chunks), options.model)


if __name__ == "__main__":
    main()
