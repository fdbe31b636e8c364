"""Tests of a corpus that changes between two runs of a command, or while one reads it.

The command runs in a thread beside a real server and a real worker. Whatever an earlier run has
left on the disk or on the server, a finished output has the vectors of the corpus as it is.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from rich.console import Console

from embedfarm.cli.progress import View
from embedfarm.collector.collect import JobCancelled
from embedfarm.collector.manifest import MANIFEST_FILE, OutputError, read_manifest
from embedfarm.collector.output import Output
from embedfarm.collector.source_check import SourceChanged, SourceCheck
from embedfarm.contract.encoding import decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import JobTaken
from embedfarm.contract.records import Result, Rows, text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.producer.submitter import Submitter
from embedfarm.readers import CorpusError, CorpusOptions, corpus_digest, read_corpus
from embedfarm.readers.limits import Limits
from embedfarm.runs import request as request_module
from embedfarm.runs import sending as module
from embedfarm.runs.own_job import JOB_ID_FILE
from embedfarm.runs.place import Place
from embedfarm.runs.request import Request, check_finished
from embedfarm.runs.run import Run
from embedfarm.runs.run_failures import Interrupted
from tests.farm.harness import check_output, manifest, run, write_corpus
from tests.full_disk import small_disk
from tests.support import LiveServer, wait_until
from tests.workers.running import worker_on, working

DIMENSIONS = 8
TEXTS = [f"chunk {index}" for index in range(3000)]
SETTINGS = Settings(
    part_bytes_max=1000 * 4 * DIMENSIONS,
    block_chunks_max=100,
    reconnect_seconds_max=5.0,
    drain_seconds=0.5,
    full_disk_seconds=0.1,
)


class Command:
    """A command in a thread, which can be interrupted or held at the end of its corpus."""

    def __init__(self, request: Request, place: Place, *, held: bool = False) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        view = View(Console(file=StringIO(), quiet=True), lines=True)
        self._run = Run(request, place, view.show, self.stop)
        if held:
            self._hold()
        self._thread = threading.Thread(target=self._embed)
        self._thread.start()

    def _embed(self) -> None:
        try:
            self._run.embed()
        except BaseException as error:  # noqa: BLE001 # `end` raises it
            self.error = error

    def end(self) -> None:
        """Wait for the end of the command, and raise its error."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the command does not end"
        if self.error is not None:
            raise self.error

    def interrupt(self) -> None:
        """Stop the command as Ctrl-C does."""
        self.stop.set()
        with pytest.raises(Interrupted):
            self.end()

    def _hold(self) -> None:
        """Make the command wait when it has read and sent all of its corpus."""

        def end() -> None:
            assert self.stop.wait(60)

        setattr(self._run._sending.source, "end", end)  # noqa: B010 -- a method, of this run alone


class Bench:
    """A corpus, an output, and a farm with a worker."""

    def __init__(self, server: LiveServer, client: redis.Redis, home: Path) -> None:
        self.server, self.farm, self.home = server, FarmClient(client), home
        self.corpus, self.out = home / "corpus.jsonl", home / "out"
        self.sources: tuple[str, ...] = (str(self.corpus),)
        self.write(TEXTS)

    def write(self, texts: Sequence[str]) -> None:
        """Write the corpus anew."""
        write_corpus(self.corpus, texts)

    def start(
        self,
        *,
        skip: bool = False,
        parts_of: int = 1000,
        held: bool = False,
        **place: Any,  # noqa: ANN401 # of `Place`
    ) -> Command:
        """Start the command; its output has a part for each `parts_of` chunks."""
        changed = {"redis_url": self.server.url, "part_bytes_max": parts_of * 4 * DIMENSIONS}
        place = {"out": self.out, **place}
        settings = SETTINGS.model_copy(update=changed)
        at = Place(settings=settings, devices="all", workers=0, **place)
        return Command(self.request(skip=skip), at, held=held)

    def request(self, *, skip: bool = False) -> Request:
        """Return the request of the command."""
        spec = JobSpec(model=f"null:{DIMENSIONS}")
        return Request(self.sources, CorpusOptions(), skip, spec, "parquet")

    def run(self, **options: Any) -> None:  # noqa: ANN401 # of `start`
        """Run the command to its end."""
        self.start(**options).end()

    def embed_all(self, parts: int = 0, **options: Any) -> None:  # noqa: ANN401 # of `start`
        """Let all chunks be embedded and so many parts be written; then interrupt the command."""
        command = self.start(held=True, **options)
        wait_until(lambda: self.chunks_done() >= len(TEXTS) and self.parts_there() >= parts)
        command.interrupt()

    def chunks_done(self) -> int:
        """Return the embedded chunks of the job, -1 while there is none."""
        return max((each.chunks_done for each in self.farm.statuses().values()), default=-1)

    def parts_there(self) -> int:
        """Return the number of parts in the journal."""
        journal = self.out / ".embedfarm" / "parts.jsonl"
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    def check(self, texts: Sequence[str]) -> None:
        """Assert that the output is whole, and of these texts."""
        check_output(self.out, texts, DIMENSIONS)


@pytest.fixture
def bench(server: LiveServer, client: redis.Redis, tmp_path: Path) -> Iterator[Bench]:
    """Start a worker, and yield a bench."""
    with working(worker_on(server)):
        yield Bench(server, client, tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        [*TEXTS[:1500], "inserted", *TEXTS[1500:]],
        [*TEXTS[:1500], *TEXTS[1501:]],
        [*TEXTS[:1500], TEXTS[2500], *TEXTS[1501:2500], TEXTS[1500], *TEXTS[2501:]],
        [*TEXTS, "one more"],
        TEXTS[:1200],
    ],
    ids=["inserted", "removed", "swapped", "grown", "shorter"],
)
def test_what_was_sent_and_is_not_on_disk(bench: Bench, changed: list[str]) -> None:
    """Results of an earlier run that are not on disk are used only where the text is the same."""
    bench.embed_all(parts_of=100_000)
    bench.write(changed)
    bench.run(parts_of=100_000)
    bench.check(changed)
    [ended] = [bench.farm.job(each).status() for each in bench.farm.ended_ids(9)]
    assert ended.corpus == str(bench.corpus)
    compared = read_manifest(bench.out).source["compared"]
    assert (compared["by"], compared["rows"]) == ("embed", len(changed))


def test_what_is_on_disk(bench: Bench) -> None:
    """A run names the changed rows on disk, and embeds only those again with `--embed-changed`."""
    bench.embed_all(3)
    first = (bench.out / "part-000000000000.parquet").stat().st_ino
    changed = [*TEXTS[:1500], "inserted", *TEXTS[1500:]]
    bench.write(changed)
    for _ in range(2):  # it stays so, and what is finished stays resumable
        with pytest.raises(SourceChanged, match=r"rows 1000 to 1999 .* --embed-changed"):
            bench.run()
    bench.run(embed_changed=True)
    bench.check(changed)
    assert (bench.out / "part-000000000000.parquet").stat().st_ino == first


def test_nothing_is_written_while_it_starts_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has rows embedded again writes no part of them meanwhile from old results."""
    bench.embed_all(parts_of=100_000)
    bench.write([*TEXTS, "one more"])
    stale = threading.Event()
    accept, start_over = SourceCheck.accept, Submitter.start_over

    def accept_late(check: SourceCheck, result: Result) -> Result | None:
        assert stale.wait(60)
        return accept(check, result)

    def start_over_late(submitter: Submitter, upto: int) -> None:
        stale.set()
        with pytest.raises(TimeoutError):
            wait_until(lambda: bench.parts_there() > 0, 2)
        start_over(submitter, upto)

    monkeypatch.setattr(SourceCheck, "accept", accept_late)
    monkeypatch.setattr(Submitter, "start_over", start_over_late)
    bench.run()
    bench.check([*TEXTS, "one more"])


@pytest.mark.system
@pytest.mark.parametrize("stopped", [False, True], ids=["cleared", "stopped"])
def test_a_full_disk_under_what_is_to_be_dropped(
    bench: Bench,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    stopped: bool,
) -> None:
    """Changed rows are dropped when the disk has room for it; until then the run can be stopped."""
    with small_disk(tmp_path / "disk", 64 << 20) as disk:

        def read(*arguments: Any, **options: Any) -> Iterator[Rows]:  # noqa: ANN401 # the function's
            disk.fill()
            yield from read_corpus(*arguments, **options)

        bench.out = disk.path / "out"
        bench.embed_all(3)
        changed = [*TEXTS[:1500], "inserted", *TEXTS[1500:]]
        bench.write(changed)
        with monkeypatch.context() as patch:
            patch.setattr(module, "read_corpus", read)
            command = bench.start(embed_changed=True)
            wait_until(lambda: f"waits for room below {bench.out}" in caplog.text)
        if stopped:
            command.interrupt()
        disk.clear()
        if stopped:
            command = bench.start(embed_changed=True)
        command.end()
        bench.check(changed)


def test_a_corpus_that_changes_while_it_is_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose corpus changes while it is read is refused, and can be embedded again."""
    changed = [*TEXTS[:-1], "another"]

    def read(*arguments: Any, **options: Any) -> Iterator[Rows]:  # noqa: ANN401 # the function's
        for rows in read_corpus(*arguments, **options):
            yield rows
            bench.write(changed)

    with monkeypatch.context() as patched:
        patched.setattr(module, "read_corpus", read)
        with pytest.raises(SourceChanged, match="while it was read"):
            bench.run()
    bench.run(embed_changed=True)
    bench.check(changed)


def test_a_corpus_that_is_read_for_longer_than_processes_may_drain(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run waits for the end of its reading, even if all results are there long before."""
    read_on = threading.Event()

    def read(*arguments: Any, **options: Any) -> Iterator[Rows]:  # noqa: ANN401 # the function's
        yield from read_corpus(*arguments, **options)
        assert read_on.wait(30)

    monkeypatch.setattr(module, "read_corpus", read)
    command = bench.start()
    wait_until(lambda: bench.chunks_done() == len(TEXTS))
    command._thread.join(3 * SETTINGS.drain_seconds)
    assert command._thread.is_alive()
    read_on.set()
    command.end()
    bench.check(TEXTS)


def test_a_bad_row_late_in_the_corpus(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts before a bad row stay, and go on with the row skipped as well as with it corrected."""

    def read(*arguments: Any, **options: Any) -> Iterator[Rows]:  # noqa: ANN401 # the function's
        for rows in read_corpus(*arguments, **options):
            yield rows
            wait_until(lambda: bench.parts_there() >= 2)

    monkeypatch.setattr(module, "read_corpus", read)
    with bench.corpus.open("a") as file:
        file.write('{"text": 7}\n{"text": "behind it"}\n')
    texts = [*TEXTS, "behind it"]
    with pytest.raises(CorpusError, match="line 3001"):
        bench.run(parts_of=500)
    parts = bench.parts_there()
    files = {path.name: path.stat().st_ino for path in bench.out.glob("part-*")}
    with pytest.raises(CorpusError, match="line 3001"):
        bench.run(parts_of=500)
    assert bench.parts_there() >= parts
    again = bench.home / "again"
    shutil.copytree(bench.out, again)
    (again / JOB_ID_FILE).unlink()
    bench.run(parts_of=500, skip=True)
    bench.check(texts)
    assert files.items() <= {p.name: p.stat().st_ino for p in bench.out.glob("part-*")}.items()
    bench.write(texts)
    bench.out = again
    bench.run(parts_of=500)
    bench.check(texts)


def test_a_resume_reads_what_is_left(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume reads an unchanged corpus on from a mark in the journal."""
    monkeypatch.setattr(corpus_digest, "FRESH_SECONDS", -1.0)
    texts = [f"chunk {index}" for index in range(20_000)]
    bench.write(texts)
    bench.embed_all(6, parts_of=2000)
    done, read = 2000 * bench.parts_there(), 0

    def count(*arguments: Any, **options: Any) -> Iterator[Rows]:  # noqa: ANN401 # the function's
        nonlocal read
        for rows in read_corpus(*arguments, **options):
            read += len(rows.texts)
            yield rows

    monkeypatch.setattr(module, "read_corpus", count)
    bench.run(parts_of=2000)
    bench.check(texts)
    assert len(texts) - done <= read <= len(texts) - done + 3 * 2048 + 2000


def test_a_resume_trusts_no_mark_of_a_changed_corpus(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume reads a changed corpus from its start, and finds a change before all marks."""
    monkeypatch.setattr(corpus_digest, "FRESH_SECONDS", -1.0)
    bench.embed_all(3)
    bench.write(["changed", *TEXTS[1:]])
    with pytest.raises(SourceChanged, match="rows 0 to 999 "):
        bench.run()


def test_a_server_that_wants_rows_before_the_mark(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume reads the corpus from its start when the server wants earlier rows."""
    monkeypatch.setattr(corpus_digest, "FRESH_SECONDS", -1.0)
    bench.write(texts := [f"chunk {index}" for index in range(8000)])
    bench.embed_all(3, parts_of=2000)
    request, stop = bench.request(), threading.Event()
    with Output(bench.out, request.identity(), sink="parquet", part_bytes_max=64_000) as output:
        assert output.mark is not None
        sending = module.Sending(request, bench.out, stop, Limits(), 1.0)
        sending._send(Submitter(bench.farm, "other", request.spec, 0, SETTINGS, stop), output, "")
    job = bench.farm.job("other")
    wait_until(lambda: job.status().chunks_done == len(texts))
    found = cast("list[bytes]", job.client.hvals(job.keys.results))
    results = [decode(Result, data) for data in found]
    results.sort(key=lambda result: result.start)
    assert b"".join(result.checksums for result in results) == text_checksums(texts)


@pytest.mark.parametrize("content", [b"", b"   \n", b"\xff\xfe"])
def test_a_torn_job_id(bench: Bench, content: bytes) -> None:
    """An output whose job id is torn gets another job."""
    bench.embed_all()
    (bench.out / JOB_ID_FILE).write_bytes(content)
    bench.run()
    bench.check(TEXTS)


def test_two_outputs_of_one_job_id(bench: Bench) -> None:
    """A second output of a job id is refused while the first one has it, and leaves no trace."""
    bench.embed_all(job_id="nightly")
    first, bench.out = bench.out, bench.home / "second"
    with pytest.raises(JobTaken, match=str(first)):
        bench.run(job_id="nightly")
    assert not (bench.out / ".embedfarm").exists()
    bench.out = first
    bench.run()
    bench.check(TEXTS)


def test_a_copy_of_an_unfinished_output(bench: Bench) -> None:
    """A copy of an unfinished output is refused, and one that was moved goes on."""
    bench.embed_all()
    first, bench.out = bench.out, bench.home / "copy"
    shutil.copytree(first, bench.out)
    with pytest.raises(OutputError, match="is a copy of"):
        bench.run()
    shutil.rmtree(bench.out)
    shutil.move(first, bench.out)
    bench.run()
    bench.check(TEXTS)


def test_less_is_on_disk_than_the_server_was_told(bench: Bench) -> None:
    """An older copy of an output that was put back gets the rest embedded again."""
    bench.embed_all(3)
    journal = bench.out / ".embedfarm" / "parts.jsonl"
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    bench.run()
    bench.check(TEXTS)


def test_ids_that_changed(bench: Bench) -> None:
    """Changed ids of rows on disk end a resume, and those of other rows are taken anew."""
    texts = TEXTS[:2500]
    ids = [f"id {index}" for index in range(len(texts))]
    options = CorpusOptions(id_field="id")
    request = Request(
        (str(bench.corpus),), options, skip_bad_rows=False,
        spec=JobSpec(model=f"null:{DIMENSIONS}"), sink="jsonl",
    )  # fmt: skip
    settings = SETTINGS.model_copy(update={"redis_url": bench.server.url})
    place = Place(bench.out, settings, "all", 0)
    write_corpus(bench.corpus, texts, ids)
    command = Command(request, place, held=True)
    wait_until(lambda: bench.chunks_done() == len(texts) and bench.parts_there() == 2)
    command.interrupt()
    write_corpus(bench.corpus, texts, ids[::-1])
    with pytest.raises(SourceChanged, match=r"rows 0 to 999 .* other ids"):
        Command(request, place).end()
    write_corpus(bench.corpus, texts, [*ids[:2000], *ids[:1999:-1]])
    Command(request, place).end()
    lines = [
        json.loads(line)
        for path in sorted(bench.out.glob("part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert [line["id"] for line in lines] == [*ids[:2000], *ids[:1999:-1]]


def test_a_cancelled_job_of_a_corpus_that_is_shorter_now(bench: Bench) -> None:
    """A command that goes on with a cancelled job ends it, though rows that were sent are gone."""
    bench.embed_all(parts_of=100_000)
    [job] = bench.farm.job_ids()
    bench.farm.job(job).cancel()
    bench.write(TEXTS[:1200])
    with pytest.raises(JobCancelled):
        bench.run(parts_of=100_000)
    assert bench.farm.job(job).status().ended


def test_bad_rows_of_a_finished_output_that_come_and_go(bench: Bench) -> None:
    """A finished output is not said to be whole where its corpus has more bad rows now.

    It stays as good as it was when bad rows have been taken away.
    """
    with bench.corpus.open("a") as file:
        file.write('{"text": 7}\n')
    bench.run(skip=True)
    assert read_manifest(bench.out).skipped == 1
    with bench.corpus.open("a") as file:
        file.write('{"text": 8}\n')
    with pytest.raises(SourceChanged, match="2 bad rows instead of 1 now"):
        check_finished(bench.request(skip=True), bench.out)
    bench.write(TEXTS)
    assert check_finished(bench.request(skip=True), bench.out) is not None


@pytest.mark.parametrize("name", ["more", "more/*.jsonl", "file://{}/more/a.jsonl"])
def test_a_finished_output_of_a_file_and_something_else(bench: Bench, name: str) -> None:
    """A finished output is not current where what changed is no file of this machine by its name.

    It is a directory, a glob or a URL beside a file that stays as it is.
    """
    (bench.home / "more").mkdir()
    write_corpus(bench.home / "more" / "a.jsonl", ["one", "two"])
    other = name.format(bench.home) if "://" in name else str(bench.home / name)
    bench.sources = (str(bench.corpus), other)
    bench.run()
    assert check_finished(bench.request(), bench.out) is not None
    write_corpus(bench.home / "more" / "a.jsonl", ["one", "three", "four"])
    with pytest.raises(SourceChanged, match=r"other texts or ids in rows 3000 to 3001 now"):
        check_finished(bench.request(), bench.out)


def test_a_finished_output_of_a_file_whose_times_were_set_back(bench: Bench) -> None:
    """A corpus of the same size is compared though its time of change is the one of before."""
    times = bench.corpus.stat()
    bench.run()
    bench.write(["CHUNK 0", *TEXTS[1:]])
    os.utime(bench.corpus, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert bench.corpus.stat().st_size == times.st_size
    with pytest.raises(SourceChanged, match="other texts or ids in rows 0 to 999 now"):
        check_finished(bench.request(), bench.out)


def test_a_finished_output_that_knows_less_of_its_files(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output of an earlier version, which kept size and time only, is compared and is current.

    One of today is current without a reading.
    """
    bench.run()
    path = bench.out / MANIFEST_FILE
    manifest = json.loads(path.read_bytes())
    reads: list[object] = []

    def read(*sources: Any, **options: Any) -> Iterator[Rows]:  # noqa: ANN401 # as they are
        reads.append(sources)
        return read_corpus(*sources, **options)

    monkeypatch.setattr(request_module, "read_corpus", read)
    assert check_finished(bench.request(), bench.out) is not None
    assert not reads
    [facts] = manifest["source"]["files"].values()
    del facts[2:], manifest["manifest_sha256"]
    path.write_text(json.dumps(manifest))
    assert check_finished(bench.request(), bench.out) is not None
    assert len(reads) == 1


def test_verify_says_who_has_compared(bench: Bench) -> None:
    """`verify` says which command compared the texts with their source, if any did."""
    bench.run()
    done = run("verify", bench.out)
    assert done.returncode == 0
    assert "3,000 texts were compared with their source by embed" in done.stdout
    facts = manifest(bench.out)
    del facts["source"]["compared"], facts["manifest_sha256"]
    (bench.out / "_manifest.json").write_text(json.dumps(facts))
    assert "never compared with their source" in run("verify", bench.out).stdout
    against = run("verify", bench.out, "--against", bench.corpus)
    assert "its texts are those of the source" in against.stdout


def test_parts_that_are_dropped_leave_no_file(bench: Bench) -> None:
    """Parts that are embedded again in other sizes leave no old file behind."""
    bench.embed_all(3)
    bench.write(["changed", *TEXTS[1:]])
    bench.run(embed_changed=True, parts_of=1500)
    bench.check(["changed", *TEXTS[1:]])
    assert sorted(path.name for path in bench.out.glob("part-*")) == [
        "part-000000000000.parquet",
        "part-000000001500.parquet",
    ]
