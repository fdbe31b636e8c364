"""Tests of what a command shows of a job that runs."""

import io
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import redis
from rich.console import Console

from embedfarm.cli import progress
from embedfarm.cli.progress import View, describe_progress, describe_workers
from embedfarm.contract.broker import UNAVAILABLE, closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.outlook import OutlookReader
from embedfarm.contract.pace import NOW_SECONDS
from embedfarm.contract.status import JobStatus
from embedfarm.watch.view import FarmReader
from tests.cli.test_top import screen
from tests.contract.little_job import SAMPLE, heartbeat
from tests.farm.harness import COMMAND, texts_of, write_corpus
from tests.watch.test_view import beat, embed_two, report

PACE = 6_000  # tokens per second of each of two workers
CHUNKS = 8_400  # at 280 in a second, 10 s each until the stop, for the stop, and after it
WORK_SECONDS = 4.5  # a line comes every 5 s, and the first one after the first work
TOLERANCE = 0.3
ROUNDING_SECONDS = 1.0


def test_a_command_shows_what_top_shows(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate and the time left are those that `top` and the pages have for the job."""
    farm = FarmClient(client)
    embed_two(farm)
    beat(farm, "one", state="busy")
    report(farm)
    (job,) = FarmReader(farm).read().jobs
    lines = io.StringIO()
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    view = View(Console(file=lines, width=200), lines=True)
    view.show(farm.job("little").status(), farm.workers(), OutlookReader(farm, "little"))
    assert job.seconds_left == pytest.approx((1.5, 1.5))
    assert f"{job.chunks_per_second:,.0f} chunks/s  {job.tokens_per_second:,.0f} tokens/s" in (
        lines.getvalue()
    )
    assert "  2 s left" in lines.getvalue()


def test_a_job_of_which_nothing_is_read(client: redis.Redis) -> None:
    """A job whose corpus nobody has begun to read says that, and not 0 of 0."""
    Job(client, "new").create(JobSpec(model="null:2"), 0)
    assert describe_progress(Job(client, "new").status()) == "nothing read yet"
    lines = screen(FarmReader(FarmClient(client)).read(), 120, 30)
    assert any("nothing read yet" in line for line in lines)


def test_samples_are_read_once(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look reads only the samples that are new, and has the rates of all of them."""
    monkeypatch.setattr("embedfarm.contract.outlook.LOOK_SECONDS", 0.0)
    farm = FarmClient(client)
    embed_two(farm)
    beat(farm, "one")
    reader = OutlookReader(farm, "little")
    for _ in range(2):
        farm.statistics.sample(msgspec.structs.replace(SAMPLE, seconds=20.0))
        seen = reader.read(farm.job("little").status(), farm.workers())
        (job,) = FarmReader(farm).read().jobs
        assert seen.seconds_left == pytest.approx(job.seconds_left)
        assert seen.seconds_left is not None
    assert len(reader._samples) == 2


def test_nothing_is_foretold_of_a_job_that_stands(client: redis.Redis) -> None:
    """A job that is read, or waits, says so instead of a time."""
    farm = FarmClient(client)
    reader = OutlookReader(farm, "little")
    for status in (JobStatus(chunk_count=-1), JobStatus(chunk_count=9, state="paused")):
        assert reader.read(status, []).seconds_left is None


def test_who_may_not_read_figures_goes_on(client: redis.Redis) -> None:
    """A user of the server that may not read the farm's figures is shown no end, and no error."""
    farm = FarmClient(client)
    embed_two(farm)
    client.acl_setuser(
        "blind", enabled=True, nopass=True, commands=["+@all"], keys=["ef:{little}*"]
    )
    client.execute_command("AUTH", "blind", "")
    try:
        reader = OutlookReader(farm, "little")
        assert reader.read(farm.job("little").status(), []).seconds_left is None
    finally:
        client.connection_pool.disconnect()


def test_a_trial_of_engines_is_named() -> None:
    """The first load of a model on a machine, which takes long, says what it does."""
    one = msgspec.structs.replace(heartbeat("one"), state="loading")
    beats = [one, msgspec.structs.replace(heartbeat("two"), trying_engines=True)]
    assert describe_workers(beats[:1]) == "1 worker, 1 loading"
    assert "2 workers, trying which engine is faster" in describe_workers(beats)


class Forecast(NamedTuple):
    """A line of progress: when it came, the seconds that it says are left, and what is right."""

    at: float
    low: float
    high: float
    truth: float

    @property
    def is_right(self) -> bool:
        """Whether both ends of the range are near the truth."""
        least, most = self.truth * (1 - TOLERANCE), self.truth * (1 + TOLERANCE)
        return least - ROUNDING_SECONDS <= self.low and self.high <= most + ROUNDING_SECONDS


def working_pace(out: Path) -> float:
    """Return the chunks that both workers do in a second of work, by their last micro-batches.

    So the machine may be slow: that is no part of it. While there are not both, it is 0.
    """
    try:
        socket = (out / ".embedfarm" / "server" / "socket").read_text()
        with closing_client(f"unix://{socket}") as client:
            farm = FarmClient(client)
            batches = farm.statistics.recent_batches(NOW_SECONDS)
            both = len(farm.workers()) == len(batches) == 2
    except (*UNAVAILABLE, FileNotFoundError):  # the run is about to end
        return 0.0
    done = batches.values() if both else ()
    return sum(sum(b.chunks for b in bars) / sum(b.seconds for b in bars) for bars in done)


def forecasts(words: Sequence[object], out: Path, *, stopped: bool = False) -> list[Forecast]:
    """Run `embed`, or stop it once a forecast counts; return those from 5 s of work on."""
    seen: list[Forecast] = []
    command = [*COMMAND, "embed", *map(str, words), "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            at, pace = time.monotonic(), working_pace(out)
            sys.stderr.write(line)  # which is shown if the test fails
            found = re.search(r"^([\d,]+) of .*  (?:(\d+) to )?(\d+) s left", line)
            if found and pace:
                left, high = CHUNKS - int(found[1].replace(",", "")), float(found[3])
                seen.append(Forecast(at, float(found[2] or high), high, left / pace))
                if stopped and at - seen[0].at >= WORK_SECONDS:
                    process.terminate()
        assert process.wait(30) == (130 if stopped else 0)
    return [each for each in seen if each.at - seen[0].at >= WORK_SECONDS]


@pytest.mark.farm
@pytest.mark.paced
@pytest.mark.timeout(240)  # so that it begins first of those with this mark
def test_forecasts_come_true(tmp_path: Path) -> None:
    """A forecast is right within 30 % from 5 s of work on, in a run that goes on as well.

    What is right is the time for what is left at the pace of the workers while they work.
    """
    corpus = write_corpus(tmp_path / "corpus.jsonl", list(texts_of(CHUNKS)))
    words = [corpus, "--workers", "2", "--model", f"null:8:{PACE}"]
    for stopped in (True, False):
        seen = forecasts(words, tmp_path / "out", stopped=stopped)
        assert seen
        assert all(each.is_right for each in seen), seen
