"""Many seeds on all cores, and what came of them."""

import argparse
import logging
import multiprocessing
import os
import resource
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import typer

from benchmarks.marked import write_marked
from tests.simulation.run import Failure, Outcome, Simulation

SEEDS_AT_A_TIME: Final = 20
FAILURES_SHOWN: Final = 20
SEEDS_PER_LINE: Final = 5000  # of progress
# A disk that syncs would take most of the time.
MEMORY: Final = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())  # noqa: S108 # each run makes its own below


class Verdict(NamedTuple):
    """What came of a seed: an outcome, or why it failed."""

    seed: int
    outcome: Outcome | None
    reason: str


@dataclass
class Tally:
    """What came of all of them."""

    runs: int = 0
    steps: int = 0
    chunks: int = 0
    failed: int = 0
    seconds: float = 0.0
    seconds_after: list[float] = field(default_factory=list)
    fault_counts: list[int] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        """Count one."""
        self.runs += 1
        if verdict.outcome is None:
            self.failures.append(verdict)
            return
        outcome = verdict.outcome
        self.steps += outcome.steps
        self.chunks += outcome.chunks
        self.failed += outcome.failed
        self.seconds += outcome.seconds
        self.seconds_after.append(outcome.seconds_after)
        self.faults.update(outcome.faults)
        self.fault_counts.append(sum(outcome.faults.values()))


def run_seed(seed: int) -> Verdict:
    """One run without a log."""
    place = MEMORY / f"embedfarm-{os.getpid()}-{seed}"
    try:
        return Verdict(seed, Simulation(seed, place, lambda _line: None).run(), "")
    except Exception as error:  # noqa: BLE001 # whatever it is, this seed has failed
        return Verdict(seed, None, f"{type(error).__name__}: {error}")


def show_seed(seed: int) -> int:
    """One run with its log."""
    place = MEMORY / f"embedfarm-{os.getpid()}-{seed}"
    simulation = Simulation(seed, place, typer.echo)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_Handler(simulation)])
    try:
        typer.echo(simulation.run())
    except Failure as error:
        typer.echo(f"FAILED: {error}")
        if error.__cause__ is not None:
            raise
        return 1
    return 0


class _Handler(logging.Handler):
    """Puts what the production code logs into the log of a run."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def emit(self, record: logging.LogRecord) -> None:
        self._simulation.log(record.getMessage())


def soak(seeds: range, processes: int, *, first: bool = False) -> Tally:
    """Run all seeds, or up to the first that fails; those that fail are printed as they come."""
    tally = Tally()
    logging.disable()
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=50) as pool:
        for verdict in pool.imap_unordered(run_seed, seeds, SEEDS_AT_A_TIME):
            tally.add(verdict)
            if verdict.outcome is None and len(tally.failures) <= FAILURES_SHOWN:
                typer.echo(f"seed {verdict.seed}: {verdict.reason}")
                typer.echo(f"  again: python -m tests.simulation --seed {verdict.seed}")
            if tally.runs % SEEDS_PER_LINE == 0:
                typer.echo(f"{tally.runs:,} seeds, {len(tally.failures):,} failed", err=True)
            if first and tally.failures:
                break
    return tally


def to_markdown(tally: Tally, seeds: range, seconds: float) -> str:
    """The figures."""
    faults = sum(tally.faults.values())
    after = np.percentile(tally.seconds_after or [0.0], [50, 99, 100])
    fewest = min(tally.fault_counts, default=0)
    each = seconds / max(1, tally.runs)
    facts = {
        "seeds": f"{seeds.start:,} to {seeds.stop - 1:,}",
        "failed": f"{len(tally.failures):,}",
        "faults": f"{faults:,}; {faults / max(1, tally.runs):.1f} in a run, at least {fewest}",
        "chunks embedded": f"{tally.chunks:,}, of which {tally.failed:,} were given up on",
        "events": f"{tally.steps:,} in {tally.seconds / 3600:,.0f} hours of virtual time",
        "from the last fault to the end of the job": f"P50 {after[0]:.1f} s, P99 {after[1]:.1f} s, "
        f"most {after[2]:.1f} s, with leases of 1 s",
        "processor time": f"{seconds / 3600:,.1f} hours, {each:.2f} s a run",
    }
    lines = ["| what | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())]
    lines += ["", "| fault | times |", "|---|---|"]
    lines += [f"| {name} | {count:,} |" for name, count in sorted(tally.faults.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--seed0", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one alone, with its log")
    parser.add_argument("--first", action="store_true", help="stop at the first that fails")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", type=Path, help="put the figures into this document")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return show_seed(arguments.seed)
    seeds = range(arguments.seed0, arguments.seed0 + arguments.seeds)
    tally = soak(seeds, arguments.processes, first=arguments.first)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = to_markdown(tally, seeds, used.ru_utime + used.ru_stime)
    typer.echo(text)
    if arguments.report is not None:
        write_marked(arguments.report, "simulation", text)
    return 1 if tally.failures else 0
