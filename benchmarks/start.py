"""Times that people wait before anything happens, here and in another checkout, alternating.

    python -m benchmarks.start [--beside ../other] [--rounds 5]

Each time is the wall time of a whole process, the median of the rounds; a checkout is a directory
with a virtual environment in `.venv`. What a checkout cannot do is left out.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import typer

TEXTS: Final = 10
WARM: Final = """
import statistics, sys, time
import embedfarm
with embedfarm.Farm() as farm:
    farm.encode(["warm up"])
    took = []
    for _ in range(9):
        began = time.perf_counter()
        farm.encode(["a text that somebody asks about"])
        took.append(time.perf_counter() - began)
    print(statistics.median(took))
"""


def commands(tree: Path, place: Path, number: int) -> Mapping[str, Sequence[str]]:
    """Return what is timed in a checkout in a round, by name; round 0 is not counted."""
    python, corpus = str(tree / ".venv/bin/python"), str(place / "ten.jsonl")
    verb = [str(tree / ".venv/bin/embedfarm")]
    out = str(place / f"out-{number}")
    return {
        "import embedfarm": [python, "-c", "import embedfarm"],
        "embedfarm --help": [*verb, "--help"],
        f"embed {TEXTS} lines": [*verb, "embed", corpus, "--out", out],
        "search": [*verb, "search", out, "line five"],
    }


def run(command: Sequence[str], tree: Path) -> float | None:
    """Run a command in a checkout; return its seconds, None if it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=tree, capture_output=True, check=False)
    return time.perf_counter() - began if done.returncode == 0 else None


def warm(tree: Path) -> float | None:
    """Return the seconds in which a warm farm gives the vector of a text, None without one."""
    command = [str(tree / ".venv/bin/python"), "-c", WARM]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    return float(done.stdout) if done.returncode == 0 else None


def main() -> int:
    """Time each command in each checkout, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    trees = [Path.cwd(), *(each.resolve() for each in arguments.beside)]
    took: dict[tuple[str, Path], list[float | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tree in trees:
            place = Path(folder) / str(trees.index(tree))
            place.mkdir()
            lines = (f'{{"text": "line {number} of ten"}}\n' for number in range(TEXTS))
            (place / "ten.jsonl").write_text("".join(lines))
        for round_number in range(1 + arguments.rounds):
            for tree in trees:
                place = Path(folder) / str(trees.index(tree))
                for name, command in commands(tree, place, round_number).items():
                    seconds = run(command, tree)
                    if round_number:
                        took.setdefault((name, tree), []).append(seconds)
    for tree in trees:
        took["first vector of a warm Farm", tree] = [warm(tree)]
    typer.echo(
        f"| seconds | {' | '.join(tree.name for tree in trees)} |\n|---{'|---:' * len(trees)}|"
    )
    for name in dict.fromkeys(name for name, _ in took):
        cells = (_median(took[name, tree]) for tree in trees)
        typer.echo(f"| {name} | {' | '.join(cells)} |")
    return 0


def _median(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return f"{statistics.median(known):.3f}" if known else "-"


if __name__ == "__main__":
    sys.exit(main())
