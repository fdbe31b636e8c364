"""`embedfarm top`: the whole farm in a terminal, with the figures of the overview page."""

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from embedfarm.cli.options import (
    AsJson,
    RedisUrl,
    farm_settings,
    plain_errors,
    print_json,
    shorten_id,
    stop_on_signals,
)
from embedfarm.contract.broker import UNAVAILABLE, closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.formatting import format_bytes, format_count, format_range, one_line
from embedfarm.contract.outlook import done_ratio
from embedfarm.watch.overview import JobFacts
from embedfarm.watch.view import FarmReader, FarmView, JobView, WorkerView

T = TypeVar("T")

REFRESH_SECONDS: Final = 1.0
SIGNAL_SECONDS: Final = 0.1  # between looks whether one has come
BOTTLENECKS_MAX: Final = 5  # on a screen
WORD_CHARACTERS: Final = 16  # what a line may lack where a sentence is broken
FRAME_LINES: Final = 6  # the headline, and a blank one and a head for each table
WIDE_COLUMNS: Final = 100  # from there on there is room for longer bars and names
SPARKS: Final = " ▁▂▃▄▅▆▇█"
MARKS: Final = {"error": ("✖", "bold red"), "warning": ("▲", "yellow"), "info": ("•", "cyan")}
STATE_STYLES: Final = {
    "busy": "green", "idle": "yellow", "loading": "cyan", "draining": "magenta",
    "queued": "dim", "paused": "yellow", "cancelled": "red", "failed": "bold red",
    "finished": "green",
}  # fmt: skip


def top(redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Show the farm at a glance, live; one snapshot with --json, or where there is no terminal."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        reader = FarmReader(FarmClient(client), settings)
        view = reader.read()
        console = Console(highlight=False)
        if as_json:
            print_json(msgspec.to_builtins(view))
        elif console.is_terminal:
            _watch(reader, view, console)
        else:
            console.print(draw(view, console.width, None))


def _watch(reader: FarmReader, view: FarmView, console: Console) -> None:
    """Show the farm, once a second, until q or Ctrl-C."""
    stop = stop_on_signals()  # an exception could be lost in whatever the signal comes upon
    trouble = ""
    with (
        Live(console=console, screen=True, auto_refresh=False) as live,
        _keys() as keyboard,
    ):
        while True:
            live.update(draw(view, console.width, console.height, trouble), refresh=True)
            if _quits(keyboard, stop):
                return
            try:
                view, trouble = reader.read(), ""
            except UNAVAILABLE as error:
                trouble = f"the server is away, trying again: {error}"


@contextlib.contextmanager
def _keys() -> Iterator[bool]:
    """Let keys come as they are pressed, without echo; yield whether there is a keyboard."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios  # Windows has neither
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quits(keyboard: bool, stop: threading.Event) -> bool:  # noqa: FBT001 -- what `_keys` gives
    """Wait until the view is due again; tell whether q or Ctrl-C was pressed meanwhile."""
    until = time.monotonic() + REFRESH_SECONDS
    while (left := until - time.monotonic()) > 0 and not stop.is_set():
        keys = [sys.stdin] if keyboard else []
        ready, _, _ = select.select(keys, [], [], min(left, SIGNAL_SECONDS))
        if ready and os.read(sys.stdin.fileno(), 1) in {b"q", b"Q", b""}:
            return True
    return stop.is_set()


# Drawing the view.


def draw(view: FarmView, width: int, height: int | None, trouble: str = "") -> Group:
    """Draw the view for a screen of that size; all of it where there is no `height`."""
    wide = width >= WIDE_COLUMNS
    said = list(_bottlenecks(view, trouble, None if height is None else BOTTLENECKS_MAX))
    lines = sum(1 + len(each) // (width - WORD_CHARACTERS) for each in said)
    room = None if height is None else max(4, height - lines - FRAME_LINES)
    ids = [job.job for job in (*view.jobs, *view.ended)]
    jobs = [*sorted(view.jobs, key=lambda job: job.chunks_per_second == 0), *view.ended]
    jobs_max, workers_max = divide(room, len(jobs), len(view.workers))
    parts: list[RenderableType] = [*_headline(view, wide=wide), *said]
    if jobs:
        parts += ["", *_cut(jobs, jobs_max, "jobs", partial(_job_table, ids=ids, wide=wide))]
    if view.workers:
        names = {job.job: _name(job, ids, wide=wide) for job in view.jobs}
        table = partial(_worker_table, names=names, wide=wide)
        parts += ["", *_cut(view.workers, workers_max, "workers", table)]
    return Group(*parts)


def divide(room: int | None, jobs: int, workers: int) -> tuple[int, int]:
    """Divide lines between jobs and workers: half each, and what one does not need to the other."""
    if room is None:
        return jobs, workers
    for_jobs = min(jobs, max(room // 2, room - workers))
    return for_jobs, min(workers, room - for_jobs)


def _cut(
    rows: Sequence[T], most: int, what: str, table: Callable[[Sequence[T]], Table]
) -> Iterator[RenderableType]:
    """Yield a table of at most `most` lines, the last of which says how many more there are."""
    shown = rows if len(rows) <= most else rows[: max(0, most - 1)]
    yield table(shown)
    if len(shown) < len(rows):
        yield Text(f"and {len(rows) - len(shown):,} more {what}", "dim")


def _headline(view: FarmView, *, wide: bool) -> Iterator[Table]:
    rate = Text.assemble(
        ("embedfarm  ", "bold"),
        (format_count(view.tokens_per_second), "bold green"),
        " tokens/s  ",
        (format_count(view.chunks_per_second), "bold green"),
        " chunks/s  ",
        (spark([each.tokens_per_second for each in view.rates], 48 if wide else 10), "green"),
    )
    counts = f"{_count(view.jobs_total, 'job')}  {_count(len(view.workers), 'worker')}"
    yield _ends(rate, Text(f"{counts}  {time.strftime('%H:%M:%S', time.localtime(view.time))}"))
    left = Text.assemble(
        "backlog ",
        (format_count(view.backlog_chunks), "bold"),
        " chunks, ",
        (format_count(view.backlog_tokens), "bold"),
        " tokens",
        (", more to come" if view.reading else "", "dim"),
    )
    if view.backlog_chunks and view.backlog_seconds:
        left.append("  ").append(f"{format_range(*view.backlog_seconds)} left", "bold cyan")
    memory = _bytes(view.memory_used_bytes, view.memory_bytes_max)
    yield _ends(left, Text(f"server {memory}", "dim"))


def _ends(left: Text, right: Text) -> Table:
    """Return a line with a text at either end; the left one gives way."""
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    line.add_row(left, right)
    return line


def spark(values: Sequence[float], width: int) -> str:
    """Draw the newest values as a curve of a line's height, from zero to the greatest of them."""
    shown = values[-width:]
    most = max(shown, default=0.0)
    steps = len(SPARKS) - 1
    return "".join(SPARKS[round(steps * value / most)] for value in shown) if most else ""


def _bottlenecks(view: FarmView, trouble: str, most: int | None) -> Iterator[Text]:
    if trouble:
        yield _sentence("error", trouble)
    for each in view.bottlenecks[:most]:
        yield _sentence(each.severity, each.text)
    if most is not None and len(view.bottlenecks) > most:
        yield Text(f"  and {len(view.bottlenecks) - most} more", "dim")


def _sentence(severity: str, words: str) -> Text:
    mark, style = MARKS[severity]
    return Text(f"{mark} {words}", style)


def _table(words: Sequence[str], figures: Sequence[str]) -> Table:
    """Return an empty table with columns of words, and then of figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in words:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in figures:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def _job_table(jobs: Sequence[JobFacts], *, ids: Sequence[str], wide: bool) -> Table:
    failing = any(job.chunks_failed for job in jobs)
    words = ["id", "job", ""] if wide else ["job", ""]
    figures = ["", "chunks", "chunks/s", "left", *(["failed"] if failing else [])]
    table = _table(words, figures)
    for job in jobs:
        cells: list[RenderableType] = [
            *([Text(job.job[:8], "dim")] if wide else []),
            Text(_name(job, ids, wide=wide)),
            *_progress(job, wide=wide),
            format_count(job.chunks_per_second) if isinstance(job, JobView) else "",
            _left(job),
        ]
        failed = format_count(job.chunks_failed) if job.chunks_failed else ""
        table.add_row(*cells, *([Text(failed, "bold red")] if failing else []))
    return table


def _name(job: JobFacts, ids: Iterable[str], *, wide: bool) -> str:
    """Return a job's name or as much of its id as tells it from the others."""
    return one_line(job.name, 32 if wide else 12) or shorten_id(job.job, ids)


def _progress(job: JobFacts, *, wide: bool) -> tuple[ProgressBar, str, str]:
    """Return a bar, the share of the job that is embedded if that is known, and its chunks."""
    known = job.chunk_count >= 0
    style = STATE_STYLES.get(job.state, "green")
    bar = ProgressBar(
        max(1, job.known), job.done, 24 if wide else 10, complete_style=style, finished_style=style
    )
    share = done_ratio(job)
    ratio = "" if share is None else f"{share:.0%}"
    if not job.known and not known:
        return bar, ratio, "nothing read yet"
    more = "" if known else "+"
    return bar, ratio, f"{format_count(job.done)} of {format_count(job.known)}{more}"


def _left(job: JobFacts) -> Text:
    """Describe how long a job will take, or its state if it does not move."""
    if job.state in STATE_STYLES:
        return Text(job.state, STATE_STYLES[job.state])
    if not isinstance(job, JobView) or job.chunks_left is None:
        return Text("reading", "dim")
    if not job.chunks_left:
        return Text("collecting", "dim")
    if job.seconds_left is None:
        return Text("waiting", "dim")
    return Text(format_range(*job.seconds_left), "cyan")


def _worker_table(workers: Sequence[WorkerView], *, names: Mapping[str, str], wide: bool) -> Table:
    warm = any(each.temperature_celsius is not None for each in workers)
    heat = ["°C"] if warm else []
    table = _table(["worker", "state", "job"], ["tokens/s", "share", "", *heat, "memory"])
    for each in workers:
        degrees = each.temperature_celsius
        table.add_row(
            Text(one_line(each.worker, 40 if wide else 20)),
            Text(each.state, STATE_STYLES.get(each.state, "")),
            Text(names.get(each.job, each.job[:8])),
            format_count(each.tokens_per_second),
            f"{each.share:.0%}",
            ProgressBar(
                1, each.share, 16 if wide else 8, complete_style="cyan", finished_style="cyan"
            ),
            *(["" if degrees is None else f"{degrees:.0f}"] if warm else []),
            _bytes(each.memory_used_bytes, each.memory_total_bytes if wide else None),
        )
    return table


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _bytes(used: float | None, most: float | None) -> str:
    """Describe the memory in use, and of how much if that is known."""
    if used is None:
        return ""
    return format_bytes(used) + (f" of {format_bytes(most)}" if most else "")
