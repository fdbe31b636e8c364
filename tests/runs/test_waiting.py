"""Tests of what a run waits for before it begins."""

import threading
import time
from pathlib import Path

import pytest

import embedfarm
from embedfarm.collector.output_directory import OutputBusy, locked
from embedfarm.runs import disk_room
from embedfarm.runs.disk_room import when_free
from tests.farm.harness import check_output, write_corpus


def test_an_output_that_is_held_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """A command goes on when the children of one that was killed let go of its lock."""
    texts, out = ["a river", "a bank"], tmp_path / "out"
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    let_go = threading.Event()

    def hold() -> None:
        with locked(out / ".embedfarm"):
            held.set()
            let_go.wait(60)

    held = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    threading.Timer(0.3, let_go.set).start()
    embedfarm.embed(corpus, out=out, model="null:16", progress=False)
    holder.join()
    check_output(out, texts, 16)


def test_an_output_that_stays_busy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that waits in vain is told so, and one that is stopped does not wait."""
    monkeypatch.setattr(disk_room, "BUSY_SECONDS", 0.2)
    attempts = []

    def begin() -> None:
        attempts.append(time.monotonic())
        raise OutputBusy(f"another process is writing to {tmp_path}")

    with pytest.raises(OutputBusy):
        when_free(begin, threading.Event())
    assert len(attempts) > 2
    assert attempts[-1] - attempts[0] >= 0.1
    (stop := threading.Event()).set()
    attempts.clear()
    with pytest.raises(OutputBusy):
        when_free(begin, stop)
    assert len(attempts) == 1
