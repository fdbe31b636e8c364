"""Charts as SVG: figures in, bytes out. One is drawn at a time: matplotlib is not thread-safe.

It takes a third of the time of all that a server imports, and so is imported for the first chart.

Texts stay texts, in the reader's own fonts. Words that users chose are no formulas, and have only
characters that the font has.
"""

import io
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from embedfarm.scheduler.timeline_drawing import Bar, draw_lanes
from embedfarm.web.http.rendering import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRESH_SECONDS: Final = 2.0
CHARTS_MAX: Final = 64  # that are kept
NAME_CHARACTERS_MAX: Final = 24
LANES_MAX: Final = 64
MINUTE: Final = 60
NOW: Final = "now"  # words for the right end of a chart
END: Final = "end"
LEAST: Final = 10.0  # top of an axis on which nothing happens

Theme = Literal["light", "dark"]
Width = Literal["wide", "half", "narrow"]


class Colours(NamedTuple):
    """Colours of a theme, the same as in style.css."""

    ink: str
    quiet: str
    line: str
    surface: str
    accent: str
    second: str
    faint: str


COLOURS: Final[dict[str, Colours]] = {
    "light": Colours("#15201b", "#52605a", "#dbe2de", "#ffffff", "#1b6e53", "#c7762d", "#c9d3ce"),
    "dark": Colours("#e7eeea", "#9fada6", "#2b3631", "#171d1a", "#62c7a2", "#e6a25f", "#46544d"),
}
INCHES: Final = {"wide": 10.0, "half": 5.0, "narrow": 3.6}
TICKS_MAX: Final = {"wide": 6, "half": 4, "narrow": 3}
HOUR: Final = 3600
DAY: Final = 24 * HOUR
STEPS: Final = (
    5, 10, 15, 30, 60, 120, 300, 600, 1200,
    HOUR, 2 * HOUR, 4 * HOUR, 8 * HOUR, DAY, 2 * DAY, 4 * DAY,
)  # fmt: skip
"""Seconds between ticks."""

STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "embedfarm",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


class Curve(NamedTuple):
    """A quantity over time.

    Attributes:
        title: What is written above its axis: the unit, and whose values they are if not the job's.
        seconds: Unix times.
        values: Values, one for each time.
    """

    title: str
    seconds: Sequence[float]
    values: Sequence[float]


class TimeAxis(NamedTuple):
    """Time that a chart covers.

    Attributes:
        since: Unix time at the left.
        until: Unix time at the right.
        last: Word for the time at the right.
        gap_seconds: Time between two values from which on nothing is known between them.
    """

    since: float
    until: float
    last: str = NOW
    gap_seconds: float = MINUTE


class ChartStyle(NamedTuple):
    """Theme and width of a chart."""

    theme: Theme
    width: Width


@dataclass
class Gallery:
    """Charts that were drawn a moment ago, so that many readers cost no more than one."""

    _drawn: "OrderedDict[object, tuple[float, bytes]]" = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def show(self, name: object, draw: Callable[[], bytes]) -> bytes:
        """Return the chart of that name, drawn anew when it is older than `FRESH_SECONDS`."""
        with self._lock:
            at, data = self._drawn.pop(name, (0.0, b""))
            if time.monotonic() - at > FRESH_SECONDS:
                at, data = time.monotonic(), draw()
            self._drawn[name] = (at, data)
            if len(self._drawn) > CHARTS_MAX:
                self._drawn.popitem(last=False)
            return data


def draw_curves(
    curves: Sequence[Curve], axis: TimeAxis, look: ChartStyle, *, alike: bool = False
) -> bytes:
    """Draw quantities over the same time, one above the other.

    Args:
        curves: Quantities to draw, at least one.
        axis: Time that they are drawn over.
        look: Theme and width of the chart.
        alike: They are the same quantity, such as the speed of each worker, and so have one colour
            and one scale.
    """
    from matplotlib import ticker  # noqa: PLC0415 # see above

    colours = COLOURS[look.theme]
    inks = (colours.accent, colours.accent if alike else colours.second)
    most = max([LEAST, *(value for curve in curves for value in curve.values)])
    with _figure(look, (0.75 if alike else 1.15) * len(curves) + 0.75) as (figure, data):
        rows = figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0]
        for axes, curve, colour in zip(rows, curves, itertools.cycle(inks), strict=False):
            times, values = _with_gaps(curve, axis)
            axes.fill_between(times, values, color=colour, alpha=0.16, linewidth=0)
            axes.plot(times, values, color=colour, linewidth=1.6, solid_joinstyle="round")
            _dress(axes, colours)
            axes.set_ylim(0, (most if alike else max([*curve.values, LEAST])) * 1.12)
            axes.yaxis.set_major_locator(ticker.MaxNLocator(2 if alike else 3))
            axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))
            axes.set_title(_drawable(curve.title), loc="left", fontsize=9, color=colours.quiet)
        _tell_time(rows[-1], axis.until - axis.since, look, axis.last)
    return data.getvalue()


def draw_bars(bars: Sequence[Bar], lanes: Sequence[str], seconds: float, look: ChartStyle) -> bytes:
    """Draw the micro-batches of the last seconds as bars, in a lane for each worker; 0 is now."""
    colours = COLOURS[look.theme]
    named = {lane: _drawable(lane) for lane in lanes[:LANES_MAX]}
    inches = 0.3 * max(1, len(named)) + 0.7
    with _figure(look, inches) as (figure, data):
        axes = figure.subplots()
        shown = [bar for bar in bars if bar.lane in named]
        draw_lanes(axes, list(named), shown, colours.surface)
        axes.set_yticks(range(len(named)), list(named.values()))
        _dress(axes, colours)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        _tell_time(axes, seconds, look)
    return data.getvalue()


def draw_pairs(pairs: Sequence[tuple[float, float]], look: ChartStyle) -> bytes:
    """Draw seconds taken over seconds predicted; on the dotted line the two are the same."""
    colours = COLOURS[look.theme]
    most = 1.1 * max([each for pair in pairs for each in pair], default=1.0)
    with _figure(look, 3.0) as (figure, data):
        axes = figure.subplots()
        axes.plot([0, most], [0, most], color=colours.quiet, linewidth=1, linestyle=":")
        axes.scatter(
            [pair[0] for pair in pairs], [pair[1] for pair in pairs],
            s=16, color=colours.accent, alpha=0.6, linewidth=0,
        )  # fmt: skip
        _dress(axes, colours)
        axes.set_xlim(0, most)
        axes.set_ylim(0, most)
        axes.set_xlabel("predicted, seconds", color=colours.quiet)
        axes.set_title("took, seconds", loc="left", fontsize=9, color=colours.quiet)
    return data.getvalue()


@contextmanager
def _figure(look: ChartStyle, inches_high: float) -> Iterator[tuple["Figure", io.BytesIO]]:
    """Give an empty figure, which is written as SVG at the end of the block."""
    import matplotlib as mpl  # noqa: PLC0415 # see above
    from matplotlib.figure import Figure  # noqa: PLC0415 # see above

    data = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(INCHES[look.width], inches_high), layout="constrained")
        yield figure, data
        figure.savefig(data, format="svg", transparent=True, metadata={"Date": None})


def _dress(axes: Any, colours: Colours) -> None:  # noqa: ANN401 # matplotlib's axes, untyped here
    axes.grid(visible=True, axis="both", color=colours.line, linewidth=0.7)
    axes.tick_params(colors=colours.quiet, length=3)
    for spine in axes.spines.values():
        spine.set_color(colours.line)


def _with_gaps(curve: Curve, axis: TimeAxis) -> tuple[list[float], list[float]]:
    """Return seconds before the axis ends, and values, with gaps where samples are missing."""
    times: list[float] = []
    values: list[float] = []
    for second, value in zip(curve.seconds, curve.values, strict=True):
        if times and second - axis.until - times[-1] > axis.gap_seconds:
            times.append(second - axis.until)
            values.append(float("nan"))
        times.append(second - axis.until)
        values.append(value)
    return times, values


def _tell_time(axes: Any, seconds: float, look: ChartStyle, last: str = NOW) -> None:  # noqa: ANN401 # matplotlib's axes, untyped here
    """Label the time axis with the last `seconds`, at steps that people count in."""
    from matplotlib import ticker  # noqa: PLC0415 # see above

    most = TICKS_MAX[look.width]
    step = next((each for each in STEPS if seconds / each <= most), STEPS[-1])
    axes.set_xlim(-seconds, 0)
    axes.xaxis.set_major_locator(ticker.MultipleLocator(step))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(partial(_before, last=last)))


def _before(seconds: float, _: object, last: str) -> str:
    if not seconds:
        return last
    for unit, name in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if not seconds % unit:
            return f"-{-seconds / unit:.0f} {name}"
    return f"-{abs(seconds):g} s"


def _drawable(name: str) -> str:
    """Make a name that any font can show; a long one keeps its end, which tells names apart."""
    plain = "".join(each if " " <= each <= "~" else "?" for each in name)
    return plain if len(plain) <= NAME_CHARACTERS_MAX else f"…{plain[1 - NAME_CHARACTERS_MAX :]}"
