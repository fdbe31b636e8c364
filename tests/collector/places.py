"""A place for the vectors of an output that lists where they are stored, and damage to a part."""

from pathlib import Path

from embedfarm.collector.manifest import Part
from embedfarm.collector.stored_vectors import STORED_FILE
from embedfarm.contract.stored_results import LocalFiles


def say_where(out: Path) -> Path:
    """Say that the vectors of an output are stored in a directory beside it, and return that."""
    place = out.with_name(f"{out.name}-stored")
    LocalFiles(place).make()
    (out / STORED_FILE).parent.mkdir(parents=True, exist_ok=True)
    (out / STORED_FILE).write_text(f"{place}\n")
    return place


def damage(out: Path, part: Part) -> None:
    """Change one bit in the middle of a part that is on the disk."""
    path, offset, size = part.spans(out)[0]
    with path.open("r+b") as file:
        file.seek(offset + size // 2)
        (byte,) = file.read(1)
        file.seek(offset + size // 2)
        file.write(bytes([byte ^ 1]))
