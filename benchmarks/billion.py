"""What a billion chunks take, reckoned from what some hundred thousand took here.

    python -m benchmarks.billion [--chunks N] [--report docs/scale.md]

Two jobs of other sizes are run through a private farm with the null engine, once with vectors
through the server and once past it. What the second took more than the first is what chunks
cost; what both took is what a job costs. Rates of devices are those of docs/gpu.md, where the
commands that measured them stand.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.marked import write_marked
from benchmarks.transport import DIMENSIONS, TEXT_BYTES, WAYS, run
from embedfarm.collector.manifest import MANIFEST_FILE
from embedfarm.collector.text_digests import DIGESTS_FILE
from embedfarm.contract.settings import Settings

BILLION: Final = 10**9
FLOAT_BYTES: Final = 4
COMMAND: Final = "embed (producer and collector)"
SERVER: Final = "server"
PART: Final = "billion chunks"
HOUR: Final = 3600.0


class Model(NamedTuple):
    """A model on one H100: dimensions, and chunks/s of the farm on docs/gpu.md's texts."""

    name: str
    dimensions: int
    chunks_per_second: float
    how: str


MODELS: Final = (
    Model("all-MiniLM-L6-v2", 384, 36_300, "docs/gpu.md, the whole farm"),
    Model("qwen3-embedding-0.6b", 1024, 2_900, "docs/gpu.md, the whole farm"),
)


@dataclass(frozen=True)
class Took:
    """What a job took.

    Attributes:
        chunks_per_second: Rate of the whole command, its start and end included.
        server_seconds: Processor time of the server.
        server_bytes: Peak of the server's memory.
        command_bytes: Peak of the command's memory.
        manifest_bytes: Size of the manifest.
        digest_bytes: Size of the digests of the texts.
    """

    chunks: int
    chunks_per_second: float
    server_seconds: float
    server_bytes: int
    command_bytes: int
    manifest_bytes: int
    digest_bytes: int


@dataclass(frozen=True)
class Cost:
    """What each chunk adds, and what a job takes without any."""

    each: float
    fixed: float

    def of(self, chunks: int) -> float:
        """Return what so many chunks take."""
        return self.fixed + chunks * self.each


def cost_of(small: Took, large: Took, name: str) -> Cost:
    """Return the line through two jobs; what did not grow costs a chunk nothing."""
    first, second = getattr(small, name), getattr(large, name)
    each = max(0.0, (second - first) / (large.chunks - small.chunks))
    return Cost(each, max(0.0, first - each * small.chunks))


def take(chunks: int, by: str) -> Took:
    """Run a job, and return what it took."""
    with tempfile.TemporaryDirectory(prefix="embedfarm-bench-") as directory:
        report = run(Path(directory), chunks, 2, "parquet", by)
        out = Path(directory) / "vectors"
        return Took(
            chunks,
            chunks / report.wall_seconds,
            report.usage[SERVER].cpu_seconds,
            report.usage[SERVER].rss_bytes_max,
            report.usage[COMMAND].rss_bytes_max,
            (out / MANIFEST_FILE).stat().st_size,
            (out / DIGESTS_FILE).stat().st_size,
        )


def rows_of_models() -> Iterable[Sequence[str]]:
    """Yield what a billion chunks need of devices and disks, for each model."""
    part_bytes = Settings().part_bytes_max
    for model in MODELS:
        hours = BILLION / model.chunks_per_second / HOUR
        total = BILLION * model.dimensions * FLOAT_BYTES
        yield (
            model.name,
            f"{model.chunks_per_second:,.0f}",
            f"{hours:,.1f}",
            f"{hours / 6:,.1f}",
            f"{total / 1e12:.1f} TB, half of it as float16",
            f"{total / part_bytes:,.0f}",
        )


def rows_of_results(took: dict[str, tuple[Took, Took]]) -> Iterable[Sequence[str]]:
    """Yield what a billion chunks ask of the server and the command, for each way of results."""
    for results, (small, large) in took.items():
        seconds = cost_of(small, large, "server_seconds").of(BILLION)
        through = TEXT_BYTES + (DIMENSIONS * FLOAT_BYTES if results == "inline" else 0)
        yield (
            results,
            f"{large.chunks_per_second:,.0f}",
            f"{BILLION / large.chunks_per_second / HOUR:.1f}",
            f"{seconds / HOUR:.1f}",
            f"{max(small.server_bytes, large.server_bytes) / 1e6:,.0f} MB",
            f"{BILLION * through / 1e12:.1f} TB",
            f"{small.command_bytes / 1e6:,.0f} and {large.command_bytes / 1e6:,.0f} MB",
        )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(each)} |" for each in lines)


def describe(took: dict[str, tuple[Took, Took]]) -> str:
    """Return the tables, and what grows with the number of chunks on the disk."""
    small, large = took["stored"]
    digests = cost_of(small, large, "digest_bytes").of(BILLION)
    manifest = cost_of(small, large, "manifest_bytes").of(BILLION)
    models = table(
        ["model", "chunks/s on an H100", "hours of one", "hours of six", "vectors", "parts"],
        rows_of_models(),
    )
    results = table(
        [
            "vectors", "chunks/s here", "hours at that rate", "server's core, hours",
            "server's memory", "through its log", "command's memory",
        ],
        rows_of_results(took),
    )  # fmt: skip
    what = f"{small.chunks:,} and {large.chunks:,} chunks of {TEXT_BYTES} bytes"
    return (
        f"{models}\n\nJobs of {what} and {DIMENSIONS} floats, all processes on two cores; rates "
        f"are those of the larger:\n\n{results}\n\nOf a billion the digests of the texts take "
        f"{digests / 1e9:.0f} GB on the disk, and the manifest {manifest / 1e6:,.0f} MB."
    )


def main() -> None:
    """Run the jobs, and print what a billion chunks take, or write it into a document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=800_000, help="of the larger job")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    sizes = arguments.chunks // 4, arguments.chunks
    took = {each: (take(sizes[0], each), take(sizes[1], each)) for each in WAYS}
    said = describe(took)
    sys.stdout.write(said + "\n")
    if arguments.report:
        write_marked(arguments.report, PART, said)


if __name__ == "__main__":
    main()
