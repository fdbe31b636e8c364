"""Tests of `embedfarm jobs` on a real farm: what people do to jobs that run."""

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from embedfarm.cli.options import shorten_id
from embedfarm.collector.output_reader import OutputReader
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import ChunkError
from embedfarm.contract.settings import Settings
from embedfarm.contract.usage import Account
from tests.contract.little_job import embed, make_job
from tests.farm.harness import COMMAND, check_output, role, run, texts_of, write_corpus
from tests.support import LiveServer, wait_until

MODEL = ("--model", "null:16:10000")
QUIET_SECONDS = 1.5


@pytest.fixture
def at_once() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool that runs commands while the test goes on."""
    with ThreadPoolExecutor() as pool:
        yield pool


def jobs(server: LiveServer, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `embedfarm jobs`."""
    return run("jobs", *words, "--redis", server.url)


def begun(farm: FarmClient) -> Job:
    """Return the only job, once some of it is embedded."""
    wait_until(lambda: [each.chunks_done for each in farm.statuses().values()] > [0], 30)
    return farm.job(farm.job_ids()[0])


def idle_seconds(job: Job) -> float:
    """Return the seconds since the last commit, by the server's clock."""
    seconds, microseconds = job.client.time()
    return seconds + microseconds / 1e6 - job.status().last_commit_ms / 1000


def test_pause_in_mid_job(
    server: LiveServer, client: redis.Redis, tmp_path: Path, at_once: ThreadPoolExecutor
) -> None:
    """A paused job ends what is leased and then stands still; resumed, its output is complete."""
    texts = list(texts_of(12_000))  # 25 s: a command takes seconds to start
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    out = tmp_path / "out"
    with (
        role(server, tmp_path, "schedule"),
        role(server, tmp_path, "work", "--devices", "cpu", "--workers", "2"),
    ):
        words = ("embed", corpus, "--out", out, "--redis", server.url, *MODEL)
        embedding: Future[subprocess.CompletedProcess[str]] = at_once.submit(run, *words)
        job = begun(FarmClient(client))
        assert jobs(server, "pause", job.id[:8]).returncode == 0
        wait_until(lambda: not job.stream.backlog()[1] and idle_seconds(job) > QUIET_SECONDS, 30)
        status = job.status()
        assert (status.state, job.stream.backlog()[1]) == ("paused", 0)
        assert 0 < status.chunks_done < len(texts)
        assert not embedding.done()
        assert jobs(server, "resume", job.id[:8]).returncode == 0
        done = embedding.result()
    assert done.returncode == 0, done.stderr
    assert "paused" in done.stderr
    check_output(out, texts, 16)
    assert run("verify", out, "--against", corpus).returncode == 0


@pytest.mark.alone
def test_cancel_in_mid_job(
    server: LiveServer, client: redis.Redis, tmp_path: Path, at_once: ThreadPoolExecutor
) -> None:
    """Cancelling ends the command and its watchers with status 1, and keeps what was embedded."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", list(texts_of(20_000)))
    with role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"):
        words = ("embed", corpus, "--out", tmp_path / "out", "--redis", server.url, *MODEL)
        embedding = at_once.submit(run, *words)
        job = begun(FarmClient(client))
        watching = at_once.submit(jobs, server, "watch", job.id)
        assert jobs(server, "cancel", job.id).returncode == 0
        ended = time.monotonic()
        wait_until(lambda: [beat.held_tokens for beat in FarmClient(client).workers()] == [0])
        assert time.monotonic() - ended < 5
        for done in (embedding.result(), watching.result()):
            assert done.returncode == 1
            assert "cancelled" in done.stderr
            assert "Traceback" not in done.stderr
    status = job.status()
    assert (status.state, status.ended, status.result_bytes) == ("cancelled", True, 0)
    with OutputReader(tmp_path / "out") as reader:
        assert 0 < reader.available == status.drained_upto <= status.chunks_done
    assert (FarmClient(client).job_ids(), FarmClient(client).ended_ids(9)) == ([], [job.id])


def test_terms_of_an_embedding(
    server: LiveServer, client: redis.Redis, tmp_path: Path, at_once: ThreadPoolExecutor
) -> None:
    """Terms come with the command and change by `set`; a resume with others is not refused."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["one", "two"])
    words = ("embed", corpus, "--out", tmp_path / "out", "--redis", server.url, *MODEL)
    terms = [
        "--priority",
        "high",
        "--tenant",
        "acme",
        "--weight",
        "3",
        "--deadline",
        "2h",
        "--labels",
        "wiki,nightly",
    ]
    first = start(*words, *terms)
    wait_until(lambda: FarmClient(client).statuses(), 30)
    first.terminate()
    assert first.wait(30) == 130
    job = FarmClient(client).job(FarmClient(client).job_ids()[0])
    status = job.status()
    assert (status.priority, status.tenant, status.weight) == (1, "acme", 3)
    assert abs(status.deadline_ms / 1000 - time.time() - 7200) < 120
    listed = [jobs(server, "ls", "--label", each, "--json").stdout for each in ("wiki", "wik")]
    assert [len(json.loads(each)) for each in listed] == [1, 0]
    words_of_change = ("--priority", "urgent", "--deadline", "none", "--labels", "wiki", "--json")
    changed = jobs(server, "set", job.id, *words_of_change)
    assert json.loads(changed.stdout) == {
        "job": job.id,
        "state": "running",
        "priority": 2,
        "tenant": "acme",
        "weight": 3,
        "deadline_ms": 0,
        "labels": "wiki",
        "max_hours": 0.0,
        "max_cost": 0.0,
    }
    again = at_once.submit(run, *words, "--tenant", "other", "--deadline", "2001-01-01")
    with role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"):
        done = again.result()
    assert done.returncode == 0, done.stderr
    check_output(tmp_path / "out", ["one", "two"], 16)


def start(*words: object) -> subprocess.Popen[bytes]:
    """Start `embedfarm` in the background, without its messages on stderr."""
    return subprocess.Popen(
        [*COMMAND, *map(str, words)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_full_farm_is_a_sentence(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """A full farm ends a command with status 75 and a time to try again, and leaves nothing."""
    make_job(client, 1)
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["one"])
    words = ("embed", corpus, "--out", tmp_path / "out", "--redis", server.url)
    done = run(*words, *MODEL, environment={"EMBEDFARM_JOBS_MAX": "1"})
    assert done.returncode == 75
    assert "the farm is full (1 jobs), try again in 3,600 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_jobs_are_listed_on_a_narrow_screen(server: LiveServer, client: redis.Redis) -> None:
    """`jobs ls` shows what tells jobs apart and how far they are in 80 columns, uncut."""
    plain = jobs(server, "ls")
    make_job(client, 2, "0123456789abcdef")
    late = Job(client, "01234567aaaaaaaa")
    late.create(JobSpec(model="nobody/a-model-with-a-long-name", name="a name " * 9), 0)
    late.set_terms(priority=2, tenant="t" * 64, deadline_ms=1)
    other = Job(client, "x")
    other.create(JobSpec(model="m"), 0)
    other.set_terms(deadline_ms=int(1000 * (time.time() + 7290)))
    lines = jobs(server, "ls").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    whole = "\n".join(lines)
    for words in ("012345678 ", "01234567a ", "passed", "2 h 01 min", "urgent", "priority"):
        assert words in whole
    assert "model" not in whole
    assert "failed" not in whole
    assert "model" in plain.stdout
    assert json.loads(jobs(server, "ls", "--json").stdout)[1]["deadline_ms"] == 1


def test_failed_chunks_are_shown(server: LiveServer, client: redis.Redis) -> None:
    """`jobs errors` shows the first failed chunks with reason and attempts, and how many more."""
    job = make_job(client, 2)
    assert "no chunk" in jobs(server, "errors", job.id).stdout
    one, other = job.stream.read("one", 2)
    job.stream.commit([embed(other, 2, 3), embed(one, 1)])
    done = jobs(server, "errors", job.id, "--limit", 2)
    assert "and 1 more" in done.stdout
    found = json.loads(jobs(server, "errors", job.id, "--json").stdout)
    assert [ChunkError(**each) for each in found] == job.results.failures(10)[1]
    assert [each["index"] for each in found] == [2, 3, 1]


def test_cached_chunks_are_shown(server: LiveServer, client: redis.Redis) -> None:
    """`jobs show` says how many chunks were in the vector caches of all workers."""
    job, reports = make_job(client, 2), FarmClient(client).reports
    for worker in ("one", "two"):
        reports.account(worker, "1", {(job.id, ""): Account(chunks_cached=7)})
    assert json.loads(jobs(server, "show", job.id, "--json").stdout)["chunks_cached"] == 14
    assert re.search(r"^chunks_cached +14$", jobs(server, "show", job.id).stdout, re.MULTILINE)


def test_watching_ends_with_the_job(server: LiveServer, client: redis.Redis) -> None:
    """`jobs watch` prints a line for each change, until the job has ended."""
    job = make_job(client, 1)
    with subprocess.Popen(
        [*COMMAND, "jobs", "watch", job.id, "--json"],
        stdout=subprocess.PIPE,
        env=os.environ | {"EMBEDFARM_REDIS_URL": server.url},
    ) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        job.stream.commit([embed(job.stream.read("one", 1)[0])])
        second = json.loads(watching.stdout.readline())
        FarmClient(client).end(job.id, "finished", "", Settings())
        assert json.loads(watching.stdout.readline())["state"] == "finished"
        assert watching.wait(10) == 0
    assert (first["chunks_done"], second["chunks_done"]) == (0, 2)


def test_a_run_stays_on_record(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """A failed run's record says why, and a finished one's how it ended, where, and its command."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", list(texts_of(50)))
    with corpus.open("a") as file:
        file.write("{\n")
    out = tmp_path / "out"
    words = ("embed", corpus, "--out", out, "--job-id", "mine", *MODEL, "--redis", server.url)
    job = FarmClient(client).job("mine")
    with role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"):
        assert run(*words).returncode == 2
        status = job.status()
        assert (status.state, FarmClient(client).job_ids()) == ("failed", [])
        assert f"{corpus} line 51" in status.reason
        assert "failed" in jobs(server, "watch", "mine").stderr
        write_corpus(corpus, list(texts_of(50)))
        assert run(*words).returncode == 0
    status = job.status()
    assert (status.state, status.reason, status.out) == ("finished", "", str(out))
    assert (status.chunks_done, status.chunk_count, status.drained_upto) == (50, 50, 50)
    assert jobs(server, "ls", "--ended", "--json").stdout.count('"mine"') == 1
    assert job.noted("command") == shlex.join(
        ["cd", str(Path.cwd()), "&&", "embedfarm", *map(str, words[:-2])]
    ).replace("'&&'", "&&")


@pytest.mark.parametrize("verb", ["pause", "watch"])
def test_no_such_job(server: LiveServer, client: redis.Redis, verb: str) -> None:
    """An unknown or ambiguous job name ends a command with status 2 and a sentence."""
    make_job(client, 1, "ab1")
    make_job(client, 1, "ab2")
    for name, expected in (("nothing", "no such job: nothing"), ("ab", "beginning of 2 jobs")):
        done = jobs(server, verb, name)
        assert done.returncode == 2
        assert expected in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["pause", "little"], 1, "little is cancelled"),
        (["resume", "little"], 1, "little is cancelled"),
        (["set", "little"], 2, "nothing to set"),
        (["set", "little", "--deadline", "soon"], 2, "is no deadline"),
        (["set", "little", "--tenant", "a\nb"], 2, "printable"),
    ],
)
def test_what_cannot_be_done(
    server: LiveServer, client: redis.Redis, words: list[str], status: int, expected: str
) -> None:
    """A change to an ended job, or senseless terms, end with a sentence and a status above 0."""
    make_job(client, 1).cancel()
    done = jobs(server, *words)
    assert done.returncode == status
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_ids_are_shown_as_far_as_they_differ() -> None:
    """An id is shown as far as it differs from all others, and can be typed like that."""
    ids = ["batch_0123", "batch_0145", "b" * 32, "short"]
    assert [shorten_id(each, ids) for each in ids] == ["batch_012", "batch_014", "b" * 8, "short"]
    assert shorten_id("batch_01", [*ids, "batch_01"]) == "batch_01"
