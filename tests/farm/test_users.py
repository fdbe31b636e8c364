"""The users of deploy/users.acl: with them the farm does its work, and no more than its work."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import redis
from rq import Queue
from typer.testing import CliRunner

from embedfarm.broker import closing_client
from embedfarm.cli.app import app
from embedfarm.settings import Settings
from tests.farm.guarded_server import USERS, USERS_FILE, GuardedServer, guarded_server
from tests.farm.whole import MODEL, WholeFarm, whole_farm
from tests.support import SERVERS, LiveServer, wait_until

LINES: Final = {line.split()[1]: line for line in USERS_FILE.read_text().splitlines()}
# Of RQ, whose commands change with its version: types of values, on its own keys only.
RQ_RULES: Final = re.compile(r"\([^()]*~rq:[^()]*\)")
EMBEDDING: Final = (
    "hdel", "hsetnx", "hstrlen", "xgroup|create", "xlen", "xpending", "xrange", "zadd", "zcard",
    "zscore",
)  # fmt: skip
RECONCILING: Final = dict.fromkeys(
    ("xack", "xdel", "xrange", "xrevrange", "xinfo|groups"),
    "it looks for chunks that the server has lost, and sends them again",
)
# Granted, and not met by this farm's work: why it is needed all the same.
UNSEEN: Final = {
    "*": {
        "select": "a URL may name a database",
        "ping": "roles wait for the server, and clients look whether a connection lives",
        "script|load": "a server that restarted knows no script",
        "script|exists": "redis-py asks in a pipeline, before its scripts",
    },
    "worker": {
        "xclaim": "it renews leases that are old, and rescues those of others",
        "xinfo|groups": "it looks for the oldest request for a model that it has not loaded",
        "set": "it remembers a budget, and claims the loading of a model",
        "multi": "it says why it cannot load a model",
        "exec": "the same",
        "expire": "the same",
        "hgetall": "it looks why others cannot",
        "hmget": "it looks whether a job is still there, after an outage",
        "zremrangebyscore": "it forgets workers that are gone for an hour",
        "xlen": "it looks how much there is of a job that its plan does not name",
    },
    "scheduler": {"hdel": "it forgets rates that are too old"},
    "submitter": RECONCILING
    | {
        "info": "it looks whether the server is another one, where a job is gone",
        "hdel": "it has what is damaged embedded again",
        "eval": "as in the example of docs/protocol.md; script|load allows as much",
        "hsetnx": "a resume holds workers to the model of its output",
        "xlen": "it looks what there is, when the farm is full",
        "xpending": "the same",
    },
    "ingest": RECONCILING
    | {
        "client|list": "RQ looks for its own address; MONITOR does not show that",
    }
    | dict.fromkeys(EMBEDDING, "a corpus that comes by RQ is embedded as by a submitter"),
    "web": {
        "xack": "it takes back a request that nobody has answered in time",
        "xdel": "the same",
        "xlen": "it counts what waits of jobs, and in the lane of a model",
        "xpending": "the same",
    },
    "operator": {
        "hgetall": "`simulate --plan` reads how fast the workers were",
        "xlen": "`top` counts what waits of each job",
        "xpending": "the same",
        "xinfo|groups": "`reconcile` looks what the server has of a job",
        "hkeys": "the same",
        "zrangebyscore": "`jobs ls` goes on behind the jobs that it has shown",
    },
}


@dataclass(frozen=True)
class Evidence:
    """What a farm under its users has left.

    Attributes:
        home: Logs and outputs.
        server: The server, which runs.
        said: What commands and HTTP answered.
    """

    home: Path
    server: GuardedServer
    said: list[str]


@pytest.fixture(scope="module", params=SERVERS)
def evidence(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Evidence]:
    """A farm that has done all it can do, each part of it as its own user."""
    home = tmp_path_factory.mktemp("users")
    said: list[str] = []
    with guarded_server(home / "guarded", request.param) as server:
        with server.watched(), whole_farm(home, server.url, part_bytes_max=64_000) as farm:
            farm.embed_corpus("main-job")
            job = farm.embed_by_http()
            farm.ask()
            said += [*feed(farm), *read_pages(farm, job), *command(farm)]
            enqueue(server)
            wait_until(lambda: "xadd" in server.used["scheduler"], 30)  # one of its rare samples
        yield Evidence(home, server, said)


def feed(farm: WholeFarm) -> Iterator[str]:
    """A job whose texts come, and whose vectors go, by HTTP."""
    web = farm.web
    name = web.post("/v1/feeds", json={"model": MODEL}).json()["job"]
    yield web.post(f"/v1/jobs/{name}/texts", json={"start": 0, "texts": ["one", "two"]}).text
    yield web.post(f"/v1/jobs/{name}/close", json={"count": 2}).text
    results = f"/v1/jobs/{name}/results"
    wait_until(lambda: web.get(results, params={"start": 0}).headers.get("x-next-start") == "2")
    assert web.get(results, params={"start": 2}).headers["x-complete"] == "true"
    yield web.delete(f"/v1/jobs/{name}").text


def read_pages(farm: WholeFarm, job: str) -> Iterator[str]:
    """The pages, what is on them, and what a request leaves that may come again."""
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
    """What people ask and do in a terminal."""
    name = farm.web.post("/v1/feeds", json={"model": MODEL}).json()["job"]
    for words in (
        "jobs ls", "jobs ls --ended", f"jobs show {name}", f"jobs errors {name}",
        f"jobs pause {name}", f"jobs resume {name}", f"jobs set {name} --priority urgent",
        f"jobs cancel {name}", f"jobs rm {name}", "workers", "top", "doctor",
        "scheduler stats", "scheduler explain", "scheduler passes", "scheduler remove-pass tail",
    ):  # fmt: skip
        done = CliRunner().invoke(app, words.split(), env=farm.variables("operator"))
        assert done.exit_code == 0, words + done.output
        yield done.output


def enqueue(server: GuardedServer) -> None:
    """A program that has nothing but rq."""
    with redis.Redis.from_url(server.url("enqueuer"), driver_info=None) as client:
        queue = Queue("embedfarm", connection=client, serializer="json")
        job = queue.enqueue("producer.tasks.cleanup")
        wait_until(lambda: job.get_status() == "finished", 60)


def test_the_farm_does_its_work_under_its_users(evidence: Evidence) -> None:
    """Corpus, jobs by HTTP and RQ, requests, a feed, pages and commands; nothing was refused."""
    assert [(each["username"], each["object"]) for each in evidence.server.refusals()] == []


@pytest.mark.parametrize("user", USERS)
def test_a_user_may_do_nothing_that_it_does_not_do(evidence: Evidence, user: str) -> None:
    """Each command on its line was seen, or there is a reason why it was not."""
    line = RQ_RULES.sub("", LINES[user])
    granted = set(re.findall(r"\+([a-z|]+)", line))
    reasons = UNSEEN["*"] | UNSEEN.get(user, {})
    unseen = granted - evidence.server.used[user]
    assert " ".join(sorted(unseen - reasons.keys())) == ""


# What nobody may do.


@pytest.fixture(scope="module", params=SERVERS)
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[redis.Redis]:
    """An administrator's connection to a server with the users, which says what they may do."""
    place = tmp_path_factory.mktemp("guarded") / "server"
    with (
        guarded_server(place, request.param) as server,
        closing_client(server.url("admin")) as client,
    ):
        yield client


def may(client: redis.Redis, user: str, *words: str) -> bool:
    """Whether the server would let a user run a command."""
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
    """Administer the server, look around on it, or touch what is not the farm's."""
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
def test_each_is_refused_what_is_not_its_own(guarded: redis.Redis, user: str) -> None:
    """A worker pushes nothing, a producer commits nothing, a scheduler reads nothing, and so on."""
    allowed = [
        words for group in FOREIGN[user] for words in group if may(guarded, user, *words.split())
    ]
    assert allowed == []


def test_what_is_refused_is_refused_within_scripts_too(tmp_path: Path) -> None:
    """Any role may load scripts, since a server that restarted knows none; they give no rights."""
    with (
        guarded_server(tmp_path / "guarded", SERVERS[0]) as server,
        closing_client(server.url("scheduler")) as client,
    ):
        for words in ("'HGETALL', KEYS[1]", "'FLUSHALL'"):
            script = client.register_script(f"return redis.call({words})")
            with pytest.raises(redis.ResponseError, match=r"ACL failure|permission|can't"):
                script(keys=["ef:{J}:res"])


def test_the_file_as_it_is_lets_nobody_in(tmp_path: Path) -> None:
    """Passwords that were not chosen are no hashes, so that the server does not start."""
    live = LiveServer(
        tmp_path / "server", SERVERS[0], Settings(), words=["--aclfile", str(USERS_FILE)]
    )
    done = subprocess.run(live._command, capture_output=True, timeout=30, check=False)
    assert done.returncode == 1
    live.stop()


def test_nobody_gets_in_without_a_name(tmp_path: Path) -> None:
    """The default user is off."""
    with (
        guarded_server(tmp_path / "guarded", SERVERS[0]) as server,
        redis.Redis(port=server.port) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


def test_no_password_is_anywhere(evidence: Evidence) -> None:
    """Not in a log, an output, an answer or a page, nor where jobs and their commands are kept."""
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
