"""Tests of the list of rows that were left out."""

import errno
import json
import os
import threading
from io import FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from embedfarm.readers import BadRow
from embedfarm.runs.skipped_rows import SkippedFile

if TYPE_CHECKING:
    from collections.abc import Callable


def test_without_bad_rows_nothing_is_written(tmp_path: Path) -> None:
    """A corpus without bad rows gets no list, and those of runs before it are removed."""
    record = SkippedFile(tmp_path / "_skipped.jsonl", 0.01, threading.Event())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "_skipped.jsonl").write_text("of rows that were bad")
    (tmp_path / "_skipped.partial").write_text("cut off")
    record.close()
    assert list(tmp_path.iterdir()) == []


def test_rows_take_their_place_together(tmp_path: Path) -> None:
    """The list of skipped rows appears only when it is complete."""
    record = SkippedFile(tmp_path / "_skipped.jsonl", 0.01, threading.Event())
    for row in (3, 5):
        record.add(BadRow("corpus.jsonl", row, "text", "is missing"))
    assert record.count == 2
    assert not (tmp_path / "_skipped.jsonl").exists()
    record.close()
    assert len((tmp_path / "_skipped.jsonl").read_text().splitlines()) == 2
    assert len(list(tmp_path.iterdir())) == 1


class ShortFile(FileIO):
    """A file on a disk that takes three bytes of a write, refuses the next one, and so on."""

    writes = 0

    def write(self, data: Any, /) -> int:  # noqa: ANN401 # as the file's own
        """Write three bytes, or nothing."""
        self.writes += 1
        if self.writes % 3 == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(bytes(data)[: None if self.writes % 3 == 1 else 3])


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are listed whole, one after the other, on a disk that has no room now and then."""
    refused = iter([True, False])

    def open_if_there_is_room(self: Path, mode: str = "r", buffering: int = -1) -> IO[bytes]:
        if mode != "wb":
            return open_file(self, mode, buffering)
        if next(refused, False):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        assert buffering == 0
        return ShortFile(self, "w")

    open_file: Callable[..., IO[bytes]] = Path.open
    monkeypatch.setattr(Path, "open", open_if_there_is_room)
    record = SkippedFile(tmp_path / "_skipped.jsonl", 0.01, threading.Event())
    for row in range(7):
        record.add(BadRow("corpus.jsonl", row, "text", "is missing"))
    record.close()
    lines = (tmp_path / "_skipped.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["line"] for line in lines] == list(range(7))


def test_a_full_disk_is_not_waited_for_after_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the run is to stop, the error of the disk ends the waiting."""

    def refuse(*_: object, **__: object) -> IO[bytes]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", refuse)
    stop = threading.Event()
    stop.set()
    record = SkippedFile(tmp_path / "_skipped.jsonl", 60.0, stop)
    with pytest.raises(OSError, match="No space"):
        record.add(BadRow("corpus.jsonl", 1, "text", "is missing"))
