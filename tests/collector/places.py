"""A place for the vectors of an output that lists where they are stored."""

from pathlib import Path

from embedfarm.collector.stored_vectors import STORED_FILE
from embedfarm.contract.stored_results import LocalFiles


def say_where(out: Path) -> Path:
    """Say that the vectors of an output are stored in a directory beside it, and return that."""
    place = out.with_name(f"{out.name}-stored")
    LocalFiles(place).make()
    (out / STORED_FILE).parent.mkdir(parents=True, exist_ok=True)
    (out / STORED_FILE).write_text(f"{place}\n")
    return place
