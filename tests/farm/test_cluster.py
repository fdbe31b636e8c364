"""Tests of a farm on a real cluster: jobs on all primaries, one that dies, a slot that moves."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import redis
from redis.exceptions import ResponseError

from embedfarm.contract import wire
from embedfarm.contract.broker import UNAVAILABLE, closing_client, connect
from embedfarm.contract.farm_client import FarmClient
from tests.contract.little_job import run_everything
from tests.farm.cluster_of_six import PRIMARIES, ClusterOfSix
from tests.farm.farm_of_all_roles import whole_farm
from tests.farm.harness import Embedding, check_output, run, texts_of, write_corpus
from tests.support import SERVERS, LiveServer, wait_until

MODEL: Final = ("--model", "null:16:12000")
WORDS: Final = [sys.executable, "-m", "embedfarm"]
SMALL_PARTS: Final = {"EMBEDFARM_PART_BYTES_MAX": "64000"}


@pytest.fixture(params=SERVERS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ClusterOfSix]:
    """Start a cluster."""
    six = ClusterOfSix(tmp_path / "cluster", request.param)
    with six.running():
        yield six


@pytest.fixture
def client(cluster: ClusterOfSix) -> Iterator[redis.Redis]:
    """A client of the cluster."""
    client = connect(cluster.url)
    yield client
    client.close()


@contextlib.contextmanager
def roles(cluster: ClusterOfSix, home: Path) -> Iterator[None]:
    """Run a scheduler and two workers on the cluster; each must end well."""
    with contextlib.ExitStack() as stack:
        for name, more in (("schedule", []), ("work", ["--devices", "cpu", "--workers", "2"])):
            said = stack.enter_context((home / f"{name}.log").open("wb"))
            words = [*WORDS, name, "--redis", cluster.url, *more]
            running = subprocess.Popen(words, stdout=said, stderr=said)
            process = stack.enter_context(running)
            stack.callback(process.kill)
            stack.callback(process.wait, 40)
            stack.callback(process.terminate)
        yield


def embed(cluster: ClusterOfSix, home: Path, job: str, texts: list[str]) -> Embedding:
    """Begin to embed texts as a job of a name."""
    corpus = write_corpus(home / f"{job}.jsonl", texts)
    words = [corpus, *MODEL, "--redis", cluster.url, "--job-id", job]
    return Embedding(words, home / job, SMALL_PARTS)


def done_of(client: redis.Redis, job: str) -> int:
    """Return how many chunks of a job are embedded, -1 while nobody can say."""
    with contextlib.suppress(*UNAVAILABLE):
        found = FarmClient(client).statuses().get(job)
        return found.chunks_done if found else -1
    return -1


def names_on_each(cluster: ClusterOfSix) -> list[str]:
    """Return a name of a job for each of the three primaries."""
    names: dict[int, str] = {}
    for number in range(100):
        names.setdefault(cluster.owner(f"job-{number}"), f"job-{number}")
    assert len(names) == PRIMARIES
    return list(names.values())


def test_everything_runs_on_a_cluster(cluster: ClusterOfSix, client: redis.Redis) -> None:
    """Every script and key of a farm and a job works, and a job's keys lie on one primary."""
    job = run_everything(client)
    owner = cluster.owner(job.id)
    for number in range(PRIMARIES):
        with cluster.node(number) as node:
            keys = node.keys(f"ef:{{{job.id}}}:*")
        assert bool(keys) == (number == owner)
    found = FarmClient(client)
    assert job.id in found.statuses()
    job.delete()
    assert not client.exists(wire.JobKeys(job.id).meta)


def test_jobs_lie_on_all_primaries(
    cluster: ClusterOfSix, client: redis.Redis, tmp_path: Path
) -> None:
    """Jobs of three primaries go on side by side, also when that of the farm's own keys dies.

    Its replica takes over; what it had not got yet, of the job on it as well, is done again.
    """
    jobs, texts = names_on_each(cluster), list(texts_of(1500))
    victim = cluster.owner("farm")
    (beside,) = (job for job in jobs if cluster.owner(job) == victim)
    running = [embed(cluster, tmp_path, job, texts) for job in jobs]
    wait_until(lambda: min(done_of(client, job) for job in jobs) == 0, 60)
    with roles(cluster, tmp_path):  # only now: the first might end before the last begins
        wait_until(lambda: done_of(client, beside) > 200, 60)
        cluster.servers[victim].kill()
        for each in running:
            assert each.wait(120) == 0, each.log()
    for job in jobs:
        check_output(tmp_path / job, texts, 16)


def test_a_slot_moves_in_mid_job(
    cluster: ClusterOfSix, client: redis.Redis, tmp_path: Path
) -> None:
    """A job whose slot moves to another primary, and back, goes on as if nothing had been."""
    texts = list(texts_of(2500))
    with roles(cluster, tmp_path):
        running = embed(cluster, tmp_path, "moved", texts)
        home = cluster.owner("moved")
        for least, target in ((200, (home + 1) % PRIMARIES), (1000, home)):
            wait_until(lambda least=least: done_of(client, "moved") > least, 60)  # type: ignore[misc]
            cluster.move("moved", target)
            assert cluster.owner("moved") == target
        assert running.wait(120) == 0, running.log()
    check_output(tmp_path / "moved", texts, 16)


def test_who_waits_where_a_slot_was_to_move_is_sent_back(
    cluster: ClusterOfSix, client: redis.Redis
) -> None:
    """A command that waits at the node that was about to get its slot goes on where that stays."""
    bell = wire.JobKeys("moved").result_wakeup
    target = (cluster.owner("moved") + 1) % PRIMARIES
    source = cluster.begin_move("moved", target)
    pipe = client.pipeline(transaction=False)
    pipe.blpop(bell, 60)
    with ThreadPoolExecutor() as pool, cluster.node(target) as node:
        waiting = pool.submit(pipe.execute)
        wait_until(lambda: node.info("clients")["blocked_clients"] == 1, 60)
        cluster.cancel_move("moved", target, source)
        with cluster.node(source) as home:
            wait_until(lambda: home.info("clients")["blocked_clients"] == 1, 60)
        client.rpush(bell, 1)
        assert waiting.result(60)[0][1] == b"1"


def test_every_door_works_on_a_cluster(
    cluster: ClusterOfSix, server: LiveServer, tmp_path: Path
) -> None:
    """Jobs by HTTP and requests come in where RQ's queue has a server of its own."""
    refused = run("serve", "--port", 0, "--redis", cluster.url)
    assert refused.returncode == 2
    assert "EMBEDFARM_QUEUE_URL" in refused.stderr
    with whole_farm(tmp_path, lambda _: cluster.url, queue_url=server.url) as farm:
        farm.embed_by_http()
        farm.ask()
        farm.embed_corpus("corpus", 500)
        assert farm.web.get("/readyz").json()["takes_jobs"]


def test_what_a_user_of_a_cluster_must_be_allowed(cluster: ClusterOfSix) -> None:
    """A user with two rights more than on one server can use a cluster, while slots move, too."""
    for number in cluster.ports:
        with cluster.node(number) as node:
            rights = ["on", ">word", "~ef:*", "+get", "+set", "+cluster|slots", "+asking"]
            node.execute_command("ACL SETUSER", "somebody", *rights)
    scheme, hosts = cluster.url.split("://")
    with closing_client(f"{scheme}://somebody:word@{hosts}") as client:
        client.set("ef:{moved}:a", 1)
        home = cluster.owner("moved")
        for target in ((home + 1) % PRIMARIES, (home + 2) % PRIMARIES, home):
            cluster.move("moved", target)
            assert client.get("ef:{moved}:a") == b"1"


def test_commands_of_a_pipeline_are_answered_in_order(client: redis.Redis) -> None:
    """A pipeline of several primaries answers in its own order, and names what fails."""
    pipe = client.pipeline(transaction=False)
    for number in range(20):
        pipe.set(f"a{number}", number)
        pipe.get(f"a{number}")
    pipe.time()
    *answers, time = pipe.execute()
    assert answers[1::2] == [str(number).encode() for number in range(20)]
    assert len(time) == 2
    pipe.set("a1", "word")
    pipe.incr("a1")
    pipe.get("a7")
    assert isinstance(pipe.execute(raise_on_error=False)[1], ResponseError)
    pipe.incr("a1")
    with pytest.raises(ResponseError, match="Command # 1"):
        pipe.execute()
