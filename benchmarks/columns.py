"""Columns kept beside the vectors: what they cost, and whether they are those of the corpus.

    python -m benchmarks.columns [--chunks 2000000] [--rounds 3] [--dimensions 384]

A corpus of Parquet with nested, dictionary and decimal columns beside 200-byte texts is embedded
with the null engine, in turns without and with `--keep all`, everything on this machine. Every
column of the output is compared with the corpus; the report has the ratio of the times, that of the
processors' time, which says more where other programs run, and how much memory the command took.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.processes import Finished, run_watched
from embedfarm.collector.column_rows import same_rows

TEXT_BYTES: Final = 200
ROWS_AT_A_TIME: Final = 100_000
MEBIBYTE: Final = 1 << 20
FILLER: Final = "the quick brown fox jumps over the lazy dog " * 5
KINDS: Final = 1000


def rows(first: int, count: int) -> pa.Table:
    """Return rows of the corpus."""
    numbers = np.arange(first, first + count)
    names = pa.array([f"author {n % 5000}" for n in numbers])
    years = pa.array((numbers % 60 + 1960).astype(np.int16))
    offsets = pa.array(np.arange(0, 2 * count + 1, 2, dtype=np.int32))
    tags = pa.ListArray.from_arrays(offsets, pa.array([f"tag {n % 97}" for n in range(2 * count)]))
    kinds = pa.array([f"kind {n}" for n in range(KINDS)])
    return pa.table(
        {
            "text": [f"{n:012d} {FILLER}"[:TEXT_BYTES] for n in numbers],
            "author": pa.StructArray.from_arrays([names, years], ["name", "born"]),
            "tags": tags,
            "kind": pa.DictionaryArray.from_arrays((numbers * 7 % KINDS).astype(np.int32), kinds),
            "price": pa.array([Decimal(int(n)) / 100 for n in numbers], pa.decimal128(12, 2)),
            "made": pa.array(numbers * 10**9).cast(pa.timestamp("us", tz="UTC")),
        }
    )


def write_corpus(path: Path, count: int) -> None:
    """Write the corpus."""
    with pq.ParquetWriter(path, rows(0, 1).schema) as writer:
        for first in range(0, count, ROWS_AT_A_TIME):
            writer.write_table(rows(first, min(ROWS_AT_A_TIME, count - first)))


def embed(corpus: Path, out: Path, dimensions: int, *words: str) -> Finished:
    """Embed the corpus, and watch all processes."""
    model = ["--model", f"null:{dimensions}", "--devices", "cpu", "--workers", "1", "--json"]
    command = [sys.executable, "-m", "embedfarm", "embed", str(corpus), "--out", str(out)]
    return run_watched([*command, *model, *words])


def compare(corpus: Path, out: Path) -> int:
    """Compare all columns of an output with its corpus, part by part, and count the rows.

    Raises:
        SystemExit: A column is another one.
    """
    table, first = pq.read_table(corpus, memory_map=True), 0
    for part in sorted(out.glob("part-*.parquet")):
        found = pq.read_table(part, columns=table.column_names)
        if not same_rows(found, table.slice(first, found.num_rows)):
            raise SystemExit(f"{part}: a column is not that of the corpus")
        first += found.num_rows
    if first != table.num_rows:
        raise SystemExit(f"{out} has {first} of {table.num_rows} rows")
    return first


def processor_seconds(finished: Finished) -> float:
    """Return the processor time of all processes of a run."""
    return sum(usage.cpu_seconds for usage in finished.usage.values())


def memory(finished: Finished) -> int:
    """Return the most bytes that the command itself had in memory."""
    return max(usage.rss_bytes_max for name, usage in finished.usage.items() if "embed" in name)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dimensions", type=int, default=384)
    options = parser.parse_args()
    ratios: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="embedfarm-columns-") as name:
        corpus, out = Path(name) / "corpus.parquet", Path(name) / "out"
        write_corpus(corpus, options.chunks)
        for _ in range(options.rounds):
            spent: list[list[float]] = []
            for words in ((), ("--keep", "all")):
                finished = embed(corpus, out, options.dimensions, *words)
                spent.append([finished.wall_seconds, processor_seconds(finished)])
                size = memory(finished) / MEBIBYTE
                what = " ".join(words) or "without columns"
                sys.stdout.write(
                    f"{what}: {spent[-1][0]:.1f} s, {spent[-1][1]:.1f} s of processors, command at "
                    f"most {size:.0f} MiB\n"
                )
                if words:
                    sys.stdout.write(f"all columns of {compare(corpus, out):,} rows are equal\n")
                shutil.rmtree(out)
            ratios.append([kept / none for none, kept in zip(*spent, strict=True)])
    wall, processors = (statistics.median(each) for each in zip(*ratios, strict=True))
    sys.stdout.write(
        f"with --keep all: {wall:.3f} of the time, {processors:.3f} of the processors' time\n"
    )


if __name__ == "__main__":
    main()
