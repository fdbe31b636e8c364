"""Soaks: many seeds on all cores, and their figures."""

import argparse
import contextlib
import gc
import hashlib
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import typer

from benchmarks.marked import write_marked
from tests.simulation.faults import FAULTS_MIN
from tests.simulation.run import Outcome, Simulation
from tests.simulation.shrink import describe, shrink
from tests.simulation.states import STATES, unreached

SEEDS_AT_A_TIME: Final = 20
FAILURES_SHOWN: Final = 20
SEEDS_PER_LINE: Final = 1000  # of progress, and of what is kept
SILENCE_SECONDS_MAX: Final = 900  # a process that was killed is missed by nobody else
GIT: Final = ("/usr/bin/env", "git")
CODE: Final = (  # what runs in a simulation
    "collector", "contract", "embedfarm", "producer", "readers", "runs", "scheduler", "workers",
    "tests/simulation", ":!tests/simulation/mutants", ":!tests/simulation/test_*",
    "constraints.txt",
)  # fmt: skip
# A disk that syncs would take most of the time.
MEMORY: Final = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())  # noqa: S108 # each run makes its own below


class Verdict(NamedTuple):
    """The outcome of a seed, or why it failed, and the processor time that it took."""

    seed: int
    outcome: Outcome | None
    reason: str
    cpu_seconds: float


@dataclass
class Tally:
    """The sums of the verdicts of a soak.

    Attributes:
        of: A checksum of the code that runs, and the first seed.
        cpu_seconds: Processor time of the runs, in seconds.
        seconds: Virtual time of the runs, in seconds.
        tenths_after: Number of runs by the tenths of a second from the last fault to the end.
        fewest: Least number of faults in a run.
        reached: Number of runs by the state that they reached.
    """

    of: tuple[str, int]
    runs: int = 0
    steps: int = 0
    chunks: int = 0
    failed: int = 0
    harmless: int = 0
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    tenths_after: dict[int, int] = field(default_factory=dict)
    fewest: int = sys.maxsize
    faults: dict[str, int] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    failures: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        """Count a verdict; print it if it is one of the first failures."""
        self.runs += 1
        self.cpu_seconds += verdict.cpu_seconds
        if verdict.outcome is None:
            self.failures.append(verdict)
            if len(self.failures) <= FAILURES_SHOWN:
                typer.echo(f"seed {verdict.seed}: {verdict.reason}")
                typer.echo(f"  again: python -m tests.simulation --seed {verdict.seed}")
            return
        outcome = verdict.outcome
        self.steps += outcome.steps
        self.chunks += outcome.chunks
        self.failed += outcome.failed
        self.harmless += outcome.harmless
        self.seconds += outcome.seconds
        tenths = round(10 * outcome.seconds_after)
        self.tenths_after[tenths] = self.tenths_after.get(tenths, 0) + 1
        self.faults = dict(Counter(self.faults) + Counter(outcome.faults))
        self.fewest = min(self.fewest, sum(outcome.faults.values()))
        self.reached = dict(Counter(self.reached) + Counter(outcome.reached.keys()))


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect garbage afterwards only: what it closes would depend on what ran before."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def place_of(seed: int) -> Path:
    """Return where a run may write: as long a path in any process, since records have it."""
    return MEMORY / f"embedfarm-{os.getpid():07}-{seed}"


@without_collection()
def run_seed(seed: int) -> Verdict:
    """Run a seed without a log."""
    place = place_of(seed)
    before = time.process_time()
    outcome, reason = None, ""
    try:
        outcome = Simulation(seed, place, lambda _line: None).run()
    except Exception as error:  # noqa: BLE001 # whatever it is, this seed has failed
        reason = f"{type(error).__name__}: {error}"
    return Verdict(seed, outcome, reason, time.process_time() - before)


def run_seeds(seeds: range) -> list[Verdict]:
    """Run some seeds without a log."""
    return [run_seed(seed) for seed in seeds]


@without_collection()
def show_seed(
    seed: int, dropped: frozenset[int] = frozenset(), order: int = 0, *, detailed: bool = False
) -> int:
    """Run a seed with its log; if it fails, print its operations and return 1."""
    place = place_of(seed)
    simulation = Simulation(seed, place, typer.echo, detailed, dropped, order)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_Handler(simulation)])
    try:
        typer.echo(simulation.run())
    except Exception as error:
        typer.echo(f"FAILED: {type(error).__name__}: {error}")
        for each in simulation.faults.operations:
            if each.number not in dropped:
                typer.echo(f"  {describe(each)}")
        typer.echo(f"  least: python -m tests.simulation --seed {seed} --shrink")
        if not isinstance(error, AssertionError) or error.__cause__ is not None:
            raise
        return 1
    return 0


@without_collection()
def shrink_seed(seed: int) -> int:
    """Print the fewest operations that make a run fail; return 1 if it does."""
    logging.disable()
    place = place_of(seed)
    least = shrink(seed, place, lambda line: typer.echo(line, err=True))
    typer.echo(f"seed {seed} does not fail" if least is None else least.to_text())
    return 0 if least is None else 1


class _Handler(logging.Handler):
    """A log handler that puts what the production code logs into the log of a run."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def emit(self, record: logging.LogRecord) -> None:
        self._simulation.log(record.getMessage())


def soak(seeds: range, processes: int, *, first: bool = False, kept: Path | None = None) -> Tally:
    """Run all seeds, or up to the first that fails, and print those that fail as they come.

    The tally is written to `kept` after each thousand seeds, and a soak that finds one there goes
    on from it.

    Raises:
        ValueError: The tally in `kept` is of other code, or of other seeds.
        multiprocessing.TimeoutError: No run has ended for 15 minutes.
    """
    tally = _recall(kept, seeds.start)
    logging.disable()
    context = multiprocessing.get_context("fork")
    # What is imported is garbage at no time, and need not be looked through after each run.
    with context.Pool(processes, initializer=gc.freeze, maxtasksperchild=50) as pool:
        while tally.runs < len(seeds) and not (first and tally.failures):
            some = seeds[tally.runs : tally.runs + SEEDS_PER_LINE]
            starts = range(0, len(some), SEEDS_AT_A_TIME)
            found = pool.imap_unordered(
                run_seeds, [some[start : start + SEEDS_AT_A_TIME] for start in starts]
            )
            for _ in starts:
                for verdict in found.next(SILENCE_SECONDS_MAX):
                    tally.add(verdict)
                if first and tally.failures:
                    break
            typer.echo(f"{tally.runs:,} seeds, {len(tally.failures):,} failed", err=True)
            if kept is not None:
                kept.write_bytes(msgspec.json.encode(tally))
    return tally


def _recall(kept: Path | None, seed0: int) -> Tally:
    """Return the tally that an earlier soak has kept, or else an empty one."""
    if kept is None:
        return Tally(("", seed0))
    files = subprocess.check_output([*GIT, "ls-files", "--stage", "--", *CODE])
    changes = subprocess.check_output([*GIT, "diff", "HEAD", "--", *CODE])
    tally = Tally((hashlib.sha256(files + changes).hexdigest(), seed0))
    if not kept.exists():
        return tally
    found = msgspec.json.decode(kept.read_bytes(), type=Tally)
    if found.of != tally.of:
        raise ValueError(f"{kept} is of code and seed {found.of}, this is {tally.of}")
    return found


def to_markdown(tally: Tally, seeds: range) -> str:
    """Return the figures of a tally as tables in Markdown."""
    faults = sum(tally.faults.values())
    tenths = tally.tenths_after or {0: 1}
    after = np.percentile(np.repeat(list(tenths), list(tenths.values())), [50, 99, 100]) / 10
    each = tally.cpu_seconds / max(1, tally.runs)
    facts = {
        "seeds": f"{seeds.start:,} to {seeds.stop - 1:,}",
        "failed": f"{len(tally.failures):,}",
        "faults": f"{faults:,}; {faults / max(1, tally.runs):.1f} in a run, "
        f"at least {tally.fewest}",
        "chunks embedded": f"{tally.chunks:,}, of which {tally.failed:,} were given up on, "
        f"{tally.harmless:,} of them harmless ones that faults struck each time",
        "events": f"{tally.steps:,} in {tally.seconds / 3600:,.0f} hours of virtual time",
        "from the last fault to the end of the job": f"P50 {after[0]:.1f} s, P99 {after[1]:.1f} s, "
        f"most {after[2]:.1f} s, with leases of 1 s",
        "processor time": f"{tally.cpu_seconds / 3600:,.1f} hours, {each:.2f} s a run",
    }
    lines = ["| what | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())]
    lines += ["", "| fault | times |", "|---|---|"]
    lines += [f"| {name} | {count:,} |" for name, count in sorted(tally.faults.items())]
    lines += ["", "| state | runs that reached it | noticed when |", "|---|---|---|"]
    for state in sorted(STATES.values(), key=lambda one: one.name):
        lines.append(f"| {state.name} | {tally.reached.get(state.name, 0):,} | {state.noticed} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--seed0", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one alone, with its log")
    parser.add_argument(
        "--detailed", action="store_true", help="with all that is asked of server and disk"
    )
    parser.add_argument("--without", default="", help="numbers of operations to leave out of it")
    parser.add_argument("--order", type=int, default=0, help="of what is left, if not the usual")
    parser.add_argument("--shrink", action="store_true", help="leave out what it fails without")
    parser.add_argument("--first", action="store_true", help="stop at the first that fails")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="keep what is found here, and go on from it")
    parser.add_argument("--report", type=Path, help="put the figures into this document")
    arguments = parser.parse_args()
    if arguments.seed is not None and arguments.shrink:
        return shrink_seed(arguments.seed)
    if arguments.seed is not None:
        dropped = frozenset(map(int, filter(None, arguments.without.split(","))))
        return show_seed(arguments.seed, dropped, arguments.order, detailed=arguments.detailed)
    seeds = range(arguments.seed0, arguments.seed0 + arguments.seeds)
    try:
        tally = soak(seeds, arguments.processes, first=arguments.first, kept=arguments.keep)
    except ValueError as error:
        parser.error(str(error))
    text = to_markdown(tally, seeds)
    typer.echo(text)
    if arguments.report is not None:
        write_marked(arguments.report, "simulation", text)
    missed = unreached(tally.runs, tally.reached)
    for state in missed:
        typer.echo(f"not one of {tally.runs:,} runs reached: {state.name}")
    too_few = tally.fewest < FAULTS_MIN
    return 1 if tally.failures or missed or too_few else 0
