"""Progress of a job in a terminal: a live view, or plain lines where there is no terminal."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from embedfarm.contract.formatting import format_seconds
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.status import JobStatus

WINDOW_SECONDS: Final = 10.0  # over which the rates are taken
SAMPLES_MIN: Final = 2
LINE_SECONDS: Final = 5.0  # between plain lines


@dataclass(frozen=True)
class CounterSample:
    """A job's counters at one moment."""

    at: float
    chunks: int
    tokens: int


@dataclass
class ProgressRates:
    """Rates over the last seconds, and the time that is left at them.

    Time begins with the first progress: how long a model takes to load says nothing about a pace.
    """

    samples: deque[CounterSample] = field(default_factory=deque)
    _before: int | None = None  # chunks when it began to look

    def update(self, status: JobStatus, now: float) -> None:
        """Take the newest counters."""
        if self._before is None:
            self._before = status.chunks_done
        if not self.samples and status.chunks_done == self._before:
            return
        self.samples.append(CounterSample(now, status.chunks_done, status.real_tokens_done))
        while len(self.samples) > SAMPLES_MIN and now - self.samples[0].at > WINDOW_SECONDS:
            self.samples.popleft()

    @property
    def rates(self) -> tuple[float, float]:
        """Chunks and tokens per second."""
        if len(self.samples) < SAMPLES_MIN:
            return 0.0, 0.0
        first, last = self.samples[0], self.samples[-1]
        seconds = max(1e-6, last.at - first.at)
        # A server that lost the end of its log counts some chunks again.
        return (
            max(0.0, last.chunks - first.chunks) / seconds,
            max(0.0, last.tokens - first.tokens) / seconds,
        )

    def seconds_left(self, chunks_left: int) -> float | None:
        """Return the time for that many chunks at this pace; None while there is no pace."""
        chunks_per_second = self.rates[0]
        return chunks_left / chunks_per_second if chunks_per_second else None


@dataclass
class View:
    """Draws a job's progress: as a live view, or as plain `lines` where there is no terminal."""

    console: Console
    lines: bool
    pace: ProgressRates = field(default_factory=ProgressRates)
    _live: Live | None = None
    _line_at: float = 0.0
    _said: tuple[str, str] = ("", "")

    def __enter__(self) -> Callable[[JobStatus, Sequence[Heartbeat]], None]:
        if not self.lines:
            self._live = Live(Text("starting"), console=self.console, refresh_per_second=4)
            self._live.start()
        return self.show

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: JobStatus, workers: Sequence[Heartbeat]) -> None:
        """Draw the newest state; as a line now and then, and when state or reason change."""
        now = time.monotonic()
        self.pace.update(status, now)
        if self._live is not None:
            self._live.update(self._panel(status, workers))
        elif now >= self._line_at or (status.state, status.reason) != self._said:
            self._line_at, self._said = now + LINE_SECONDS, (status.state, status.reason)
            self.console.print(self._summary(status, workers), highlight=False, soft_wrap=True)

    def _summary(self, status: JobStatus, workers: Sequence[Heartbeat]) -> str:
        chunks, tokens = self.pace.rates
        return (
            f"{describe_progress(status)}  {chunks:,.0f} chunks/s  {tokens:,.0f} tokens/s  "
            f"{describe_workers(workers)}  {self._remaining(status)}"
            + (f"  {status.chunks_failed:,} failed" if status.chunks_failed else "")
        )

    def _remaining(self, status: JobStatus) -> str:
        if status.state in {"paused", "cancelled"}:
            return status.state
        if status.reason:
            return status.reason
        if status.chunk_count < 0:
            return "still reading"
        left = self.pace.seconds_left(status.chunk_count - status.first_chunk - status.chunks_done)
        return "" if left is None else f"{format_seconds(left)} left"

    def _panel(self, status: JobStatus, workers: Sequence[Heartbeat]) -> Group:
        chunks, tokens = self.pace.rates
        total = status.chunk_count if status.chunk_count >= 0 else None
        bar = ProgressBar(
            total=total, completed=status.first_chunk + status.chunks_done, pulse=total is None
        )
        head = Text.assemble(
            (describe_progress(status), "bold"),
            f"   {chunks:,.0f} chunks/s   {tokens:,.0f} tokens/s   ",
            (self._remaining(status), "cyan"),
        )
        if status.chunks_failed:
            head.append(f"   {status.chunks_failed:,} failed", "bold red")
        # Padding ends the bar with a new line, which a bar by itself does not.
        return Group(head, Padding(bar, 0), worker_table(workers))


def describe_progress(status: JobStatus) -> str:
    """Describe how many chunks are embedded, and of how many."""
    done = status.first_chunk + status.chunks_done
    if status.chunk_count < 0:
        return f"{done:,} chunks of {status.first_chunk + status.chunks_in:,} read so far"
    return f"{done:,} of {status.chunk_count:,} chunks"


def describe_workers(workers: Sequence[Heartbeat]) -> str:
    """Describe how many workers there are, and how many of them are loading."""
    if not workers:
        return "no worker yet"
    loading = sum(1 for beat in workers if not beat.model)
    busy = f"{len(workers)} worker" + ("s" if len(workers) > 1 else "")
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
            beat.state if beat.model else "loading",
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
