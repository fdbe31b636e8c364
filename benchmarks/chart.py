"""Chart of a comparison: draws docs/performance.svg from build/bench.json.

python -m benchmarks.chart [BENCH.json] [DIRECTORY]
"""

import argparse
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.results import BASELINE, FARM, Bench, Comparison

INCHES_WIDE: Final = 9.0
INCHES_PER_BAR: Final = 0.24
INCHES_PER_PANEL: Final = 0.8
COLOURS: Final = {FARM: "#1b6e53", BASELINE: "#555555"}
COLOUR_OTHERS: Final = "#a9b8b2"


def draw(bench: Bench) -> Figure:
    """Draw a panel for each corpus, with a bar for each contender."""
    panels = [each for each in bench.comparisons if each.find(BASELINE)]
    counts = [sum(bool(outcome.runs) for outcome in each.outcomes) for each in panels]
    heights = [INCHES_PER_PANEL + INCHES_PER_BAR * count for count in counts]
    figure = Figure(figsize=(INCHES_WIDE, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)
    for panel, comparison in zip(axes[:, 0], panels, strict=True):
        _draw_panel(panel, comparison)
    figure.supxlabel(f"texts per second, as a multiple of {BASELINE} (medians of paired runs)")
    return figure


def _draw_panel(panel: Any, comparison: Comparison) -> None:  # noqa: ANN401 # matplotlib's axes, untyped here
    """Draw one corpus, the fastest contender at the top."""
    base = comparison.find(BASELINE)
    ran = [outcome for outcome in comparison.outcomes if outcome.runs and base]
    ordered = sorted(ran, key=lambda outcome: -outcome.seconds)
    names = [outcome.contender for outcome in ordered]
    ratios = [outcome.speedup(base) for outcome in ordered if base]
    bars = panel.barh(names, ratios, color=[COLOURS.get(name, COLOUR_OTHERS) for name in names])
    panel.bar_label(bars, fmt="%.2f", padding=3)
    panel.set_title(f"{comparison.corpus}: {comparison.chunks:,} chunks", loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.1)


def main() -> None:
    """Write the chart; the same figures give the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", nargs="?", type=Path, default=Path("build/bench.json"))
    parser.add_argument("directory", nargs="?", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "embedfarm"
    path = arguments.directory / "performance.svg"
    draw(Bench.load(arguments.bench)).savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
