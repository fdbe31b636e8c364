"""Progress of a job in a terminal: a live view, or plain lines where there is no terminal."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from embedfarm.contract.formatting import format_range
from embedfarm.contract.outlook import Outlook, OutlookReader
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.status import JobStatus
from embedfarm.runs.run import Show

LINE_SECONDS: Final = 5.0  # between plain lines


@dataclass
class View:
    """Draws a job's progress: as a live view, or as plain `lines` where there is no terminal."""

    console: Console
    lines: bool
    _live: Live | None = None
    _line_at: float = 0.0
    _said: tuple[str, str] = ("", "")

    def __enter__(self) -> Show:
        if not self.lines:
            self._live = Live(Text("starting"), console=self.console, refresh_per_second=4)
            self._live.start()
        return self.show

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: JobStatus, workers: Sequence[Heartbeat], outlook: OutlookReader) -> None:
        """Draw the newest state; as a line now and then, and when state or reason change."""
        now = time.monotonic()
        if self._live is not None:
            self._live.update(_panel(status, workers, outlook.read(status, workers)))
        elif now >= self._line_at or (status.state, status.reason) != self._said:
            self._line_at, self._said = now + LINE_SECONDS, (status.state, status.reason)
            line = _summary(status, workers, outlook.read(status, workers))
            self.console.print(line, highlight=False, soft_wrap=True)


def _summary(status: JobStatus, workers: Sequence[Heartbeat], outlook: Outlook) -> str:
    return (
        f"{describe_progress(status)}  {_rates(outlook, '  ')}  "
        f"{describe_workers(workers)}  {_remaining(status, outlook)}"
        + (f"  {status.spent.words}" if status.device_us else "")
        + (f"  {status.chunks_failed:,} failed" if status.chunks_failed else "")
    )


def _rates(outlook: Outlook, between: str) -> str:
    tokens, chunks = outlook.pace
    return f"{chunks:,.0f} chunks/s{between}{tokens:,.0f} tokens/s"


def _remaining(status: JobStatus, outlook: Outlook) -> str:
    if status.state in {"paused", "cancelled"}:
        return f"{status.state}: {status.reason}" if status.reason else status.state
    if status.reason:
        return status.reason
    if status.chunk_count < 0:
        return "still reading" if status.chunks_in else ""
    left = outlook.seconds_left
    return "" if left is None else f"{format_range(*left)} left"


def _panel(status: JobStatus, workers: Sequence[Heartbeat], outlook: Outlook) -> Group:
    total = status.chunk_count if status.chunk_count >= 0 else None
    bar = ProgressBar(total=total, completed=status.done, pulse=total is None)
    head = Text.assemble(
        (describe_progress(status), "bold"),
        f"   {_rates(outlook, '   ')}   ",
        (_remaining(status, outlook), "cyan"),
    )
    if status.device_us:
        head.append(f"   {status.spent.words}", "dim")
    if status.chunks_failed:
        head.append(f"   {status.chunks_failed:,} failed", "bold red")
    # Padding ends the bar with a new line, which a bar by itself does not.
    return Group(head, Padding(bar, 0), worker_table(workers))


def describe_progress(status: JobStatus) -> str:
    """Describe how many chunks are embedded, and of how many."""
    reuse = f" ({status.reuse})" if status.chunks_reused else ""
    if status.chunk_count >= 0:
        return f"{status.done:,} of {status.known:,} chunks{reuse}"
    if not status.known:
        return "nothing read yet"
    return f"{status.done:,} chunks of {status.known:,} read so far{reuse}"


def describe_workers(workers: Sequence[Heartbeat]) -> str:
    """Describe how many workers there are, and how many of them are loading."""
    if not workers:
        return "no worker yet"
    loading = sum(beat.state == "loading" for beat in workers)
    busy = f"{len(workers)} worker" + ("s" if len(workers) > 1 else "")
    if any(beat.trying_engines for beat in workers):
        return f"{busy}, trying which engine is faster for this model, once on this machine"
    return f"{busy}, {loading} loading" if loading else busy


def worker_table(workers: Sequence[Heartbeat]) -> Table:
    """Return a table of workers: state, speed, share of the chunks, device's use and memory."""
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "state"):
        table.add_column(name)
    for name in ("tokens/s", "share", "chunks", "device", "memory"):
        table.add_column(name, justify="right")
    total = sum(beat.chunks_done for beat in workers)
    for beat in workers:
        table.add_row(
            beat.worker,
            beat.state,
            f"{beat.tokens_per_second:,.0f}",
            f"{beat.chunks_done / total:.0%}" if total else "",
            f"{beat.chunks_done:,}",
            _device_share(beat),
            _memory(beat),
        )
    return table


def _device_share(beat: Heartbeat) -> str:
    """Describe for what share of time a worker's device computed, since its first work."""
    computing = beat.where.get("forward", 0.0)
    waiting = beat.where.get("queue", 0.0)
    return f"{computing / (computing + waiting):.0%} busy" if computing else ""


def _memory(beat: Heartbeat) -> str:
    facts = beat.device_facts
    used = facts.get("memory_used_bytes", facts.get("rss_bytes", 0.0))
    return f"{used / (1 << 30):.1f} GiB" if used else ""
