"""Table of the lines and branches that tests run, by room: `python -m tests.room_coverage`.

It reads what `coverage run` has left; `make coverage` does both.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.marked import write_marked

NAMES: Final = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def read_report() -> dict[str, Any]:
    """Return what coverage.py found, as its JSON report has it."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "report.json"
        command = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", str(path)]
        subprocess.run(command, check=True)
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def rooms_of(report: Mapping[str, Any]) -> dict[str, list[int]]:
    """Add up `NAMES` by room; a file at the top of the package is in the room `embedfarm`."""
    rooms: dict[str, list[int]] = defaultdict(lambda: [0] * len(NAMES))
    for path, found in report["files"].items():
        sums = rooms[Path(path).parts[0]]
        for place, name in enumerate(NAMES):
            sums[place] += found["summary"][name]
    return dict(sorted(rooms.items()))


def to_table(rooms: Mapping[str, list[int]]) -> str:
    """Return a table in Markdown, with a last line for all rooms."""
    rows = [*rooms.items(), ("all", [sum(column) for column in zip(*rooms.values(), strict=True)])]
    lines = ["| room | lines | run | branches | taken |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {room} | {lines_:,} | {share(run, lines_)} | {branches:,} | {share(taken, branches)} |"
        for room, (lines_, run, branches, taken) in rows
    ]
    return "\n".join(lines)


def share(part: int, whole: int) -> str:
    """Return a percentage, rounded down, so that only what is whole is 100 %."""
    return f"{1000 * part // whole / 10 if whole else 100:.1f} %"


def main() -> None:
    """Print the table, and write it into a document where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="document with a marked part `coverage`")
    chosen = parser.parse_args()
    table = to_table(rooms_of(read_report()))
    print(table)  # noqa: T201 -- the result
    if chosen.report:
        write_marked(chosen.report, "coverage", table)


if __name__ == "__main__":
    main()
