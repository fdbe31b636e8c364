"""Tests of the users of deploy/users.acl: they may do the farm's work, and no more."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import pytest
import redis
from rq import Queue
from typer.testing import CliRunner

from embedfarm.cli.app import app
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings
from tests.farm.farm_of_all_roles import MODEL, WholeFarm, whole_farm
from tests.farm.guarded_server import (
    USERS,
    USERS_FILE,
    GuardedServer,
    command_of,
    guarded_server,
)
from tests.support import SERVERS, LiveServer, wait_until

LINES: Final = {line.split()[1]: line for line in USERS_FILE.read_text().splitlines()}
# Of RQ, whose commands change with its version: types of values, on its own keys only.
RQ_RULES: Final = re.compile(r"\([^()]*~rq:[^()]*\)")
SLOW: Final = f"{MODEL}:10000"
LIMITS: Final = {"part_bytes_max": 64_000, "lease_seconds": 3.5, "reconcile_seconds": 1}
EMBEDDING: Final = (
    "HDEL ef:{J}:res 0", "HSETNX ef:{J}:meta a b", "HSTRLEN ef:{J}:res 0",
    "XGROUP CREATE ef:{J}:in farm 0", "XLEN ef:{J}:in", "XPENDING ef:{J}:in farm",
    "XRANGE ef:{J}:failed - +", "ZADD ef:{farm}:jobs 1 J", "ZCARD ef:{farm}:jobs",
    "ZSCORE ef:{farm}:jobs J",
)  # fmt: skip
# One of those who ask for the farm's window counts what it holds: which of them is chance.
COUNTING: Final = dict.fromkeys(
    ("HSET ef:{farm}:window turn 1", "PEXPIRE ef:{farm}:window 1", "UNLINK ef:{farm}:window"),
    "whoever asks when the last count is old counts anew",
)
# Granted, and not met by this farm's work: a use of it, and why it is needed all the same.
UNSEEN: Final = {
    "*": {
        "SELECT 0": "a URL may name a database",
        "PING": "roles wait for the server, and clients look whether a connection lives",
        "SCRIPT LOAD x": "a server that restarted knows no script",
        "SCRIPT EXISTS x": "redis-py asks in a pipeline, before its scripts",
    },
    "worker": {
        "XINFO GROUPS ef:{farm}:lane:x": "it looks for the oldest request for another model",
        "SET ef:{farm}:budget:cpu|x 1": "it remembers a budget",
        "SET ef:{farm}:loader:x w": "it claims the loading of a model",
        "MULTI": "it says why it cannot load a model",
        "EXEC": "the same",
        "EXPIRE ef:{farm}:unloaded:x 1": "the same",
        "HGETALL ef:{farm}:unloaded:x": "it looks why others cannot",
        "HMGET ef:{J}:meta state": "it looks whether a job is still there, after an outage",
        "ZREMRANGEBYSCORE ef:{farm}:workers -inf 1": "it forgets workers that are long gone",
        "XLEN ef:{J}:retry": "it looks how much there is of a job that its plan does not name",
    }
    | COUNTING,
    "scheduler": {
        "HDEL ef:{farm}:history x": "it forgets rates that are too old",
        "SET ef:{farm}:fence 1": "it writes over a fence that is no number",
    }
    | COUNTING,
    "submitter": {
        "INFO server": "it looks whether the server is another one, where a job is gone",
        "HDEL ef:{J}:res 0": "it has what is damaged embedded again",
        "EVAL x 1 ef:{J}:in": "as in docs/protocol.md; script|load allows as much",
        "HSETNX ef:{J}:meta fingerprint x": "a resume holds workers to the model of its output",
        "XACK ef:{J}:retry farm 1-1": "it takes off what is nobody's work",
        "XDEL ef:{J}:retry 1-1": "the same",
        "XREVRANGE ef:{J}:in + - COUNT 1": "it looks how far a job goes",
        "XLEN ef:{J}:in": "it looks what there is, when the farm is full",
        "XPENDING ef:{J}:in farm": "the same",
    }
    | COUNTING,
    "ingest": {
        "CLIENT LIST": "RQ looks for its own address; MONITOR does not show that",
        "SET ef:{farm}:ingest-fence 1": "it writes over a fence that is no number",
        "XACK ef:{J}:in farm 1-1": "it reconciles as a submitter does",
        "XDEL ef:{J}:in 1-1": "the same",
        "XRANGE ef:{J}:in - +": "the same",
        "XREVRANGE ef:{J}:in + - COUNT 1": "the same",
        "XINFO GROUPS ef:{J}:in": "the same",
    }
    | COUNTING
    | dict.fromkeys(EMBEDDING, "a corpus that comes by RQ is embedded as by a submitter"),
    "web": {
        "XACK ef:{farm}:lane:x farm 1-1": "it takes back a request that nobody has answered",
        "XDEL ef:{farm}:lane:x 1-1": "the same",
        "XLEN ef:{farm}:lane:x": "it counts what waits in the lane of a model",
        "ZADD ef:{farm}:tenant:x 1 J": "a tenant that may have so many jobs makes one",
        "ZREM ef:{farm}:tenant:x J": "that job is over",
        "ZRANGE ef:{farm}:tenant:x 0 -1": "it looks which of them are over",
        "XLEN ef:{J}:in": "it counts what waits of jobs",
        "XPENDING ef:{J}:in farm": "the same",
    }
    | COUNTING,
    "operator": {
        "HDEL ef:{farm}:models x": "it makes room for what is wanted of another model",
        "HGETALL ef:{farm}:history": "`simulate --plan` reads how fast the workers were",
        "XLEN ef:{J}:in": "`top` counts what waits of each job",
        "XPENDING ef:{J}:in farm": "the same",
        "XINFO GROUPS ef:{J}:in": "`reconcile` looks what the server has of a job",
        "HKEYS ef:{J}:res": "the same",
        "ZRANGEBYSCORE ef:{farm}:jobs -inf 1": "`jobs ls` goes on behind the jobs it has shown",
    },
}


@dataclass(frozen=True)
class Evidence:
    """The remains of a farm that has worked under its users.

    Attributes:
        home: Directory of logs and outputs.
        server: The server, which still runs.
        said: The answers of commands and of HTTP.
    """

    home: Path
    server: GuardedServer
    said: list[str]


@pytest.fixture(scope="module", params=SERVERS)
def evidence(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Evidence]:
    """Let a farm do all it can do, each part of it as its own user."""
    home = tmp_path_factory.mktemp("users")
    said: list[str] = []
    with guarded_server(home / "guarded", request.param) as server:
        with server.watched(), whole_farm(home, server.url, **LIMITS) as farm:
            farm.embed_corpus("main-job")
            lose(farm, server)
            job = farm.embed_by_http()
            farm.ask()
            said += [*feed(farm), *read_pages(farm, job), *command(farm)]
            enqueue(server)
            wait_until(lambda: "xadd" in server.used["scheduler"], 30)  # one of its rare samples
        yield Evidence(home, server, said)


def lose(farm: WholeFarm, server: GuardedServer) -> None:
    """Kill a worker and delete a block while a corpus is embedded, which must be complete."""
    with ThreadPoolExecutor(1) as pool, closing_client(server.url("admin")) as admin:
        embedding = pool.submit(farm.embed_corpus, "lost", 2000, SLOW)
        seen = FarmClient(admin)
        wait_until(seen.job_ids, 60)
        job = seen.job(seen.job_ids()[0])
        # Some of it waits, and some is leased.
        wait_until(lambda: seen.exists(job.id) and all(job.stream.backlog()), 60)
        os.kill(seen.workers()[0].pid, signal.SIGKILL)
        [(last, _)] = cast("list[Any]", admin.xrevrange(job.keys.blocks, count=1))
        assert admin.xdel(job.keys.blocks, last) == 1
        embedding.result()


def feed(farm: WholeFarm) -> Iterator[str]:
    """Fill and read a feed by HTTP, and yield the answers."""
    web = farm.web
    name = web.post("/v1/feeds", json={"model": MODEL}).json()["job"]
    yield web.post(f"/v1/jobs/{name}/texts", json={"start": 0, "texts": ["one", "two"]}).text
    yield web.post(f"/v1/jobs/{name}/close", json={"count": 2}).text
    results = f"/v1/jobs/{name}/results"
    wait_until(lambda: web.get(results, params={"start": 0}).headers.get("x-next-start") == "2")
    assert web.delete(results, params={"upto": 2}).json()["state"] == "finished"
    yield web.delete(f"/v1/jobs/{name}").text


def read_pages(farm: WholeFarm, job: str) -> Iterator[str]:
    """Read the pages and send a request twice under one key; yield the answers."""
    for page in ("/", "/workers", "/scheduler", f"/jobs/{job}", "/metrics", "/farm.svg", "/jobs"):
        answer = farm.web.get(page, headers={"accept": "text/html"})
        assert answer.status_code in {200, 404, 405}, answer.text
        yield answer.text
    headers, order = {"idempotency-key": "one"}, {"texts": ["one"], "model": MODEL}
    answers = [
        farm.web.post("/v1/jobs", headers=headers, json=order).json()["job"] for _ in range(2)
    ]
    assert answers[0] == answers[1]
    yield farm.web.get("/v1/jobs", params={"state": "finished"}).text


def command(farm: WholeFarm) -> Iterator[str]:
    """Run what people ask and do in a terminal, and yield the outputs."""
    name = farm.web.post("/v1/feeds", json={"model": MODEL}).json()["job"]
    for words in (
        "jobs ls", "jobs ls --ended", f"jobs show {name}", f"jobs errors {name}",
        f"jobs pause {name}", f"jobs resume {name}", f"jobs set {name} --priority urgent",
        f"jobs cancel {name}", f"jobs rm {name}", "workers", "advise", "top", "doctor", "models ls",
        f"models pin {MODEL}", f"models unpin {MODEL}", f"models unload {MODEL} --wait 10",
        "scheduler stats", "scheduler explain", "scheduler passes", "scheduler remove-pass tail",
    ):  # fmt: skip
        done = CliRunner().invoke(app, words.split(), env=farm.variables("operator"))
        assert done.exit_code == 0, words + done.output
        yield done.output


def enqueue(server: GuardedServer) -> None:
    """Enqueue a task as a program that has nothing but rq."""
    with redis.Redis.from_url(server.url("enqueuer"), driver_info=None) as client:
        queue = Queue("embedfarm", connection=client, serializer="json")
        job = queue.enqueue("producer.tasks.cleanup")
        wait_until(lambda: job.get_status() == "finished", 60)


def test_the_farm_does_its_work_under_its_users(evidence: Evidence) -> None:
    """The server refuses no command of the farm's work."""
    assert [(each["username"], each["object"]) for each in evidence.server.refusals()] == []


@pytest.mark.parametrize("user", USERS)
def test_a_user_may_do_nothing_that_it_does_not_do(evidence: Evidence, user: str) -> None:
    """Each command of a user's line was seen, or there is a reason why it was not."""
    line = RQ_RULES.sub("", LINES[user])
    granted = set(re.findall(r"\+([a-z|]+)", line))
    excused = {command_of(words.lower().split()) for words in unseen_of(user)}
    unseen = granted - evidence.server.used[user]
    assert " ".join(sorted(unseen - excused)) == ""


def unseen_of(user: str) -> list[str]:
    """Return uses of commands that a user needs, and that this farm's work may not show."""
    return [*UNSEEN["*"], *UNSEEN.get(user, {})]


# What nobody may do.


@pytest.fixture(scope="module", params=SERVERS)
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[redis.Redis]:
    """Start a server with the users, and yield an administrator's connection."""
    place = tmp_path_factory.mktemp("guarded") / "server"
    with (
        guarded_server(place, request.param) as server,
        closing_client(server.url("admin")) as client,
    ):
        yield client


def may(client: redis.Redis, user: str, *words: str) -> bool:
    """Tell whether the server would let a user run a command."""
    answer = client.execute_command("ACL", "DRYRUN", user, *words)
    return bool(answer == b"OK")


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    "words",
    [
        "CONFIG GET *", "CONFIG SET dir /", "FLUSHALL", "FLUSHDB", "KEYS *", "SCAN 0", "RANDOMKEY",
        "DEBUG SLEEP 1", "SHUTDOWN", "ACL LIST", "ACL SETUSER worker nopass", "MODULE LIST",
        "FUNCTION FLUSH", "SCRIPT FLUSH", "SCRIPT KILL", "MONITOR", "REPLICAOF NO ONE", "SYNC",
        "CLIENT KILL TYPE normal", "CLIENT PAUSE 1000", "SAVE", "BGREWRITEAOF", "SLOWLOG GET",
        "DUMP ef:{J}:in", "RESTORE ef:{J}:in 0 x", "MIGRATE h 1 ef:{J}:in 0 1", "SWAPDB 0 1",
        "GET elsewhere", "SET elsewhere 1", "HGETALL elsewhere", "EVALSHA 0 1 elsewhere",
        "SUBSCRIBE __sentinel__:hello", "PUBLISH elsewhere x",
    ],
)  # fmt: skip
def test_nobody_of_the_farm_may(guarded: redis.Redis, user: str, words: str) -> None:
    """The farm's users may not administer the server, nor touch what is not the farm's."""
    assert not may(guarded, user, *words.split())


PUSH: Final = ["XADD ef:{J}:in 1-1 block x", "XGROUP CREATE ef:{J}:in farm 0"]
TAKE: Final = ["XREADGROUP GROUP farm me STREAMS ef:{J}:in >", "XCLAIM ef:{J}:in farm me 0 1-1"]
LEASE: Final = [*TAKE, "XACK ef:{J}:in farm 1-1", "XDEL ef:{J}:in 1-1"]
COMMIT: Final = ["HSET ef:{J}:res 0 x", "LPUSH ef:{J}:bell 1"]
DRAIN: Final = ["HGETALL ef:{J}:res", "HDEL ef:{J}:res 0"]
COLLECT: Final = [*DRAIN, "HGET ef:{J}:res 0"]
READ_BLOCKS: Final = ["XRANGE ef:{J}:in - +", "XREAD STREAMS ef:{J}:in 0"]
DELETE: Final = ["UNLINK ef:{J}:meta", "UNLINK ef:{J}:in", "DEL ef:{J}:res", "EXPIRE ef:{J}:meta 1"]
NOTE: Final = ["HSET ef:{J}:meta state cancelled"]
PLAN: Final = ["SET ef:{farm}:plan:w x", "HSET ef:{farm}:scheduler fence 1"]
BEAT: Final = ["HSET ef:{farm}:worker:w heartbeat x", "XADD ef:{farm}:samples * sample x"]
SESSIONS: Final = [
    "GET ef:{farm}:session:x", "SET ef:{farm}:session:x y", "GET ef:{farm}:answer:x",
]  # fmt: skip
CHOOSE: Final = ["SET ef:{farm}:policy x"]
RQ: Final = ["HGETALL rq:job:x", "LPUSH rq:queue:embedfarm x", "SUBSCRIBE rq:pubsub:x"]
LANE: Final = ["XADD ef:{farm}:lane:x * id y", "BLPOP ef:{farm}:reply:x 1"]
LOCK: Final = ["HSET ef:{farm}:ingest fence 1", "SET ef:{farm}:recurring:x 1"]
FOREIGN: Final = {
    "worker": [PUSH, COLLECT, DELETE, PLAN, SESSIONS, CHOOSE, RQ, LANE, LOCK],
    "scheduler": [
        PUSH, LEASE, COMMIT, COLLECT, READ_BLOCKS, DELETE, NOTE, SESSIONS, CHOOSE, RQ, LANE, LOCK,
    ],
    "submitter": [
        TAKE, COMMIT, PLAN, BEAT, SESSIONS, CHOOSE, RQ, LANE, LOCK,
    ],
    "enqueuer": [
        PUSH, LEASE, COMMIT, COLLECT, READ_BLOCKS, DELETE, NOTE, PLAN, BEAT, SESSIONS, CHOOSE,
        LANE, LOCK,
    ],
    "ingest": [TAKE, COMMIT, PLAN, BEAT, SESSIONS, CHOOSE, LANE],
    "web": [LEASE, COMMIT, READ_BLOCKS, PLAN, BEAT, LOCK],
    "operator": [
        PUSH, LEASE, COMMIT, DRAIN, PLAN, BEAT, SESSIONS, RQ, LANE, LOCK,
    ],
}  # fmt: skip


@pytest.mark.parametrize("user", USERS)
def test_each_may_do_what_it_seldom_does(guarded: redis.Redis, user: str) -> None:
    """A user may run the commands that it seldom needs, with their keys."""
    refused = [words for words in unseen_of(user) if not may(guarded, user, *words.split())]
    assert refused == []


@pytest.mark.parametrize("user", USERS)
def test_each_is_refused_what_is_not_its_own(guarded: redis.Redis, user: str) -> None:
    """A user is refused another role's commands: a worker pushes nothing, and so on."""
    allowed = [
        words for group in FOREIGN[user] for words in group if may(guarded, user, *words.split())
    ]
    assert allowed == []


@pytest.mark.parametrize("kind", SERVERS)
def test_what_is_refused_is_refused_within_scripts_too(kind: str, tmp_path: Path) -> None:
    """A command that a user may not run is refused within its scripts too."""
    with guarded_server(tmp_path / "guarded", kind) as server:
        for user in USERS:
            foreign = ["FLUSHALL", *(words for group in FOREIGN[user] for words in group)]
            with closing_client(server.url(user)) as client:
                assert runs(client, user, "PING")
                allowed = [words for words in foreign if runs(client, user, words)]
            assert (user, allowed) == (user, [])


def runs(client: redis.Redis, user: str, words: str) -> bool:
    """Tell whether a user's script gets past the server's check of permissions."""
    call = ", ".join(f"'{word}'" for word in words.split())
    script = client.register_script(f"return redis.call({call})")
    try:
        script(keys=["rq:x" if user == "enqueuer" else "ef:{J}:res"])
    except redis.ResponseError as error:
        return not re.search(
            r"ACL failure|permission|user executing the script can't|not allowed from script",
            str(error),
        )
    return True


@pytest.mark.parametrize("kind", SERVERS)
def test_the_file_as_it_is_lets_nobody_in(kind: str, tmp_path: Path) -> None:
    """A server does not start with the file as it is, in which passwords are not chosen."""
    live = LiveServer(tmp_path / "server", kind, Settings(), words=["--aclfile", str(USERS_FILE)])
    done = subprocess.run(live._command, capture_output=True, timeout=30, check=False)
    assert done.returncode == 1
    live.stop()


@pytest.mark.parametrize("kind", SERVERS)
def test_nobody_gets_in_without_a_name(kind: str, tmp_path: Path) -> None:
    """A client without a user's name is refused."""
    with (
        guarded_server(tmp_path / "guarded", kind) as server,
        redis.Redis(port=server.port) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


def test_no_password_is_anywhere(evidence: Evidence) -> None:
    """Logs, outputs, answers, pages and records of jobs have no password in them."""
    passwords = [password.encode() for password in evidence.server.passwords.values()]
    files = [path for path in evidence.home.rglob("*") if path.is_file()]
    files = [path for path in files if "guarded" not in path.parts]
    with closing_client(evidence.server.url("admin")) as client:
        kept = [repr(client.hgetall(key)) for key in client.keys("*:meta")]
    texts = {path.name: path.read_bytes() for path in files}
    texts |= {str(place): text.encode() for place, text in enumerate([*evidence.said, *kept])}
    assert len(files) > 10
    assert kept
    assert [name for name, text in texts.items() if any(each in text for each in passwords)] == []
