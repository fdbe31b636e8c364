"""Benchmark of a resume near the end of a large corpus, beside reading what is left of it.

    python -m benchmarks.resume [--gigabytes N] [--share S]

The corpus is JSON Lines of 4,000 bytes a row; the null engine makes vectors of four floats. The
command is interrupted when that share is on disk, and runs again: once as it is, and once with the
marks taken out of its journal, so that it reads everything. Beside both: how long it takes to read
what is left, and all of it, in this process.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from embedfarm.readers import CorpusOptions, Cursor, fail_on_bad_row, read_corpus
from embedfarm.readers.corpus_digest import FRESH_SECONDS

TEXT_BYTES: Final = 4000
GIGABYTE: Final = 10**9
PART_BYTES: Final = 20_000 * 4 * 4
POLL_SECONDS: Final = 0.02


def write_corpus(path: Path, size: int) -> int:
    """Write a corpus of about `size` bytes of distinct texts; return its number of rows."""
    filler = "the quick brown fox jumps over the lazy dog " * (TEXT_BYTES // 40)
    rows = 0
    with path.open("w", encoding="ascii") as file:
        while file.tell() < size:
            for _ in range(1000):
                file.write(json.dumps({"text": f"{rows:012d} {filler}"[:TEXT_BYTES]}) + "\n")
                rows += 1
    return rows


def read(corpus: Path, cursor: Cursor) -> float:
    """Return the seconds that it takes to read a corpus from a place on."""
    began = time.monotonic()
    for _ in read_corpus([str(corpus)], CorpusOptions(), fail_on_bad_row, cursor=cursor):
        pass
    return time.monotonic() - began


def command(corpus: Path, out: Path) -> list[str]:
    """Return the command that embeds the corpus."""
    program = "from embedfarm.cli import main; main()"
    words = ["embed", str(corpus), "--out", str(out), "--model", "null:4", "--devices", "cpu"]
    return [sys.executable, "-c", program, *words, "--format", "npy", "--workers", "1"]


def journal_of(out: Path) -> Path:
    """Return the path of the journal, which lists the parts of an output."""
    return out / ".embedfarm" / "parts.jsonl"


def rows_done(out: Path) -> int:
    """Return the number of rows that are on disk."""
    path = journal_of(out)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    part = json.loads(whole[-1])["part"] if whole else {"start": 0, "count": 0}
    return int(part["start"]) + int(part["count"])


def embed_until(corpus: Path, out: Path, rows: int) -> None:
    """Run the command until so many rows are on disk, and interrupt it.

    Raises:
        RuntimeError: The command ended before.
    """
    wait = threading.Event()
    with subprocess.Popen(
        command(corpus, out), stdout=subprocess.DEVNULL, env=environment()
    ) as process:
        while rows_done(out) < rows:
            if process.poll() is not None:
                raise RuntimeError("the command ended before it was interrupted")
            wait.wait(POLL_SECONDS)
        process.send_signal(signal.SIGINT)


def resume(corpus: Path, out: Path) -> float:
    """Run the command to its end; return the seconds that it takes."""
    began = time.monotonic()
    subprocess.run(command(corpus, out), check=True, stdout=subprocess.DEVNULL, env=environment())
    return time.monotonic() - began


def environment() -> dict[str, str]:
    """Return the commands' environment, in which an output has many parts."""
    return os.environ | {"EMBEDFARM_PART_BYTES_MAX": str(PART_BYTES)}


def forget_marks(out: Path) -> None:
    """Take the marks out of a journal."""
    path = journal_of(out)
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    lines = [
        json.dumps({k: v for k, v in entry.items() if k != "mark"}) + "\n" for entry in entries
    ]
    path.write_text("".join(lines))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--share", type=float, default=0.99)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        corpus, out, copy = directory / "corpus.jsonl", directory / "out", directory / "copy"
        rows = write_corpus(corpus, int(arguments.gigabytes * GIGABYTE))
        threading.Event().wait(2 * FRESH_SECONDS)  # a file that was just written leaves no marks
        embed_until(corpus, out, int(arguments.share * rows))
        done = rows_done(out)
        shutil.copytree(out, copy)
        (copy / ".embedfarm" / "job-id").unlink()
        shutil.rmtree(copy / ".embedfarm" / "server", ignore_errors=True)
        forget_marks(copy)
        size = corpus.stat().st_size
        left = Cursor(0, size * done // rows // (size // rows) * (size // rows), done)
        figures = {
            "rows on disk when it was interrupted": f"{done:,} of {rows:,}",
            "reading what is left, alone": f"{read(corpus, left):.2f} s",
            "reading all, alone": f"{read(corpus, Cursor()):.2f} s",
            "the command again": f"{resume(corpus, out):.2f} s",
            "the command again without marks": f"{resume(corpus, copy):.2f} s",
        }
    for what, figure in figures.items():
        print(f"{what:40} {figure}")  # noqa: T201 -- its output


if __name__ == "__main__":
    main()
