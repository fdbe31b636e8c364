"""Tests of changed corpora and refusing commands: what is right, and what is a finding."""

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedfarm.contract.processes import RUN_MODULE
from tests.chaos.checks import Checks
from tests.chaos.children import find_child
from tests.chaos.commands import BAD_ROW, Attempt, Job
from tests.chaos.corpora import CHANGES, Change, Vectors, compare, turn, vectors_of
from tests.chaos.outcome import Outcome
from tests.chaos.roles import EMBED_DISK, Deaths, on_disk
from tests.chaos.test_judgement import FORGOTTEN, job_of
from tests.support import wait_until

TEXTS = [f"text {number}" for number in range(40)]
KNOWN = vectors_of(TEXTS, np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Make a command whose corpus holds three texts, and which was never typed."""
    return job_of(tmp_path, Deaths())


# Corpora.


@pytest.mark.parametrize("change", [*CHANGES, turn])
@pytest.mark.parametrize("seed", range(5))
def test_a_changed_corpus_has_known_texts(change: Change, seed: int) -> None:
    """A changed corpus differs from the one before, and the vectors of all its texts are known."""
    changed = change(list(TEXTS), random.Random(seed))
    assert changed != TEXTS
    assert KNOWN.least_cosine(KNOWN.of(changed), changed) == pytest.approx(1)


@pytest.mark.parametrize(
    ("rows", "lost", "doubled", "ordered"),
    [
        ([0, 1, 2], 0, 0, True),
        ([0, 2], 1, 0, False),
        ([0, 1, 1, 2], 0, 1, False),
        ([1, 0, 2], 0, 0, False),
        ([0, 1, 2, 3], 0, 0, False),
    ],
)
def test_rows_are_counted(rows: list[int], lost: int, doubled: int, ordered: bool) -> None:  # noqa: FBT001 # a case
    """A comparison counts lost and doubled rows, and sees a wrong order."""
    found = compare(rows, KNOWN.matrix[rows], TEXTS[:3], KNOWN)
    assert (found.lost, found.doubled, found.ordered) == (lost, doubled, ordered)
    assert (found.cosine > 0.999) is ordered


def test_a_shift_is_found() -> None:
    """An output with all rows, each with the vector of the next text, has a low cosine."""
    found = compare([0, 1, 2], KNOWN.matrix[1:4], TEXTS[:3], KNOWN)
    assert (found.lost, found.doubled, found.ordered) == (0, 0, True)
    assert found.cosine < 0.9


def write_output(out: Path, texts: Sequence[str], known: Vectors) -> None:
    """Write an output like the one of the command."""
    rows = {"index": range(len(texts)), "embedding": list(known.of(texts))}
    pq.write_table(pa.table(rows), out / "part-000000000000.parquet")


@pytest.mark.parametrize(("first", "cosine"), [(0, 1.0), (1, 1.0), (2, -1.0)])
def test_an_output_is_that_of_the_corpus_as_it_was_read(
    job: Job, first: int, cosine: float
) -> None:
    """An output may be of any version since the command was typed last, and of none before."""
    known = vectors_of(["a", "b", "c"], np.eye(3, dtype=np.float32))
    job.corpus.write(["c", "b", "a"])
    job.corpus.write(["b", "c", "a"])
    write_output(job.out, ["c", "b", "a"], known)
    job._attempt = Attempt(0.0, first, 0)
    checks = Checks(known, job._world, Outcome())
    version = checks._compare(job)
    assert (checks.outcome.lost, checks.outcome.doubled) == (0, 0)
    assert (checks.outcome.cosine_min >= 0.999) is (cosine == 1.0)
    assert (version.texts == ["c", "b", "a"]) is (cosine == 1.0)


def test_rows_that_do_not_match_are_no_good_cosine(job: Job) -> None:
    """An output that lacks rows has no good cosine."""
    known = vectors_of(["a", "b", "c"], np.eye(3, dtype=np.float32))
    write_output(job.out, ["a", "b"], known)
    checks = Checks(known, job._world, Outcome())
    checks._compare(job)
    assert checks.outcome.lost == 1
    assert not checks.outcome.cosine_min >= 0.999
    assert len(checks.outcome.problems) == 1


# Refusals.

CHANGED = "the source was changed while it was read; run this again"
OTHER_ROWS = "rows 0 to 9 were embedded: embed again from row 0 on with --embed-changed"
TAKEN = "job nightly fills another output: /elsewhere"


@pytest.mark.parametrize(
    ("status", "said", "right"),
    [
        (0, "", False),
        (1, "whatever", False),
        (1, "[Errno 5] Input/output error: 'part'", False),
        (2, "whatever", False),
        (2, OTHER_ROWS, False),
        (2, CHANGED, False),
        (2, TAKEN, False),
        (2, "line 4: no text", False),
    ],
)
def test_nothing_explains_a_refusal_where_nothing_happened(
    job: Job,
    status: int,
    said: str,
    right: bool,  # noqa: FBT001 # a case
) -> None:
    """A refusal is wrong where no corpus changed, no disk failed and no server forgot anything."""
    job._log.write_text(said)
    assert bool(job._refusal(status)) is right


def test_a_change_explains_a_refusal(job: Job) -> None:
    """A changed corpus explains a refusal over rows on disk, or over a change while it is read."""
    job.corpus.write(["c"])
    job._log.write_text(CHANGED)
    assert job._refusal(2)
    job._attempt = Attempt(0.0, 1, 0)
    assert not job._refusal(2)
    job._log.write_text(OTHER_ROWS)
    assert job._refusal(2)
    assert job._refusal(2)
    assert job.words.count("--embed-changed") == 1


def test_a_bad_row_explains_a_refusal_while_it_is_there(job: Job) -> None:
    """A bad row explains a refusal unless it was corrected before the command was typed."""
    job._log.write_text("line 4: no text")
    job.corpus.write(["a"], spoiled=True)
    assert job._refusal(2) == BAD_ROW
    job.corpus.write(["a"])
    job._attempt = Attempt(0.0, len(job.corpus.versions) - 1, 0)
    assert not job._refusal(2)


def test_a_disk_explains_a_refusal_while_it_failed(job: Job) -> None:
    """A failing disk explains only an I/O error, of a command that was typed before it was over."""
    job._log.write_text("[Errno 5] Input/output error: 'part'")
    with job._world.failing.one():
        pass
    assert job._refusal(1)
    assert not job._refusal(2)
    with job._world.failing.one():
        job._attempt = replace(job._attempt, began=float("inf"))
    assert not job._refusal(1)


def test_only_what_it_says_now_counts(job: Job) -> None:
    """A message from before the command was typed last explains no refusal."""
    job.corpus.write(["c"])
    job._log.write_text(OTHER_ROWS)
    job._attempt = Attempt(0.0, 0, len(OTHER_ROWS))
    assert not job._refusal(2)


def test_a_forgotten_end_explains_that_the_id_is_taken(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten end explains that an id is taken, and the earlier job is removed."""
    removed: list[str] = []
    monkeypatch.setattr(
        "tests.chaos.commands.remove_job", lambda name, _settings: removed.append(name)
    )
    job._log.write_text(TAKEN)
    assert not job._refusal(2)
    job._before = FORGOTTEN
    assert job._refusal(2)
    assert removed == ["nightly"]


# Disks that fail, and children of `ingest`.

WRITE = """
import sys
from pathlib import Path
from embedfarm.contract.durable_files import replacing
try:
    with replacing(Path(sys.argv[1])) as file:
        file.write(b"x")
except OSError as error:
    sys.exit(error.errno)
"""


def test_a_disk_fails_while_its_switch_is_there(tmp_path: Path) -> None:
    """Writes of a Python program fail while its own switch is there, and no other one."""
    environment = os.environ | on_disk(EMBED_DISK, tmp_path)
    command = [sys.executable, "-c", WRITE, str(tmp_path / "file")]
    statuses = []
    for name in (EMBED_DISK, "another"):
        (tmp_path / name).touch()
        statuses.append(subprocess.run(command, env=environment, check=False).returncode)
        (tmp_path / name).unlink()
    assert statuses == [errno.EIO, 0]
    assert (tmp_path / "file").read_bytes() == b"x"


def test_the_processes_of_a_job_are_found(tmp_path: Path) -> None:
    """The command of a job is found by its words, and with it the process that started it."""
    (tmp_path / "embedfarm").mkdir()
    (tmp_path / "embedfarm/__main__.py").write_text("import signal; signal.pause()")
    start = f"import subprocess; subprocess.run({[*RUN_MODULE, 'embedfarm', 'embed']})"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", start], env=environment) as process:
        wait_until(lambda: find_child(os.getpid(), "command"))
        command = find_child(os.getpid(), "command")
        assert command is not None
        assert command.parent() == psutil.Process(process.pid)
        assert find_child(os.getpid(), "job process") == psutil.Process(process.pid)
        command.send_signal(signal.SIGKILL)
    assert find_child(os.getpid(), "command") is None
