"""Estimates of `embedfarm embed --plan` beside what the jobs took, on two CPU workers.

    python -m benchmarks.estimates [--only NAME …] [--scale 1.0]

Six corpora: three with a null model that takes as long as a device of 20,000 tokens a second would,
three with all-MiniLM-L6-v2. Among them are one whose texts grow longer from its first row to its
last, and one whose first half repeats in the second. Each is planned without a farm, so that a
sample is embedded for at most 9 s, and then embedded, by the same command without `--plan`. An hour
of a device costs 3,600, so that a cost is a second of a device. The time is that from the first
block to the last result, which the report of the command calls `embed_seconds`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.corpora import MODEL, long, mixed, short

NULL: Final = "null:384:20000"
COST: Final = 3600.0
COMMAND: Final = [sys.executable, "-m", "embedfarm", "embed"]
BAR: Final = 0.15


def growing(directory: Path, count: int) -> list[str]:
    """Docstrings, the shortest first."""
    return sorted(mixed(directory, count), key=len)


def doubled(directory: Path, count: int) -> list[str]:
    """Glosses, all of them twice."""
    return short(directory, count // 2) * 2


class Case(NamedTuple):
    """A corpus to be embedded with a model."""

    make: Callable[[Path, int], list[str]]
    chunks: int
    model: str


CASES: Final = {
    "short, null": Case(short, 60_000, NULL),
    "mixed, null": Case(mixed, 9_000, NULL),
    "growing, null": Case(growing, 9_000, NULL),
    "doubled, MiniLM": Case(doubled, 30_000, MODEL),
    "growing, MiniLM": Case(growing, 6_000, MODEL),
    "long, MiniLM": Case(long, 1_200, MODEL),
}


def run(corpus: Path, out: Path, model: str, *words: str) -> tuple[dict[str, Any], float]:
    """Run the command on two workers; return its report, and the seconds that it took in all."""
    began = time.monotonic()
    command = [*COMMAND, str(corpus), "--out", str(out), "--model", model, "--devices", "cpu"]
    done = subprocess.run(
        [*command, "--workers", "2", "--json", *words],
        env=os.environ | {"EMBEDFARM_DEVICE_COST_PER_HOUR": str(COST), "EMBEDFARM_REDIS_URL": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    return report, time.monotonic() - began


def measure(home: Path, case: Case, scale: float) -> dict[str, float]:
    """Plan a job and do it; return how far each estimate was off, and other figures."""
    texts = case.make(home, int(case.chunks * scale))
    corpus = home / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    out = home / "out"
    plan, planned_seconds = run(corpus, out, case.model, "--plan")
    done, _ = run(corpus, out, case.model)
    return {
        "plan": planned_seconds,
        "least": plan["seconds_p5"],
        "estimate": plan["seconds"],
        "most": plan["seconds_p95"],
        "took": done["embed_seconds"],
        "seconds": plan["seconds"] / done["embed_seconds"] - 1,
        "device_hours": plan["device_hours"] / done["device_hours"] - 1,
        "cost": plan["cost"] / done["cost"] - 1,
    }


def table(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    """Format the figures as a table in Markdown."""
    lines = [
        "| corpus, model | estimate | took | off | device-hours off | cost off | planning took |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {each['estimate']:.1f} s ({each['least']:.0f} to {each['most']:.0f}) "
        f"| {each['took']:.1f} s | {each['seconds']:+.0%} | {each['device_hours']:+.0%} "
        f"| {each['cost']:+.0%} | {each['plan']:.0f} s |"
        for name, each in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark; it fails where an estimate is further off than 15 %."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    rows = []
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="embedfarm-estimates-") as home:
            rows.append((name, measure(Path(home), CASES[name], options.scale)))
    sys.stdout.write(f"{table(rows)}\n")
    off = [abs(each[key]) for _, each in rows for key in ("seconds", "device_hours", "cost")]
    if max(off) > BAR:
        raise SystemExit(f"an estimate is off by {max(off):.0%}, more than {BAR:.0%}")


if __name__ == "__main__":
    main()
