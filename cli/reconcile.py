"""`embedfarm reconcile`: tells where the chunks of a job are, and sends lost ones again."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from embedfarm.cli.jobs import JobId, find_job, on_farm
from embedfarm.cli.options import (
    FAILED,
    AsJson,
    RedisUrl,
    print_json,
    read_settings,
    stop_on_signals,
)
from embedfarm.contract.coverage import Coverage, describe_ranges
from embedfarm.contract.coverage import reconcile as look
from embedfarm.contract.jobs import Job

if TYPE_CHECKING:
    import threading


def reconcile(job: JobId, redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Say where the chunks of a job are; on the host of its output, send lost ones again.

    The command that fills the output does so by itself. Status 1: some are missing still.
    """
    stop = stop_on_signals()
    with on_farm(redis) as farm:
        handle = find_job(farm, job)
        out = Path(handle.status().out)
        on_disk = _count_on_disk(out)
        lost = look(handle).missing(on_disk)
        sent = _send_again(handle, out, lost, stop) if lost else 0
        coverage = look(handle)
    missing = coverage.missing(on_disk)
    if as_json:
        print_json(
            {
                "job": handle.id,
                "out": str(out),
                "on_disk": max(on_disk, coverage.drained_upto),
                "results": _count(coverage.results),
                "leased": _count(coverage.leased),
                "waiting": _count(coverage.waiting),
                "pushed_upto": coverage.pushed_upto,
                "sent_again": sent,
                "missing": [[each.start, each.stop] for each in missing],
            }
        )
    else:
        _print(coverage, on_disk, sent, missing)
    if missing:
        raise typer.Exit(FAILED)


def _count_on_disk(out: Path) -> int:
    """Return the index after the last chunk in an output on this host; 0 if there is none."""
    from embedfarm.collector.output_reader import NotBegun, OutputReader

    try:
        with OutputReader(out) as reader:
            return reader.available
    except NotBegun:
        return 0


def _send_again(job: Job, out: Path, lost: Sequence[range], stop: "threading.Event") -> int:
    """Send lost chunks again if their output is on this host; return how many the server took."""
    from embedfarm.collector.output_directory import read_request
    from embedfarm.collector.output_reader import read_parts
    from embedfarm.ingest.rq_jobs import farm_jobs
    from embedfarm.runs.reconciler import send_again

    if job.id not in farm_jobs(out):
        return 0
    return send_again(job, lost, read_request(out), read_parts(out), read_settings(), stop)


def _count(ranges: Sequence[range]) -> int:
    return sum(map(len, ranges))


def _print(coverage: Coverage, on_disk: int, sent: int, missing: Sequence[range]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    rows = {
        "on disk": (max(on_disk, coverage.drained_upto), ""),
        "results": (_count(coverage.results), "embedded, not on disk yet"),
        "leased": (_count(coverage.leased), "a worker has them"),
        "waiting": (_count(coverage.waiting), "for a worker"),
        "sent again": (sent, "were lost"),
        "missing": (_count(missing), describe_ranges(missing)),
    }
    for name, (count, remark) in rows.items():
        table.add_row(name, f"{count:,}", remark)
    Console(highlight=False, soft_wrap=True).print(table)
