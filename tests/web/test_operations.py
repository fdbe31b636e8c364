"""Tests of what people and their tools ask a running farm."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import pytest
import redis
from fastapi.testclient import TestClient
from openapi_spec_validator import OpenAPIV31SpecValidator, validate
from prometheus_client.parser import text_string_to_metric_families

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.lane import Lane
from embedfarm.contract.model_counts import UNLOADS, ModelCounts
from embedfarm.contract.model_states import ModelState
from embedfarm.contract.records import Decision, Heartbeat
from embedfarm.contract.settings import Settings
from embedfarm.contract.window import FarmWindow
from embedfarm.ingest.task_worker import TaskWorker
from embedfarm.scheduler.policies import POLICIES, pass_names
from embedfarm.watch.bottlenecks import RULES
from embedfarm.watch.view import FarmReader
from embedfarm.web.auth.keys import make_key
from embedfarm.workers.engines.engine import Chunk, Tokenised
from embedfarm.workers.engines.null import NullEngine
from tests.contract.little_job import (
    COMPLETION,
    DECISION,
    STATS,
    heartbeat,
    make_job,
    run_everything,
)
from tests.farm.harness import run
from tests.support import LiveServer, wait_until
from tests.watch.test_view import beat, embed_two, report
from tests.web.conftest import client_of
from tests.workers.running import worker_on, working
from tests.workers.support import block_of, create_job, let_models_take

ALERTS: Final = Path(__file__).parents[2] / "deploy" / "alerts.yaml"
ALERTS_TEST: Final = ALERTS.with_name("alerts.test.yaml")


def figures(web: TestClient) -> dict[tuple[str, tuple[str, ...]], float]:
    """All samples of a scrape, by name and the values of its labels in the order of their names."""
    text = web.get("/metrics").text
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def make_ready(client: redis.Redis, server: LiveServer) -> FarmClient:
    """Make a farm with a scheduler, a worker and an ingest worker."""
    farm = FarmClient(client)
    ingest = TaskWorker(Settings(redis_url=server.url))
    ingest.register_birth()
    ingest.connection.close()
    farm.plans.elect("scheduler", 60)
    farm.beat(heartbeat("one"), 60)
    return farm


def test_ready_says_what_is_missing(
    web: TestClient, server: LiveServer, client: redis.Redis
) -> None:
    """`/readyz` lists all that the farm lacks; without its server it is not ready, but alive."""
    answer = web.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == [
        "no scheduler is active",
        "no worker is alive",
        "no ingest worker is alive: jobs by HTTP and RQ wait",
    ]
    FarmClient(client).beat(heartbeat("one"), 60)
    assert web.get("/readyz").status_code == 200  # others can do without the rest
    assert len(web.get("/readyz").json()["reasons"]) == 2
    make_ready(client, server)
    for path in ("/readyz", "/health"):
        answer = web.get(path)
        whole = {"ready": True, "takes_jobs": True, "warm": [], "reasons": []}
        assert (answer.status_code, answer.json()) == (200, whole)
    server.kill()
    assert web.get("/readyz").json()["reasons"] == ["the server is not to be reached"]
    assert web.get("/livez").json() == {"alive": True}
    away = web.get("/v1/workers")
    assert (away.status_code, away.headers["retry-after"]) == (503, "5")
    assert server.url not in away.text


def test_ready_for_a_model(web: TestClient, client: redis.Redis, server: LiveServer) -> None:
    """A farm whose workers have loaded no model takes jobs, and is not ready for that model."""
    farm, served = make_ready(client, server), Settings().models[0]
    answer = web.get("/readyz", params={"model": served})
    assert answer.status_code == 503
    assert answer.json() == {
        "ready": False,
        "takes_jobs": True,
        "warm": [],
        "reasons": [f"no worker has loaded {served}"],
    }
    farm.beat(msgspec.structs.replace(heartbeat("one"), model=f"{served}|auto|0||auto"), 60)
    answer = web.get("/readyz", params={"model": served})
    assert (answer.status_code, answer.json()["warm"]) == (200, [served])
    assert web.get("/readyz", params={"model": "another"}).status_code == 404


def test_workers_are_their_heartbeats(
    web: TestClient, client: redis.Redis, server: LiveServer
) -> None:
    """The list of workers has all fields of a heartbeat, as `workers --json` has them."""
    farm = make_ready(client, server)
    state = ModelState(model="m|auto|0|auto", state="failed", since=1.5, reason="no memory")
    said = msgspec.structs.replace(heartbeat("one"), models=[state])
    farm.beat(said, 60)
    [told] = web.get("/v1/workers").json()
    assert told == msgspec.structs.asdict(said) | {"models": [msgspec.structs.asdict(state)]}
    [own] = json.loads(run("workers", "--json", "--redis", server.url).stdout)
    assert own == told
    [row] = json.loads(run("models", "ls", "--json", "--redis", server.url).stdout)
    assert row == {"worker": "one"} | told["models"][0]
    shown = run("models", "ls", "--redis", server.url).stdout
    assert re.search(r"m +one +failed .* no memory", shown), shown


def test_the_scheduler_explains_itself(web: TestClient, client: redis.Redis) -> None:
    """The scheduler's figures and decisions are shown, filtered by worker; 404 without one."""
    assert web.get("/v1/scheduler/stats").status_code == 404
    assert web.get("/v1/scheduler/explain").json() == []
    FarmClient(client).plans.tell(DECISION, STATS)
    assert web.get("/v1/scheduler/stats").json() == msgspec.structs.asdict(STATS)
    told = web.get("/v1/scheduler/explain").json()
    assert told[0]["notes"] == [["size", "nothing"]]
    notes = [("size", "x gets much"), ("size", "y gets little"), ("defer", "job is paused")]
    decision = msgspec.structs.replace(DECISION, notes=notes, workers=["x", "y", ""])
    FarmClient(client).plans.tell(decision, STATS)
    told = web.get("/v1/scheduler/explain", params={"worker": "x"}).json()
    assert told[0]["notes"] == [["size", "x gets much"], ["defer", "job is paused"]]
    assert told[0]["workers"] == ["x", ""]


def test_passes_are_chosen(web: TestClient, client: redis.Redis) -> None:
    """Chosen passes are used; a list that no farm could work by is refused with a reason."""
    before = web.get("/v1/scheduler/passes").json()
    assert before["active"] == list(POLICIES["fair"])
    assert sorted(before["active"] + before["others"]) == pass_names()
    chosen = list(POLICIES["sjf"])
    assert web.put("/v1/scheduler/passes", json={"active": chosen}).json()["active"] == chosen
    assert FarmClient(client).plans.policy() == chosen
    for wrong in ([], ["defer"], ["none"]):
        answer = web.put("/v1/scheduler/passes", json={"active": wrong})
        assert answer.status_code == 409, wrong
    assert FarmClient(client).plans.policy() == chosen


def test_metrics_tell_the_farm(web: TestClient, client: redis.Redis, server: LiveServer) -> None:
    """The metrics have jobs, backlog, workers and scheduler, and no job's id."""
    run_everything(client)
    farm = make_ready(client, server)
    beat = msgspec.structs.replace(
        heartbeat("gpu"),
        device="cuda-GPU-1",
        tokens_per_second=10.0,
        chunks_done=3,
        device_facts={"memory_used_bytes": 5.0},
        where={"forward": 2.0},
        lane={"texts": 4.0},
        models=[
            ModelState(model="m|float32|0|auto", state="ready", since=1.0, bytes=7, load_seconds=2),
            ModelState(model="m|auto|0|auto", state="ready", since=1.0, bytes=5, load_seconds=3),
            ModelState(model="n|auto|0|auto", state="loading", since=1.0),
        ],
    )
    farm.beat(beat, 60)
    farm.plans.tell(DECISION, STATS)
    found = figures(web)
    assert found["embedfarm_server_up", ()] == 1
    assert found["embedfarm_scheduler_active", ()] == 1
    assert found["embedfarm_workers", ("idle",)] == 2
    assert found["embedfarm_chunks_total", ("gpu",)] == 3
    assert found["embedfarm_worker_seconds_total", ("forward", "gpu")] == 2
    assert found["embedfarm_lane_texts_total", ("gpu",)] == 4
    assert found["embedfarm_gpu_memory_used_bytes", ("cuda-GPU-1", "gpu")] == 5
    assert found["embedfarm_worker_models", ("m", "ready", "gpu")] == 2
    assert found["embedfarm_worker_models", ("n", "loading", "gpu")] == 1
    assert found["embedfarm_model_bytes", ("m", "gpu")] == 12
    assert found["embedfarm_model_load_seconds", ("m", "gpu")] == 3
    assert found["embedfarm_scheduler_efficiency_ratio", ()] == STATS.efficiency
    assert "little" not in web.get("/metrics").text
    Job(client, "little").delete()
    job = make_job(client, 2)
    assert figures(web)["embedfarm_jobs", ("running",)] == 1
    status = job.status()
    assert figures(web)["embedfarm_backlog_chunks", ()] == status.chunks_in


def test_metrics_say_what_the_pages_say(web: TestClient, client: redis.Redis) -> None:
    """The time that the backlog takes, and what holds it back, are those of the pages."""
    farm = FarmClient(client)
    embed_two(farm)
    beat(farm, "one", state="busy")
    report(farm)
    found, view = figures(web), FarmReader(farm).read()
    assert view.backlog_seconds is not None
    least, most = view.backlog_seconds
    assert found["embedfarm_backlog_seconds", ("least", "")] == pytest.approx(least)
    assert found["embedfarm_backlog_seconds", ("most", "")] == pytest.approx(most)
    assert found["embedfarm_server_memory_used_bytes", ()] == pytest.approx(
        view.memory_used_bytes, rel=0.2
    )
    assert found["embedfarm_server_memory_limit_bytes", ()] == view.memory_bytes_max > 0
    said = {labels for name, labels in found if name == "embedfarm_bottlenecks"}
    assert said == {(each.cause, each.severity) for each in view.bottlenecks}
    assert ("no_scheduler", "warning") in said


@pytest.mark.parametrize("path", [ALERTS, ALERTS_TEST])
def test_alerts_are_about_metrics_that_there_are(
    path: Path, web: TestClient, client: redis.Redis, server: LiveServer
) -> None:
    """Each metric that an alert looks at is one of the farm's, with the labels that it has."""
    make_job(client, 1, "fails")
    farm = make_ready(client, server)
    farm.end("fails", "failed", "", Settings())
    farm.model_counts.add("null:2", {"loads": 1})
    families = text_string_to_metric_families(web.get("/metrics").text)
    there = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    asked = re.findall(r"(embedfarm_[a-z_]+)(?:\{([^}]*)\})?", path.read_text(encoding="utf-8"))
    assert asked
    for name, labels in asked:
        assert name in there, name
        # The instance is Prometheus' own label of whom it asked.
        assert set(re.findall(r"(\w+)=~?\"", labels)) <= there[name] | {"instance"}, name


def test_metrics_have_the_window(web: TestClient, client: redis.Redis) -> None:
    """The window of all jobs is shown while somebody counts it, with what it may hold."""
    assert not [name for name, _ in figures(web) if "window" in name]
    make_job(client, 1)
    room = FarmWindow(client, Settings()).look()
    found = figures(web)
    assert found["embedfarm_window_used_bytes", ()] == room.used_bytes > 0
    assert found["embedfarm_window_limit_bytes", ()] == room.bytes_max > room.used_bytes


def test_every_cause_of_an_alert_is_one() -> None:
    """Alerts name the rules by which the pages say what holds the farm back."""
    text = ALERTS.read_text(encoding="utf-8")
    causes = {each for found in re.findall(r'cause=~?"([^"]*)"', text) for each in found.split("|")}
    assert len(causes) > 5
    assert causes <= {rule.__name__ for rule in RULES}


def test_doors_count_the_same_of_models(
    web: TestClient, client: redis.Redis, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics, the page and the command line have what workers did, one after the other."""
    let_models_take(monkeypatch, 10)
    whole = NullEngine.tokenise

    def of_three_tokens(engine: NullEngine, chunks: Sequence[Chunk]) -> Tokenised:
        return replace(whole(engine, chunks), limit=3)

    monkeypatch.setattr(NullEngine, "tokenise", of_three_tokens)
    farm = FarmClient(client)
    for number in range(2):
        job = create_job(farm, [block_of(0, 5)], f"job-{number}", model="null:4")
        with working(worker_on(server, f"cpu-{number}", models_bytes_max=10)):
            wait_until(lambda: job.status().chunks_done == 5)  # noqa: B023 # used up in this turn
            for texts in (["long, three tokens"], ["b", "c"]):
                Lane(client).embed(JobSpec(model="null:8"), texts, 9)
    counts = farm.model_counts.all()
    full = 2 * sum(len(text) >= 12 for text in block_of(0, 5).texts)
    assert counts["null:4"]._replace(load_ms=0) == ModelCounts(2, unloads_room=2, texts_full=full)
    assert counts["null:8"]._replace(load_ms=0) == ModelCounts(2, requests=4, texts_full=2)
    found, page = figures(web), web.get("/workers").text
    for model, each in counts.items():
        assert found["embedfarm_model_loads_total", (model,)] == each.loads
        assert found["embedfarm_model_loading_seconds_total", (model,)] == each.load_seconds
        assert found["embedfarm_model_requests_total", (model,)] == each.requests
        assert found["embedfarm_model_texts_full_total", (model,)] == each.texts_full
        for reason, name in UNLOADS.items():
            gone = found["embedfarm_model_unloads_total", (model, reason)]
            assert gone == getattr(each, name)
        shown = run("models", "show", model, "--json", "--redis", server.url)
        assert json.loads(shown.stdout)["counts"] == each._asdict()
        _, _, row = page.partition(f'<span class="name">{model}</span>')
        cells = re.findall(r'data-label="[^"]*">([^<]*)</td>', row.partition("</tr>")[0])
        assert [*cells[:1], *cells[2:]] == [str(each.loads), *map(str, each[2:])], row


def test_metrics_count_what_has_ended(web: TestClient, client: redis.Redis) -> None:
    """Each end of a job counts once, by state and cause, also when its record is gone."""
    farm, settings = FarmClient(client), Settings()
    for name in ("one", "other"):
        make_job(client, 1, name)
        for _ in range(2):  # as after a lost reply
            farm.end(name, "failed", "no such column", settings, cause="corpus")
        farm.job(name).delete()
    make_job(client, 1, "third")
    farm.end("third", "finished", "", settings)
    found = figures(web)
    assert found["embedfarm_jobs_ended_total", ("corpus", "failed")] == 2
    assert found["embedfarm_jobs_ended_total", ("", "finished")] == 1
    assert not [name for name, _ in found if name == "embedfarm_jobs"]


def test_metrics_have_words(web: TestClient, client: redis.Redis, server: LiveServer) -> None:
    """Each metric has a sentence of its own that says what it is, and is this farm's by name."""
    run_everything(client)
    make_ready(client, server).plans.tell(DECISION, STATS)
    families = list(text_string_to_metric_families(web.get("/metrics").text))
    words = [each.documentation for each in families if not each.name.endswith("_created")]
    assert len(set(words)) == len(words) > 20
    assert all(each.endswith(".") for each in words)
    assert all(family.name.startswith("embedfarm_") for family in families)


def test_metrics_count_micro_batches_and_requests(web: TestClient, client: redis.Redis) -> None:
    """Metrics count each micro-batch once between scrapes, and requests by their route."""
    farm = FarmClient(client)
    web.get("/metrics")
    farm.statistics.report(COMPLETION, 100)
    assert figures(web)["embedfarm_batch_tokens_sum", ()] == COMPLETION.tokens
    farm.statistics.report(COMPLETION, 100)
    web.get("/v1/jobs/none")
    web.request("STRANGE", "/nowhere")
    found = figures(web)
    assert found["embedfarm_batch_duration_seconds_count", ("one",)] == 2
    assert found["embedfarm_batch_chunks_count", ()] == 2
    assert found["embedfarm_requests_total", ("GET", "/v1/jobs/{job}", "404")] == 1
    assert found["embedfarm_requests_total", ("other", "none", "404")] == 1


def test_metrics_without_a_server(web: TestClient, server: LiveServer) -> None:
    """A scrape while the server is away succeeds, and says that it is away."""
    server.kill()
    assert figures(web)["embedfarm_server_up", ()] == 0
    assert web.get("/metrics").status_code == 200


def test_the_document_knows_every_field(web: TestClient) -> None:
    """The OpenAPI document names every field of a worker and of a decision."""
    schemas = web.get("/openapi.json").json()["components"]["schemas"]
    for record in (Heartbeat, Decision):
        assert set(record.__struct_fields__) == set(schemas[record.__name__]["properties"])


def test_the_document_asks_for_keys_where_they_are_asked_for(
    web: TestClient, server: LiveServer
) -> None:
    """The document is OpenAPI 3.1, and asks for keys only where the application has some."""
    free = web.get("/openapi.json").json()
    names = [each["operationId"] for path in free["paths"].values() for each in path.values()]
    assert len(set(names)) == len(names)
    assert {"submit_job", "get_results", "embeddings", "ready"} <= set(names)
    assert free["paths"]["/v1/jobs"]["get"]["security"] == [{}, {"HTTPBearer": []}]
    with client_of(server, [make_key("ann", ["read"])[1]]) as keyed:
        document = keyed.get("/openapi.json").json()
    paths = document["paths"]
    assert paths["/v1/jobs"]["get"]["security"] == [{"HTTPBearer": []}]
    for each in (free, document):
        validate(each, cls=OpenAPIV31SpecValidator)
    assert "422" not in paths["/v1/embeddings"]["post"]["responses"]
