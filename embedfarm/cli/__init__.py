"""The command line: the only place that sees every station.

Exit statuses: 0 done, 1 failed, 2 wrong usage or configuration, 3 finished with failed chunks,
75 the farm is full (try again later, as sysexits.h has it), 130 interrupted and resumable.
"""

from importlib.util import find_spec
from pathlib import Path

STATIONS = ("producer", "scheduler", "workers", "collector", "web")


def check_stations() -> None:
    """Stop when another distribution owns one of our top-level names (docs/decisions.md, 1)."""
    home = Path(__file__).resolve().parents[2]
    for name in STATIONS:
        spec = find_spec(name)
        found = spec.origin if spec else None
        if found is None or Path(found).resolve().parents[1] != home:
            raise SystemExit(f"embedfarm: package {name!r} is not ours: {found}")


def main() -> None:
    """Run the command line of `embedfarm`."""
    check_stations()
    from embedfarm.cli.app import app

    app()
