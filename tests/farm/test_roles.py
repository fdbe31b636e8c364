"""Tests of the roles on their own against a given server, as on several machines."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
import redis

from benchmarks.slow_worker import slow_workers
from embedfarm.contract import wire
from embedfarm.contract.encoding import decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.processes import Supervisor
from embedfarm.contract.records import Completion
from embedfarm.contract.settings import Settings
from tests.farm.harness import check_output, manifest, role, run, start_role, texts_of, write_corpus
from tests.support import LiveServer, wait_until

TOKENS_PER_SECOND = 30_000
WORK = ("work", "--devices", "cpu", "--workers", "1")
MODEL = ("--model", f"null:16:{TOKENS_PER_SECOND}")


def completions(client: redis.Redis, job: str) -> list[tuple[int, Completion]]:
    """Return the milliseconds and content of every micro-batch of a job, oldest first."""
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(wire.EVENTS))
    done = [
        (int(entry.split(b"-")[0]), decode(Completion, fields[b"done"]))
        for entry, fields in entries
        if b"done" in fields
    ]
    return [(at, each) for at, each in done if each.job == job]


@pytest.fixture
def farm(server: LiveServer, tmp_path: Path) -> Iterator[None]:
    """Start a scheduler, a standby, and two CPU workers, the second one four times slower."""
    workers = slow_workers(Settings(redis_url=server.url), {"cpu-0": 1.0, "cpu-1": 4.0})
    with (
        role(server, tmp_path, "schedule"),
        role(server, tmp_path, "schedule"),
        Supervisor(workers, tmp_path / "logs", drain_seconds=10.0),
    ):
        yield


@pytest.mark.paced
def test_unequal_workers_finish_together(
    farm: None, server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """Shares follow speed, both end within 10 % of the makespan, and the second job is not probed.

    The probe of the first job is one block or 0.3 s of work; with history the first
    micro-batches of the second job are as large as its sizing rule allows.
    """
    del farm
    wait_until(lambda: len(FarmClient(client).workers()) == 2, 30)
    texts = list(texts_of(5_000))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    jobs = []
    for name in ("first", "second"):
        out = tmp_path / name
        done = run("embed", corpus, "--out", out, "--redis", server.url, "--json", *MODEL)
        assert done.returncode == 0, done.stderr
        check_output(out, texts, 16)
        jobs.append(manifest(out)["job"])
    for name in ("first", "second"):
        workers = manifest(tmp_path / name)["workers"]
        shares = [figures["chunks"] for figures in workers.values()]
        assert 2.5 < max(shares) / min(shares) < 6
    second = completions(client, jobs[1])
    began = min(at - 1000 * each.seconds for at, each in second)
    ends = {each.worker: at for at, each in second}
    makespan = max(ends.values()) - began
    assert max(ends.values()) - min(ends.values()) <= 0.1 * makespan
    # The very first ones are as small as what the producer had sent by then.
    early = [each.tokens for _, each in second[:8]]
    assert max(early) > 0.5 * TOKENS_PER_SECOND


def test_the_farm_goes_on_without_a_scheduler(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A worker without a plan leases by its own rate; the job ends complete."""
    texts = list(texts_of(2_000))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    with role(server, tmp_path, *WORK):
        done = run("embed", corpus, "--out", tmp_path / "out", "--redis", server.url, *MODEL)
    assert done.returncode == 0, done.stderr
    check_output(tmp_path / "out", texts, 16)
    assert not FarmClient(client).job_ids()


def test_a_second_work_is_refused(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """A second `work` for devices that have a worker ends with a sentence; the first works on."""
    farm = FarmClient(client)
    with role(server, tmp_path, *WORK):
        wait_until(farm.workers, 30)
        [first] = farm.workers()
        done = run(*WORK, "--redis", server.url, environment={"HOME": str(tmp_path / "other")})
        assert done.returncode == 2
        assert f"{first.worker} works for this farm already, as process {first.pid}" in done.stderr
        assert "Traceback" not in done.stderr
        assert [beat.incarnation for beat in farm.workers()] == [first.incarnation]


def test_two_that_begin_together(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """A `work` whose worker's name another takes ends, and does not take it back."""
    farm = FarmClient(client)
    with start_role(server, tmp_path, *WORK) as process:
        wait_until(farm.workers, 30)
        [first] = farm.workers()
        later = msgspec.structs.replace(first, incarnation="9" + first.incarnation[1:], pid=1)
        assert farm.beat(later, 30.0)
        assert process.wait(30) == 1
    assert [beat.pid for beat in farm.workers()] == [1]


def test_a_killed_worker_is_seen_to_have_been(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A worker that is killed is in the timeline with the signal, and its restart is counted."""
    farm = FarmClient(client)
    with contextlib.ExitStack() as stack:
        stack.enter_context(role(server, tmp_path, "schedule"))
        wait_until(lambda: farm.plans.decisions(1), 30)  # one who is there before has not joined
        stack.enter_context(role(server, tmp_path, *WORK))
        wait_until(lambda: "took over" in told(farm) and "joined" in told(farm), 30)
        [first] = farm.workers()
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: "restarted" in told(farm), 30)
        [second] = farm.workers()
        found = {entry.kind: entry for entry in farm.timeline.newest(99)}
    assert (first.restarts, second.restarts) == (0, 1)
    assert found["ended"].worker == first.worker
    assert found["ended"].note == "killed by SIGKILL; it is started again (restart 1)"
    assert found["restarted"].note == f"process {second.pid}, cpu-0"


def told(farm: FarmClient) -> set[str]:
    """Return the kinds of all events of the timeline."""
    return {entry.kind for entry in farm.timeline.newest(99)}


def test_after_a_crash(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """A `work` that was killed as a whole begins again while its last heartbeat is still there."""
    farm = FarmClient(client)
    with start_role(server, tmp_path, *WORK, heartbeat_ttl_seconds="60") as process:
        wait_until(farm.workers, 30)
        [first] = farm.workers()
        os.kill(first.pid, signal.SIGSTOP)  # it would say that it ends
        process.kill()
        os.kill(first.pid, signal.SIGKILL)
    assert [beat.pid for beat in farm.workers()] == [first.pid]
    with role(server, tmp_path, *WORK):
        wait_until(lambda: [beat.pid for beat in farm.workers()] != [first.pid], 30)


def test_people_can_look(server: LiveServer, tmp_path: Path) -> None:
    """`workers`, `jobs ls`, `devices` and `doctor` answer, in words and in JSON."""
    with role(server, tmp_path, *WORK):
        wait_until(lambda: "cpu-0" in run("workers", "--redis", server.url).stdout, 30)
        assert json.loads(run("workers", "--redis", server.url, "--json").stdout)
    assert json.loads(run("jobs", "ls", "--redis", server.url, "--json").stdout) == []
    assert "cores" in json.loads(run("devices", "--json").stdout)
    findings = json.loads(run("doctor", "--redis", server.url, "--json").stdout)
    assert {"server", "persistence", "eviction", "disk"} <= {each["what"] for each in findings}
    assert all(each["ok"] for each in findings)


def test_a_missing_server_is_a_sentence(tmp_path: Path) -> None:
    """A missing server ends a command with a sentence, without the password."""
    url = "redis://user:secret@127.0.0.1:1/0"
    done = run("doctor", "--redis", url)
    assert done.returncode == 1
    assert "secret" not in done.stdout + done.stderr
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["a text"])
    words = "embed", corpus, "--out", tmp_path / "out", "--redis", url, *MODEL
    done = run(*words, environment={"EMBEDFARM_RECONNECT_SECONDS_MAX": "3"})
    assert done.returncode == 1
    assert "is not available, waiting for up to 3 s: " in done.stderr
    assert "secret" not in done.stdout + done.stderr
    done = run("workers", environment={"HOME": str(tmp_path)})
    assert done.returncode == 2
    assert "EMBEDFARM_REDIS_URL" in done.stderr
