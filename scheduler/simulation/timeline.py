"""Picture of a run: a lane for each worker, a bar for each micro-batch."""

from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from embedfarm.scheduler.simulation.simulated_farm import Outcome
from embedfarm.scheduler.timeline_drawing import Bar, draw_lanes

INCHES_WIDE: Final = 11.0
INCHES_PER_LANE: Final = 0.28
INCHES_AROUND: Final = 1.2
COLOURS: Final = ("#1b6e53", "#c7762d", "#4a6fa5", "#8a5a9e", "#b5484a", "#6b7a3a")
COLOUR_COPIED: Final = "#d8d8d8"


def draw_timeline(outcome: Outcome, title: str, path: Path) -> None:
    """Write a PNG or SVG, by the name of `path`; the same run gives the same SVG.

    Raises:
        ValueError: The name of `path` ends in no format that can be drawn.
    """
    workers = list(outcome.worker_tokens)
    jobs = list(outcome.job_ended)
    colours = {job: COLOURS[place % len(COLOURS)] for place, job in enumerate(jobs)}
    figure = Figure(
        figsize=(INCHES_WIDE, INCHES_AROUND + INCHES_PER_LANE * len(workers)), layout="constrained"
    )
    axes = figure.subplots()
    bars = [
        Bar(
            span.worker,
            span.begin,
            span.end,
            COLOUR_COPIED if span.copied else colours[span.job],
        )
        for span in outcome.spans
    ]
    draw_lanes(axes, workers, bars, "white")
    axes.axvline(outcome.ideal, color="black", linestyle=":", linewidth=1)
    axes.set_xlim(0, outcome.makespan * 1.01)
    axes.set_xlabel("seconds; the dotted line is the ideal makespan")
    axes.set_title(title, loc="left")
    legend = [Patch(color=colours[job], label=job) for job in jobs]
    legend.append(Patch(color=COLOUR_COPIED, label="repeated"))
    axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    mpl.rcParams["svg.hashsalt"] = "embedfarm"
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
