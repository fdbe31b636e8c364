"""The table of a corpus's last jobs that `embedfarm jobs runs` prints."""

from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from embedfarm.cli.options import shorten_id
from embedfarm.contract.formatting import format_moment, format_seconds
from embedfarm.contract.spending import format_cost, format_device_hours
from embedfarm.watch.corpus_runs import CorpusRun

NUMBERS: Final = ("chunks", "took", "chunks/s", "devices", "cost", "failed")


def run_table(runs: Sequence[CorpusRun]) -> Table:
    """Return a table with a line for each job, the newest first."""
    ids = [each.facts.job for each in runs]
    table = Table(box=None, pad_edge=False)
    for name in ("job", "created", "state"):
        table.add_column(name, no_wrap=True)
    for name in NUMBERS:
        table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
    for each in runs:
        facts = each.facts
        table.add_row(
            Text(shorten_id(facts.job, ids)),
            format_moment(facts.created_ms / 1000)[5:16],
            facts.state,
            f"{facts.known:,}",
            format_seconds(each.seconds),
            f"{each.chunks_per_second:,.0f}",
            format_device_hours(facts.device_hours),
            format_cost(facts.cost) if facts.cost else "",
            f"{facts.chunks_failed:,}",
        )
    return table
