"""Report of a comparison: makes docs/performance.md from build/bench.json.

python -m benchmarks.report [BENCH.json] [DIRECTORY]
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.results import (
    BARE_ENGINE,
    BASELINE,
    BEST_BATCH,
    FARM,
    Bench,
    Comparison,
    Outcome,
)

MEBIBYTE: Final = 1 << 20
CHART: Final = "performance.svg"
CHUNKS_FULL: Final = 5_000
ROUNDS_FULL: Final = 3

INTRODUCTION: Final = """\
# Performance

Made by `make bench-peers` on {created}; do not edit. The command behind it: `{command}`.
Model {model}, on {device}; the farm computed in {dtype}.

Every contender ran in processes of its own, one after the other, in {rounds} rounds; a figure is
the median of its rounds, a ratio ("of encode") the median of the ratios within each round. What
takes more than twice as long as `encode` ran in the first round only. Seconds
are from the first text to the last vector, with the model loaded and warm; "whole" is the process
from start to end. Cosines are with the float32 vectors of `encode`. Memory is the peak of all
processes together, where a page that two of them share counts twice. Share of peak is what the
model has to compute for these texts without padding, per second, over the best rate that torch
reached here in {dtype} when it multiplied large square matrices.
"""
LESS: Final = """
**A short form of the benchmark:** too few chunks or rounds to be quoted.
"""
FARM_LINES: Final = (
    ("encode as it comes", BASELINE),
    ("its best batch size", BEST_BATCH),
    ("the bare engine in a loop", BARE_ENGINE),
)


def render(bench: Bench) -> str:
    """Render the whole document in Markdown."""
    compared = [each for each in bench.comparisons if each.find(BASELINE)]
    rounds = max((len(each.peaks) for each in compared), default=0)
    introduction = INTRODUCTION.format(
        created=bench.created,
        command=bench.command,
        model=bench.model,
        device=bench.device,
        dtype=bench.dtype,
        rounds=rounds,
    )
    full = rounds >= ROUNDS_FULL and max(each.chunks for each in compared) >= CHUNKS_FULL
    parts = [introduction, "" if full else LESS, render_hardware(bench)]
    parts.append(f"![Throughput by corpus, as a multiple of `encode`]({CHART})\n")
    parts += [_render_comparison(each) for each in compared]
    parts.append(_render_absent(bench.comparisons))
    return "\n".join(part for part in parts if part)


def render_hardware(bench: Bench) -> str:
    """Render the hardware, and the versions of all contenders that ran."""
    rows = [[name, value] for name, value in bench.hardware.items()]
    outcomes = [outcome for each in bench.comparisons for outcome in each.outcomes]
    versions = sorted({outcome.version for outcome in outcomes if outcome.version})
    rows.append(["Contenders", ", ".join(versions)])
    return "## Hardware and versions\n\n" + table(["part", "here"], rows)


def _render_comparison(comparison: Comparison) -> str:
    """Render a corpus: what it is, a line for each contender, and the farm's ratios."""
    head = f"## {comparison.corpus.capitalize()}\n\n{comparison.about} {_describe(comparison)}\n"
    return "\n".join([head, table(list(COLUMNS), _rows(comparison)), _render_farm(comparison)])


def _describe(comparison: Comparison) -> str:
    """Say how much text a corpus has."""
    mean = comparison.tokens / comparison.chunks
    return (
        f"{comparison.chunks:,} chunks of {mean:.0f} tokens on average and at most "
        f"{comparison.tokens_max:,}, as the model counts and cuts them."
    )


Cell = Callable[[Comparison, Outcome], str]


def _speedup(base: str) -> Cell:
    """Make the function for a cell with the speed relative to another contender."""

    def cell(comparison: Comparison, outcome: Outcome) -> str:
        other = comparison.find(base)
        return f"{outcome.speedup(other):.2f}" if other else ""

    return cell


def _peak_share(comparison: Comparison, outcome: Outcome) -> str:
    """Format the share of the device's peak; nothing for int8, of which torch has no peak."""
    return "" if outcome.facts.get("dtype") == "int8" else f"{comparison.peak_share(outcome):.1%}"


COLUMNS: Final[dict[str, Cell]] = {
    "contender": lambda _, o: o.contender,
    "chunks/s": lambda c, o: f"{c.chunks / o.seconds:,.0f}",
    "tokens/s": lambda c, o: f"{c.tokens / o.seconds:,.0f}",
    "of encode": _speedup(BASELINE),
    "of best batch": _speedup(BEST_BATCH),
    "share of peak": _peak_share,
    "cosine": lambda _, o: f"{o.cosine_mean:.6f}",
    "least": lambda _, o: f"{o.cosine_min:.6f}",
    "peak MiB": lambda _, o: f"{o.rss_bytes_max / MEBIBYTE:,.0f}",
    "loading s": lambda _, o: f"{o.load_seconds:.1f}",
    "whole s": lambda _, o: f"{o.wall_seconds:.1f}",
    "": lambda _, o: ", ".join(f"{name} {value}" for name, value in o.facts.items()),
}


def _rows(comparison: Comparison) -> list[list[str]]:
    """Make a line for each contender that ran, the fastest first."""
    ran = sorted((each for each in comparison.outcomes if each.runs), key=lambda o: o.seconds)
    return [[cell(comparison, outcome) for cell in COLUMNS.values()] for outcome in ran]


def _render_farm(comparison: Comparison) -> str:
    """Render the farm's ratios in words."""
    farm = comparison.find(FARM)
    if farm is None:
        return ""
    found = ((words, comparison.find(name)) for words, name in FARM_LINES)
    ratios = [f"{farm.speedup(other):.2f} times {words}" for words, other in found if other]
    return f"The farm reached {', '.join(ratios)}.\n"


def _render_absent(comparisons: Sequence[Comparison]) -> str:
    """Render what did not run, and why."""
    rows = [
        [outcome.contender, comparison.corpus, one_line(outcome.reason)]
        for comparison in comparisons
        for outcome in comparison.outcomes
        if outcome.reason
    ]
    return "## What did not run\n\n" + table(["contender", "corpus", "why"], rows) if rows else ""


def one_line(text: str) -> str:
    """Return the last line of an error, which says what it is about, fit for a cell."""
    return text.strip().splitlines()[-1].replace("|", "\\|")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table; columns that begin with a number are aligned to the right."""
    first = ["".join(column)[:1] for column in zip(*rows, strict=True)]
    rules = ["---:" if each.isdigit() else "---" for each in first]
    lines = [heads, rules, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", nargs="?", type=Path, default=Path("build/bench.json"))
    parser.add_argument("directory", nargs="?", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    path = arguments.directory / "performance.md"
    path.write_text(render(Bench.load(arguments.bench)), encoding="utf-8")
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
