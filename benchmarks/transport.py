"""Benchmark of everything but the model: throughput and memory of the farm with the null engine.

    python -m benchmarks.transport [--chunks N] [--workers N] [--format F] [--by WAY] [--json]

200-byte texts from JSON Lines, vectors of 384 floats in one .npy or in Parquet, all
processes on this machine. Both go through the server, or past it: vectors in files with `--by
stored`, and with `--by reference` texts as well, which workers read where they lie; with `--format
stored` the output then lists these files, instead of having the vectors. The report says what each
process used, and so what bounds the farm.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import Usage, run_watched

TEXT_BYTES: Final = 200
DIMENSIONS: Final = 384
FORMATS: Final = ("npy", "parquet")
LISTED: Final = "stored"  # the format of lists, which has nothing to list inline
WAYS: Final = ("inline", "stored", "reference")
MEBIBYTE: Final = 1 << 20


@dataclass
class Report:
    """Figures of one run.

    Attributes:
        chunks: Number of chunks in the corpus.
        sink: Format of the output.
        by: How texts and vectors went.
        embed_seconds: Time from the first block read to the last commit.
        wall_seconds: Time of the whole command, its start and end included.
        usage: Usage by name of process.
    """

    chunks: int
    sink: str
    by: str
    embed_seconds: float
    wall_seconds: float
    usage: dict[str, Usage]

    @property
    def chunks_per_second(self) -> float:
        """Throughput from the first block read to the last commit."""
        return self.chunks / self.embed_seconds


def write_corpus(path: Path, chunks: int) -> None:
    """Write a corpus of `chunks` distinct texts of `TEXT_BYTES` bytes."""
    filler = "the quick brown fox jumps over the lazy dog " * 5
    with path.open("w", encoding="ascii") as file:
        for index in range(chunks):
            file.write(json.dumps({"text": f"{index:012d} {filler}"[:TEXT_BYTES]}) + "\n")


def run(
    directory: Path, chunks: int, workers: int, sink: str = "parquet", by: str = "inline"
) -> Report:
    """Embed `chunks` texts in `directory`, and watch all processes.

    Raises:
        CommandFailed: The farm failed.
    """
    corpus = directory / f"corpus-{chunks}.jsonl"
    write_corpus(corpus, chunks)
    words = ["embed", str(corpus), "--out", str(directory / "vectors"), "--json", "--format", sink]
    words += ["--model", f"null:{DIMENSIONS}", "--workers", str(workers), "--devices", "cpu"]
    if by != "inline":
        (directory / "stored").mkdir()
        words += ["--stored", str(directory / "stored")]
    if by == "reference":
        words += ["--texts-from", "source"]
    command = [sys.executable, "-c", "from embedfarm.cli import main; main()", *words]
    finished = run_watched(command)
    facts: dict[str, Any] = json.loads(finished.output)
    return Report(
        facts["count"], sink, by, facts["embed_seconds"], finished.wall_seconds, finished.usage
    )


def main() -> None:
    """Run once for each format and print the reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=600_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--format", choices=(*FORMATS, LISTED), help="default: npy, then parquet")
    parser.add_argument("--by", choices=WAYS, default="inline")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.format == LISTED and arguments.by == "inline":
        parser.error("--format stored needs --by stored or --by reference")
    for sink in [arguments.format] if arguments.format else FORMATS:
        with tempfile.TemporaryDirectory(prefix="embedfarm-bench-") as directory:
            report = run(Path(directory), arguments.chunks, arguments.workers, sink, arguments.by)
        sys.stdout.write(to_json(report) if arguments.json else to_table(report))


def to_json(report: Report) -> str:
    """Format the report as one JSON object, on a line."""
    peaks = {n: asdict(u) | {"rss_bytes": u.rss_bytes_max} for n, u in report.usage.items()}
    rate = {"chunks_per_second": report.chunks_per_second}
    return json.dumps(asdict(report) | rate | {"usage": peaks}) + "\n"


def to_table(report: Report) -> str:
    """Format the report for people."""
    size = f"{report.chunks:,} chunks of {TEXT_BYTES} bytes to {DIMENSIONS} floats"
    lines = [f"{size}, {report.by}, {report.sink}:"]
    speed = f"{report.chunks_per_second:,.0f} chunks/s over {report.embed_seconds:.1f} s"
    lines.append(f"{speed} ({report.wall_seconds:.1f} s with start and end)")
    lines.append(f"{'process':32}{'CPU s':>8}{'peak MiB':>10}")
    for name, usage in sorted(report.usage.items()):
        peak = usage.rss_bytes_max / MEBIBYTE
        lines.append(f"{name:32}{usage.cpu_seconds:8.1f}{peak:10.0f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
