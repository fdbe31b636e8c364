"""Tests that all doors say the same of how many workers there should be, for a recorded backlog."""

import json
import time
from typing import Any, Final

import msgspec
import pytest
import redis
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.jobs import Job
from embedfarm.contract.model_states import ModelState
from tests.contract.little_job import CHUNKS, RATE, SPEC, embed, heartbeat, push
from tests.farm.harness import run
from tests.support import LiveServer
from tests.web.conftest import client_of

KEY: Final = model_key(SPEC)
BLOCK_TOKENS: Final = 10 * CHUNKS
SPEED: Final = 0.01  # tokens/s, so that a block is half an hour of work
MODEL: Final = SPEC.model


def there(farm: FarmClient, name: str, kind: str = "cpu", **facts: Any) -> None:  # noqa: ANN401 -- fields of any type
    """Have a worker of a kind live that has the model loaded, and was seen to work."""
    loaded = ModelState(model=KEY, state="ready", since=1.0, load_seconds=0.0)
    said = {"kind": kind, "models": [loaded], "device_cost_per_hour": 0.5} | facts
    farm.beat(msgspec.structs.replace(heartbeat(name), **said), 60)
    remember(farm, name, kind)


def remember(farm: FarmClient, worker: str, kind: str, speed: float = SPEED) -> None:
    """Record the rate of a worker, as the scheduler does."""
    rate = msgspec.structs.replace(
        RATE, tokens_per_second=speed, kind=kind, cost_per_hour=0.5, updated=time.time()
    )
    farm.statistics.remember({f"{worker}|{KEY}|3": rate}, [])


def backlog(farm: FarmClient, blocks: int, name: str = "little", spec: JobSpec = SPEC) -> Job:
    """Record a job with so many blocks of half an hour of work each."""
    job = farm.job(name)
    job.create(spec, 0)
    push(job, *range(0, blocks * CHUNKS, CHUNKS))
    job.close(blocks * CHUNKS)
    return job


def metrics(web: TestClient) -> dict[tuple[str, ...], float]:
    """Return the metrics that autoscalers ask for, by name and labels in the order of their names.

    The time that all of the backlog takes has no model, and is left out.
    """
    families = text_string_to_metric_families(web.get("/metrics").text)
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
        if sample.name in {"embedfarm_backlog_seconds", "embedfarm_workers_advised"}
        and sample.labels["model"]
    }


def asked(web: TestClient, **words: str) -> Any:  # noqa: ANN401 -- JSON
    """Return what the route answers."""
    answer = web.get("/v1/advice", params=words)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scaled(web: TestClient) -> tuple[int, float]:
    """Return the two numbers that KEDA asks for: workers of the kind, and seconds of backlog."""
    whole, one = asked(web), asked(web, model=MODEL, kind="cpu")
    row = whole["models"][MODEL]["kinds"]["cpu"]
    assert one["workers_advised"] == row["workers_advised"]
    assert one["backlog_seconds"] == row["backlog_seconds"]
    found = metrics(web)
    assert found["embedfarm_workers_advised", "cpu", MODEL] == row["workers_advised"]
    assert found["embedfarm_backlog_seconds", "one_worker", MODEL] == row["backlog_seconds"]
    return one["workers_advised"], one["backlog_seconds"]


def test_figures_follow_a_recorded_backlog(
    web: TestClient, client: redis.Redis, server: LiveServer
) -> None:
    """Route and metrics go up with the backlog, down with it to zero, and are `advise --json`'s."""
    farm = FarmClient(client)
    there(farm, "one")
    assert asked(web, model=MODEL, kind="cpu")["workers_advised"] == 0
    job = backlog(farm, 1)
    assert scaled(web) == (1, BLOCK_TOKENS / SPEED)
    backlog(farm, 4, "more")
    few = scaled(web)
    assert few[1] == pytest.approx(5 * BLOCK_TOKENS / SPEED)
    backlog(farm, 20, "most")
    many, seconds = scaled(web)
    assert (few[0] > 1, many > few[0], seconds) == (True, True, 25 * BLOCK_TOKENS / SPEED)
    said = run("advise", "--json", "--redis", server.url)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == asked(web)
    table = run("advise", "--redis", server.url).stdout
    assert f"cpu: {many} workers advised, 1 live: start {many - 1}, 0.50 an hour each" in table
    for name in ("more", "most"):
        farm.job(name).cancel()
    assert scaled(web)[0] == 1
    job.stream.commit([embed(entry) for entry in job.stream.read("one", 1)])
    assert scaled(web) == (0, 0)
    assert asked(web)["workers_live"] == 1


def test_a_farm_that_was_scaled_to_zero_comes_back(web: TestClient, client: redis.Redis) -> None:
    """Rates say the kind and the price of workers that are gone, so that they are advised again."""
    farm = FarmClient(client)
    there(farm, "one", load_seconds=1.0)
    farm.leave("one")
    assert scaled_kinds(web) == {"cpu": 0}
    backlog(farm, 3)
    assert scaled_kinds(web) == {"cpu": 2}  # 1.5 hours, and 60 s to start
    cpu = asked(web)["kinds"]["cpu"]
    assert cpu == {
        "cost_per_hour": 0.5, "workers_live": 0, "workers_max": None, "workers_advised": 2,
    }  # fmt: skip


def scaled_kinds(web: TestClient) -> dict[str, int]:
    """Return the workers that are advised by kind."""
    kinds = asked(web)["kinds"]
    return {kind: each["workers_advised"] for kind, each in kinds.items()}


def test_a_farm_that_never_had_a_worker(web: TestClient, client: redis.Redis) -> None:
    """The first job brings one worker of whatever kind an autoscaler has."""
    assert asked(web, kind="h100")["workers_advised"] == 0
    backlog(FarmClient(client), 3)
    assert asked(web, kind="h100")["workers_advised"] == 1
    assert asked(web)["backlog_seconds"] > 0
    found = metrics(web)
    assert found["embedfarm_workers_advised", "any", MODEL] == 1
    assert found["embedfarm_backlog_seconds", "one_worker", MODEL] > 0


def test_deadlines_and_what_is_left_out(web: TestClient, client: redis.Redis) -> None:
    """A near deadline takes more workers; paused jobs none, as the reasons say."""
    farm = FarmClient(client)
    there(farm, "one")
    job = backlog(farm, 3)
    assert scaled_kinds(web) == {"cpu": 2}
    job.set_terms(deadline_ms=int(1000 * (time.time() + 900)))
    assert scaled_kinds(web)["cpu"] >= 6
    job.pause()
    assert scaled_kinds(web) == {"cpu": 0}
    assert "1 paused job left out" in asked(web)["reasons"]


def test_what_is_not_sent_yet_counts(web: TestClient, client: redis.Redis) -> None:
    """Work that a producer is expected to send counts, as long as it has work on the server."""
    farm = FarmClient(client)
    there(farm, "one")
    job = farm.job("open")
    job.create(SPEC, 0)
    push(job, 0)
    assert asked(web)["backlog_tokens"] == BLOCK_TOKENS
    assert "what is not sent yet of 1 job is not counted" in asked(web)["reasons"]
    job.note("chunks_expected", 20 * CHUNKS)
    assert asked(web)["backlog_tokens"] == 20 * BLOCK_TOKENS
    assert "1 job is estimated, from how much of the corpus was read" in " ".join(
        asked(web)["reasons"]
    )
    job.stream.commit([embed(entry) for entry in job.stream.read("one", 1)])
    assert asked(web)["backlog_tokens"] == 0  # its producer may be gone
    push(job, CHUNKS)
    assert asked(web)["backlog_tokens"] == 19 * BLOCK_TOKENS
    job.close(2 * CHUNKS)
    assert asked(web)["backlog_tokens"] == BLOCK_TOKENS


def test_results_that_nobody_collects_take_no_worker(
    server: LiveServer, client: redis.Redis
) -> None:
    """A job whose results fill their limit is worked on by nobody, and gets no worker."""
    farm = FarmClient(client)
    there(farm, "one")
    job = backlog(farm, 3)
    job.stream.commit([embed(entry) for entry in job.stream.read("one", 1)])
    with client_of(server, results_bytes_max=1) as web:
        assert scaled_kinds(web) == {"cpu": 0}
        assert "1 job left out whose results are not collected" in asked(web)["reasons"]


def test_kinds_and_bounds(server: LiveServer, client: redis.Redis) -> None:
    """Live workers of two kinds are told apart; one of an older version is of its device's."""
    farm = FarmClient(client)
    there(farm, "one", kind="")
    there(farm, "two", kind="h100", device="cuda-0", device_cost_per_hour=0.1)
    there(farm, "ends", kind="h100", device="cuda-1", state="draining")
    backlog(farm, 8)
    with client_of(server, advice_workers_max={"h100": 2, "tpu": 1}) as web:
        kinds = asked(web)["kinds"]
    assert kinds["h100"]["workers_live"] == 1
    # The cheaper kind has as many as there may be, and the other one does the rest.
    assert kinds["h100"]["workers_advised"] == 2
    assert kinds["cpu"]["workers_advised"] == 3
    assert kinds["tpu"] == {
        "cost_per_hour": 0.0, "workers_live": 0, "workers_max": 1, "workers_advised": 0,
    }  # fmt: skip
    words = ("advise", "--max", "h100=0", "--max", "cpu=9", "--within", "2h", "--json")
    said = json.loads(run(*words, "--redis", server.url).stdout)
    assert said["kinds"]["h100"]["workers_advised"] == 0
    assert said["kinds"]["cpu"]["workers_advised"] == 2 + 1  # with 60 s to start, just more than 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max", "cpu"), "give a kind and a number"),
        (("--max", "|=1"), "give a kind and a number"),
        (("--max", "cpu=-1"), "give a kind and a number"),
        (("--within", "soon"), "is no deadline"),
        (("--within", "2020-01-01"), "no time to come"),
    ],
)
def test_wrong_options_are_refused(
    server: LiveServer, words: tuple[str, ...], message: str
) -> None:
    """An option that makes no sense ends the command with status 2 and says why."""
    done = run("advise", *words, "--redis", server.url)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
