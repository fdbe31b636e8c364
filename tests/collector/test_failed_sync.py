"""Tests of a power loss after a failed sync: nothing is lost that was said to be on disk."""

import errno
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from embedfarm.collector.export import export
from embedfarm.collector.manifest import ERRORS_FILE
from embedfarm.collector.output import Output
from embedfarm.collector.output_directory import State, list_output_files, read_state
from embedfarm.collector.sinks import holding_sinks
from embedfarm.collector.verify import verify
from embedfarm.runs.ending import remove_state
from tests.collector.lossy_disk import LossyDisk
from tests.collector.test_sinks import ABOUT, COUNT, Case, snapshot

SYNCS_MIN = 12  # file, directory and journal line of each of the four parts


@pytest.fixture(params=holding_sinks())
def case(request: pytest.FixtureRequest) -> Case:
    """Give a case of each format."""
    return Case(request.param, "<f4", with_ids=True)


@pytest.fixture
def whole(case: Case, tmp_path: Path) -> dict[str, bytes]:
    """Return the files of a run that nothing interrupted."""
    case.run(tmp_path / "whole")
    return snapshot(tmp_path / "whole")


def after_failures(tmp_path: Path, case: Case) -> Iterator[LossyDisk]:
    """Yield a disk for each sync of a command, after a run in which that sync failed."""
    for number in count():
        with make_disk(tmp_path, number) as disk, disk.syncing():
            disk.fail(number)
            try:
                case.run(disk.root / "out")
            except OSError as error:
                assert error.errno == errno.EIO  # noqa: PT017 -- the other end of a loop
            else:
                assert number > SYNCS_MIN
                return
            yield disk


@contextmanager
def make_disk(tmp_path: Path, number: int) -> Iterator[LossyDisk]:
    """Make an empty disk."""
    (root := tmp_path / f"disk-{number}").mkdir()
    with closing(LossyDisk(root)) as disk:
        yield disk


def test_next_command_believes_what_is_durable(
    case: Case, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Chunks that the next command takes for done survive a power loss, whichever sync failed."""
    for disk in after_failures(tmp_path, case):
        out = disk.root / "out"
        if read_state(out) is State.FINISHED:
            believed = COUNT
            remove_state(out)
        else:
            with case.open(out) as output:
                believed = output.next_index
        found = disk.lose_power(tmp_path / f"{disk.root.name}-lost") / "out"
        if read_state(found) is not State.FINISHED:
            with case.open(found) as output:
                assert output.next_index >= believed
            case.run(found)
        assert snapshot(found) == whole


def test_next_command_finishes(case: Case, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """An output that the next command finishes survives a power loss, whichever sync failed."""
    for disk in after_failures(tmp_path, case):
        out = disk.root / "out"
        if read_state(out) is State.FINISHED:
            remove_state(out)
        else:
            case.run(out)
        found = disk.lose_power(tmp_path / f"{disk.root.name}-lost") / "out"
        assert snapshot(found) == whole
        assert not verify(found)


def insist(output: Output, write: Callable[[], object], again: Callable[[], object]) -> bool:
    """Write, and write again if the disk refuses; return whether it did."""
    try:
        write()
    except OSError:
        output.recover()
        again()
        return True
    return False


def fill(case: Case, output: Output) -> bool:
    """Write a whole output; return whether the disk refused once."""
    adding = [partial(output.add, result) for result in case.results()]
    refused = [insist(output, add, output.write) for add in adding]
    finish = partial(output.finish, COUNT, ABOUT)
    return any([*refused, insist(output, finish, finish)])


def test_same_process_writes_again(case: Case, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """A process that goes on after a full disk does not trust what it wrote before either."""
    for number in count():
        with make_disk(tmp_path, number) as disk, disk.syncing():
            with case.open(disk.root / "out") as output:
                disk.fail(number, errno.ENOSPC)
                if not fill(case, output):
                    break
            found = disk.lose_power(tmp_path / f"{disk.root.name}-lost") / "out"
            assert snapshot(found) == whole
            assert not verify(found)
    assert number > SYNCS_MIN


def test_next_command_finishes_after_the_remains_are_gone(
    case: Case, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """A process that ends while it waits for room leaves no line of a part that it has undone."""
    for number in count():
        with make_disk(tmp_path, number) as disk, disk.syncing():
            out = disk.root / "out"
            with case.open(out) as output:
                disk.fail(number, errno.ENOSPC)
                try:
                    for result in case.results():
                        output.add(result)
                except OSError:
                    output.recover()
                else:
                    break
            case.run(out)
            found = disk.lose_power(tmp_path / f"{disk.root.name}-lost") / "out"
            assert snapshot(found) == whole
            assert not verify(found)
    assert number > SYNCS_MIN // 2


def test_export_lasts(case: Case, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """An export that is done is on the disk with all its files."""
    with make_disk(tmp_path, 0) as disk, disk.syncing():
        export(tmp_path / "whole", disk.root / "copy", case.sink)
        found = disk.lose_power(tmp_path / "lost") / "copy"
    assert list_output_files(found) == list_output_files(tmp_path / "whole")
    assert not verify(found)
    assert (found / ERRORS_FILE).read_bytes() == whole[ERRORS_FILE]
