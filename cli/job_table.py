"""The table of jobs that `embedfarm jobs ls` prints."""

from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from embedfarm.cli.options import shorten_id
from embedfarm.cli.term_options import PASSED, TOO_LITTLE, describe_left
from embedfarm.contract.scheduling_terms import USUAL, priority_name
from embedfarm.contract.spending import format_cost
from embedfarm.watch.overview import JobFacts

COLUMNS: Final = (
    "job", "name", "model", "state", "chunks", "done", "failed", "priority", "tenant", "labels",
    "deadline", "cost",
)  # fmt: skip
COLUMNS_OF_NUMBERS: Final = frozenset({"chunks", "done", "failed", "cost"})
COLUMNS_OF_TERMS: Final = frozenset({"priority", "tenant", "deadline", "labels"})
COLUMNS_OPTIONAL: Final = COLUMNS_OF_TERMS | {"failed", "cost"}
COLUMNS_FREE: Final = frozenset({"name", "model", "tenant", "labels"})
"""Columns that are cut where the screen is too narrow."""


def job_table(jobs: Sequence[JobFacts], ids: Sequence[str]) -> Table:
    """Return a table of jobs without empty columns; terms take the place of the model."""
    rows = [_describe_row(job, ids) for job in jobs]
    empty = {name for name in COLUMNS_OPTIONAL if not any(row[name] for row in rows)}
    hidden = empty if empty >= COLUMNS_OF_TERMS else empty | {"model"}
    table = Table(box=None, pad_edge=False)
    for name in (name for name in COLUMNS if name not in hidden):
        free = name in COLUMNS_FREE
        right = name in COLUMNS_OF_NUMBERS
        table.add_column(
            name, justify="right" if right else "left", no_wrap=not free, overflow="ellipsis"
        )
    for row in rows:
        cells = {name: Text(row[name]) for name in COLUMNS if name not in hidden}
        if row["deadline"].endswith((PASSED, TOO_LITTLE)):
            cells["deadline"].stylize("red")
        table.add_row(*cells.values())
    return table


def _describe_row(facts: JobFacts, ids: Sequence[str]) -> dict[str, str]:
    """Return the cells of a job's line, by column."""
    priority = facts.priority
    return {
        "job": shorten_id(facts.job, ids),
        "name": facts.name,
        "model": facts.model.rpartition("/")[2],
        "state": facts.state,
        "chunks": f"{facts.known:,}",
        "done": f"{facts.done:,}",
        "failed": f"{facts.chunks_failed:,}" if facts.chunks_failed else "",
        "priority": "" if priority == USUAL.priority else priority_name(priority),
        "tenant": facts.tenant,
        "labels": facts.labels,
        "deadline": (
            "" if facts.embedded else describe_left(facts.deadline_ms, facts.late_seconds)
        ),
        "cost": format_cost(facts.cost) if facts.cost else "",
    }
