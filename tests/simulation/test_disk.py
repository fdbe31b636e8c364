"""Tests of the simulated disk: what a power loss leaves, and what its errors do."""

import errno
import io
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from embedfarm.collector.manifest import STATE_DIRECTORY
from embedfarm.collector.output_directory import JOURNAL_FILE, REQUEST_FILE
from embedfarm.contract.durable_files import make_directories, replacing, sync, sync_directory
from embedfarm.runs.ending import discard_output
from tests.simulation import mount
from tests.simulation.disk import Disk
from tests.simulation.states import STATES
from tests.simulation.world import Doom, Effect, Process, World, enter

SEEDS: Final = range(60)

Program = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _system(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the process its own functions back."""
    for name in (
        "open",
        "close",
        "fsync",
        "replace",
        "rename",
        "unlink",
        "remove",
        "rmdir",
        "mkdir",
    ):
        monkeypatch.setattr(os, name, getattr(os, name))
    monkeypatch.setattr(io, "open", io.open)
    mount.take_over.cache_clear()
    yield
    mount.mounted.clear()
    mount.take_over.cache_clear()


def make(directory: Path, seed: int = 1) -> Disk:
    """Make an empty disk, in a world of its own."""
    world = World(seed)
    enter(world)
    return Disk(directory / f"disk-{seed}", world, lambda: 0.001, print)


def run(disk: Disk, program: Program, doom: Doom | None = None) -> Process:
    """Run a program in a process until it ends, and return the process."""
    process = Process("program")
    process.doom = doom
    if doom is not None:
        doom.die = lambda: disk.world.kill(process)
    disk.world.spawn(process, "main", lambda: program(disk.root))
    assert disk.world.run(lambda: not process.tasks, 1000.0)
    return process


def after_power_loss(disk: Disk) -> dict[str, bytes]:
    """Return the content by path of all files that a power loss leaves."""
    disk.lose_power()
    with disk.unmounted():
        return {
            str(path.relative_to(disk.root)): path.read_bytes()
            for path in disk.root.rglob("*")
            if path.is_file()
        }


def outcomes(directory: Path, program: Program) -> list[dict[str, bytes]]:
    """Return the files that power losses with several seeds leave of a program."""
    found = []
    for seed in SEEDS:
        disk = make(directory, seed)
        run(disk, program)
        found.append(after_power_loss(disk))
    return found


def write_durably(root: Path) -> None:
    """Write a file in a directory, and sync it and both names."""
    (root / "a").mkdir()
    sync_directory(root)
    with replacing(root / "a" / "file") as file:
        file.write(b"first")
    with (root / "a" / "file").open("r+b") as again:
        again.truncate(2)
        again.seek(4)
        again.write(b"xx")
        sync(again)


def test_what_was_synced_stays(tmp_path: Path) -> None:
    """The content and the name of a synced file stay, whatever else a power loss takes."""

    def program(root: Path) -> None:
        write_durably(root)
        (root / "a" / "other").write_bytes(b"not synced")

    for left in outcomes(tmp_path, program):
        assert left["a/file"] == b"fi\0\0xx"


def test_a_discarded_output_does_not_come_back(tmp_path: Path) -> None:
    """What a refused command has discarded is gone after any power loss."""

    def program(root: Path) -> None:
        make_directories(root / "out" / STATE_DIRECTORY)
        for name in (REQUEST_FILE, "parts.jsonl"):
            with replacing(root / "out" / STATE_DIRECTORY / name) as file:
                file.write(b"{}")
        discard_output(root / "out")

    assert outcomes(tmp_path, program) == [{}] * len(SEEDS)


@pytest.mark.parametrize("left", range(1, 40))
def test_no_part_outlives_the_request(tmp_path: Path, left: int) -> None:
    """A power loss while an output is discarded leaves no part without the output's request."""

    def program(root: Path) -> None:
        make_directories(root / "out" / STATE_DIRECTORY)
        for name in (f"{STATE_DIRECTORY}/{REQUEST_FILE}", f"{STATE_DIRECTORY}/{JOURNAL_FILE}",
                     "part-000000000000.parquet"):  # fmt: skip
            with replacing(root / "out" / name) as file:
                file.write(b"{}")
        began.append(True)
        doom.left = left
        discard_output(root / "out")

    for seed in SEEDS[:10]:
        disk, began, doom = make(tmp_path, seed), [], Doom(Effect.FILE, 1000, lambda: None)  # type: ignore[var-annotated]
        run(disk, program, doom)
        assert began
        there = {Path(path).name for path in after_power_loss(disk)}
        assert there <= {REQUEST_FILE} or REQUEST_FILE in there, seed


def test_syncs_that_overlap_undo_nothing(tmp_path: Path) -> None:
    """A sync that began earlier and ends later than another one takes back nothing of that."""
    for seed in SEEDS:
        disk = make(tmp_path, seed)
        seconds = iter([0.3, 0.1])
        disk.sync_seconds = lambda: next(seconds, 0.0)  # noqa: B023 # used up in this turn
        process = Process("program")

        def make_one(name: str) -> None:
            (disk.root / name).mkdir()  # noqa: B023 # as above
            sync_directory(disk.root)  # noqa: B023

        for name in ("first", "second"):
            disk.world.spawn(process, name, partial(make_one, name))
        assert disk.world.run(lambda: not process.tasks, 1000.0)  # noqa: B023
        disk.lose_power()
        assert {path.name for path in disk.root.iterdir()} == {"first", "second"}


def test_what_was_not_synced_may_go(tmp_path: Path) -> None:
    """A power loss may take an append that was not synced, keep it, tear it or leave zeros."""

    def program(root: Path) -> None:
        write_durably(root)
        with (root / "a" / "file").open("ab") as file:
            file.write(b"more")

    seen = {left["a/file"].removeprefix(b"fi\0\0xx") for left in outcomes(tmp_path, program)}
    assert {b"", b"more", b"\0\0\0\0"} < seen
    assert any(b"more".startswith(each) for each in seen - {b"", b"more"})


@pytest.mark.parametrize(
    ("change", "lost", "kept", "state"),
    [
        (lambda a: (a / "file").unlink(), {"file": b"fi\0\0xx"}, {}, "deleted name back"),
        (lambda a: (a / "file").rename(a / "to"), {"file": b"fi\0\0xx"}, {"to": b"fi\0\0xx"},
         "rename undone"),
        (lambda a: (a / "new").touch(), {"file": b"fi\0\0xx"}, {"file": b"fi\0\0xx", "new": b""},
         "new name forgotten"),
    ],
)  # fmt: skip
def test_names_that_were_not_synced_may_be_as_before(
    tmp_path: Path,
    change: Program,
    lost: dict[str, bytes],
    kept: dict[str, bytes],
    state: str,
) -> None:
    """A power loss undoes an unsynced unlink, rename or new name as a whole, or not at all."""
    assert state in STATES

    def program(root: Path) -> None:
        write_durably(root)
        change(root / "a")

    found = outcomes(tmp_path, program)
    for names in (lost, kept):
        assert {f"a/{name}": content for name, content in names.items()} in found
    assert len({str(sorted(each.items())) for each in found}) == 2


def test_a_failed_sync_is_never_made_good(tmp_path: Path) -> None:
    """A power loss takes what a failed sync was to write, even if a later sync succeeds."""
    disk = make(tmp_path)
    disk.syncs_left = 0

    def program(root: Path) -> None:
        with (root / "file").open("wb") as file:
            file.write(b"abc")
            with pytest.raises(OSError, match="Input/output error"):
                sync(file)
            file.write(b"def")
            sync(file)
        sync_directory(root)
        assert (root / "file").read_bytes() == b"abcdef"

    run(disk, program)
    assert disk.world.reached["sync failed"] == 1
    assert after_power_loss(disk) == {"file": b"\0\0\0def"}


def test_a_full_disk_takes_nothing_new(tmp_path: Path) -> None:
    """A full disk refuses new files and directories, but lets what is there be written over."""
    disk = make(tmp_path)

    def program(root: Path) -> None:
        write_durably(root)
        disk.full = True
        for attempt in ((root / "b").mkdir, lambda: (root / "c").write_bytes(b"c" * 9)):
            with pytest.raises(OSError, match="No space left") as caught:
                attempt()
            assert caught.value.errno == errno.ENOSPC
        with (root / "a" / "file").open("r+b") as file:
            file.write(b"FI")
        disk.full = False
        (root / "c").write_bytes(b"c")

    run(disk, program)
    assert (disk.root / "a" / "file").read_bytes() == b"FI\0\0xx"
    assert (disk.root / "c").read_bytes() == b"c"


@pytest.mark.parametrize("left", range(1, 24))
def test_a_process_dies_at_any_change(tmp_path: Path, left: int) -> None:
    """A process that dies loses its buffers, and nothing that it does on its way out has effect."""
    disk = make(tmp_path)
    found = []

    def program(root: Path) -> None:
        try:
            write_durably(root)
        finally:
            found.append(sorted(root.rglob("*")))
            (root / "late").touch()

    process = run(disk, program, Doom(Effect.FILE, left, lambda: None))
    assert process.dead
    assert found == [sorted(disk.root.rglob("*"))]
    if (disk.root / "a" / "file").exists():
        contents = {b"first", b"fi", b"fi\0\0x", b"fi\0\0xx"}
        assert (disk.root / "a" / "file").read_bytes() in contents


@pytest.mark.parametrize("seed", range(20))
def test_a_directory_lasts_whose_maker_died(tmp_path: Path, seed: int) -> None:
    """A second run syncs the name of a directory whose maker died before it could."""
    disk = make(tmp_path, seed)

    def program(root: Path) -> None:
        make_directories(root / "out")
        (root / "out" / "file").touch()
        sync_directory(root / "out")

    assert run(disk, program, Doom(Effect.FILE, 3, lambda: None)).dead
    assert (disk.root / "out").exists()
    run(disk, program)
    assert after_power_loss(disk) == {"out/file": b""}
