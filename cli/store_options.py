"""Options of verbs that export into a vector store, and what they say of it."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.console import Console

from embedfarm.contract.formatting import counted

if TYPE_CHECKING:
    from embedfarm.collector.store_export import ExportReport, Others
    from embedfarm.contract.settings import Settings
    from embedfarm.runs.store_feed import Destination

LINE_SECONDS: Final = 5.0  # between two lines of progress

To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="URL",
        help="Vector store that gets the vectors: qdrant, postgresql, milvus or lancedb, as in "
        "qdrant://localhost:6333#documents; or a name in the setting stores.",
    ),
]
OthersInStore = Annotated[
    Literal["refuse", "keep", "delete"],
    typer.Option(
        "--others",
        help="What becomes of rows in the store that the output does not have, such as those of "
        "ids that were removed.",
    ),
]


def destination_of(to: str, others: "Others", settings: "Settings") -> "Destination | None":
    """Return where vectors go beside their output; None where they go nowhere else."""
    from embedfarm.runs.store_feed import find_destination

    return find_destination(to, others, settings) if to else None


class ExportLines:
    """Says on standard error how far an export is, every few seconds.

    Args:
        total: Number of chunks in the output.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._line_at = time.monotonic() + LINE_SECONDS

    def show(self, chunks: int) -> None:
        """Say how many chunks the store has, if nothing was said for a while."""
        if time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_SECONDS
            print(f"{chunks:,} of {self._total:,} chunks in the store", file=sys.stderr)  # noqa: T201


def print_export(report: "ExportReport", store: str) -> None:
    """Say what an export did, and what the store has now."""
    did = [f"{counted(report.sent, 'row')} written"] if report.sent else []
    did += [f"{report.deleted:,} deleted"] if report.deleted else []
    console = Console(highlight=False, soft_wrap=True, markup=False)
    said = ", ".join(did) or "nothing to write"
    others = "" if report.exact else ", with those that are not of this output"
    console.print(f"{said}; {counted(report.rows, 'row')} in {store}{others}")
