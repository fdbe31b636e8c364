"""Micro-batches as bars, a lane for each worker; simulated and real ones look alike."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

LANE_HEIGHT: Final = 0.8  # of the distance between lanes


class Bar(NamedTuple):
    """A micro-batch: in which lane, from when to when in seconds, and its colour."""

    lane: str
    begin: float
    end: float
    colour: str


def draw_lanes(axes: Any, lanes: Sequence[str], bars: Iterable[Bar], edge: str) -> None:  # noqa: ANN401 # matplotlib's axes, untyped here
    """Draw bars into their lanes, the first lane on top; `edge` is the colour between bars."""
    places = {lane: place for place, lane in enumerate(lanes)}
    for bar in bars:
        axes.broken_barh(
            [(bar.begin, bar.end - bar.begin)],
            (places[bar.lane] - LANE_HEIGHT / 2, LANE_HEIGHT),
            facecolor=bar.colour,
            edgecolor=edge,
            linewidth=0.5,
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
