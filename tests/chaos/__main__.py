"""`make chaos MINUTES=30 SEED=1`: the real model on real text, under every fault."""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.marked import write_marked
from embedfarm.contract.settings import DEFAULT_MODEL
from embedfarm.producer.docstrings import docstrings
from tests.chaos.faults import ALL
from tests.chaos.report import to_markdown
from tests.chaos.run import Chaos, Orders

CHUNKS_PER_MINUTE = 600  # of a run: several runs, and a quiet one of minutes, in half an hour
EVERY_SECONDS = 20.0


def main() -> int:
    """Run, report, and end with 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=EVERY_SECONDS, help="seconds between faults")
    parser.add_argument("--only", default="", help="names of faults, with commas between")
    parser.add_argument("--report", type=Path, help="put the figures into this file")
    arguments = parser.parse_args()
    texts = [f"{name}: {text}" for name, text in docstrings()]
    orders = Orders(
        model=DEFAULT_MODEL,
        texts=texts[: int(CHUNKS_PER_MINUTE * arguments.minutes)],
        seconds=60 * arguments.minutes,
        every_seconds=arguments.every,
        faults={k: v for k, v in ALL.items() if not arguments.only or k in arguments.only},
        seed=arguments.seed,
    )
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    sys.stdout.write(f"{len(orders.texts):,} chunks a run; logs are in {place}\n")
    outcome = Chaos(orders, place, _say).run()
    text = to_markdown(orders, outcome)
    sys.stdout.write(text)
    if arguments.report is not None:
        write_marked(arguments.report, "chaos", text)
    if outcome.problems:
        return 1
    shutil.rmtree(place)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%X')} {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
