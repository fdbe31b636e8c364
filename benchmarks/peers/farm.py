"""The whole farm: `embedfarm embed` with server, scheduler, workers, collector and Parquet."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Task, Vectors, read_task, report

MANIFEST = "_manifest.json"
EMBED = [sys.executable, "-c", "from embedfarm.cli import main; main()", "embed"]


def run(task: Task, directory: Path) -> dict[str, Any]:
    """Embed into `directory`, and return the figures that the command prints."""
    command = [*EMBED, str(task.texts), "--out", str(directory), "--model", str(task.model)]
    devices = "cpu" if task.device == "cpu" else "all"
    command += ["--devices", devices, "--workers", str(task.size), "--dtype", task.dtype, "--json"]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    figures: dict[str, Any] = json.loads(finished.stdout)
    return figures


def read_vectors(directory: Path) -> Vectors:
    """Read all vectors in order, shape (n, dimensions)."""
    # Not before the farm has ended: its memory is measured together with this process.
    import numpy as np  # noqa: PLC0415 # as said above
    import pyarrow as pa  # noqa: PLC0415 # as said above
    import pyarrow.parquet as pq  # noqa: PLC0415 # as said above

    parts = [pq.read_table(part)["embedding"] for part in sorted(directory.glob("part-*.parquet"))]
    column = pa.chunked_array([chunk for part in parts for chunk in part.chunks]).combine_chunks()
    return np.asarray(column.flatten()).reshape(len(column), -1)


def output_seconds(directory: Path) -> float:
    """Return the seconds from the last result to the complete output, by the clock of one host."""
    path = directory / MANIFEST
    embedded: float = json.loads(path.read_text(encoding="utf-8"))["embedded"]
    return max(0.0, path.stat().st_mtime - embedded)


def describe(directory: Path, figures: dict[str, Any]) -> dict[str, str]:
    """Describe the run by what its manifest says."""
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    workers = manifest["workers"].values()
    busy = sum(worker["seconds"] for worker in workers) / len(workers) / figures["embed_seconds"]
    accounts = manifest["accounts"].values()
    spent = figures["embed_seconds"] * len(workers)
    tokenised = sum(account["seconds"].get("tokenise", 0.0) for account in accounts) / spent
    padded = sum(account["padded_tokens"] for account in accounts)
    real = sum(account["real_tokens"] for account in accounts)
    return {
        "dtype": manifest["fingerprint"]["dtype"],
        "engine": ", ".join(sorted({account["engine"] for account in accounts})),
        "padding": f"{1 - real / padded:.1%}",
        "workers": str(len(workers)),
        "device idle": f"{1 - busy:.1%}",
        "tokenise": f"{tokenised:.1%}",
    }


def main() -> None:
    """Run the farm once."""
    task = read_task()
    if task.size and task.device != "cpu":
        sys.exit("a GPU has one worker")
    directory = task.out.with_suffix("")
    shutil.rmtree(directory, ignore_errors=True)
    figures = run(task, directory)
    report(
        task,
        read_vectors(directory),
        "embedfarm",
        seconds=figures["embed_seconds"] + output_seconds(directory),
        load_seconds=figures["load_seconds"],
        facts=describe(directory, figures),
    )
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
