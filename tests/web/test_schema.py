"""Tests of the OpenAPI document, with many requests that are generated from it."""

import contextlib
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import redis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema
from schemathesis.openapi import from_dict
from schemathesis.schemas import BaseSchema

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import DEFAULT_MODEL
from embedfarm.web.auth.keys import make_key
from embedfarm.web.operations.routes import NO_INGEST
from tests.contract.little_job import make_job, run_everything
from tests.farm.harness import role
from tests.support import LiveServer, wait_until
from tests.web.test_gate import served
from tests.workers.running import worker_on, working

# Cases of all operations, and sequences of operations, each with what the one before answered.
SIZES: Final = ((60, 3), pytest.param(5_000, 30, marks=pytest.mark.slow))
JOBS: Final = 150
REQUEST_SECONDS: Final = 60  # workers load a model for some of the jobs that are made
NULL: Final = "null:16"
TOKENIZE: Final = "/tokenize"  # a null model has no tokenizer
JOBS_PATH: Final = "/v1/jobs"  # half of the operations are below it
EVENTS: Final = "/v1/jobs/{job}/events"  # do not end while the job goes on
QUICK: Final[dict[str, Any]] = {
    "lane_wait_seconds": 0,
    "http_requests_per_second": 0,
    "http_wait_seconds_max": 0.1,
}
ACCEPTANCE: Final = ["2xx", "401", "403", "404", "409", "429"]  # for what the document allows
# Statuses of what it does not allow; 413 is for more values than a body may have.
REJECTION: Final = [
    "400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx",
]  # fmt: skip
# Operations that may also refuse, for what no schema can say.
FINER: Final = {
    "POST /embed": "more dimensions than the model has, no normalising of a model that does it",
    "POST /v1/embeddings": "token ids that no text has, more dimensions than the model has",
    "PATCH /v1/jobs/{job}": "a tenant with characters that cannot be printed",
    "POST /v1/feeds": "the same",
    "GET /v1/jobs/{job}/results": "a type that is none",
    "GET /v1/jobs/{job}/search": "a model that no worker has",
    "POST /v1/jobs": "the same, one field as text and id, a strange file, a key used before",
    "POST /v1/estimates": "the same, a corpus that is of no lines or has no row",
    "POST /v1/jobs/{job}/texts": "fewer ids than texts",
}


@contextlib.contextmanager
def asked(
    server: LiveServer, model: str, home: Path, cases: int, sequences: int
) -> Iterator[tuple[str, BaseSchema]]:
    """Serve a model; yield its URL, and the document with settings for so many requests."""
    secret, key = make_key("ann", ["admin"])
    keys = home / "keys"
    keys.write_text(key.line())
    settings = {"keys_file": keys, "jobs_directory": home / "jobs", "models": f'["{model}"]'}
    with served(server, **settings, **QUICK) as ((host, port), _):
        url = f"http://{host}:{port}"
        document = httpx.get(f"{url}/openapi.json", timeout=REQUEST_SECONDS).json()
        operations = sum(map(len, document["paths"].values()))
        config = {
            "seed": random.getrandbits(32),  # which follows from the seed that pytest prints
            "base-url": url,
            "request-timeout": REQUEST_SECONDS,
            "continue-on-failure": True,
            "auth": {"openapi": {"HTTPBearer": {"bearer": secret}}},
            "generation": {"max-examples": cases // operations, "no-shrink": True},
            "phases": {"stateful": {"generation": {"max-examples": sequences}}},
            "checks": {
                "positive_data_acceptance": {"expected-statuses": ACCEPTANCE},
                "negative_data_rejection": {"expected-statuses": REJECTION},
            },
            "operations": [
                {
                    "include-name": name,
                    "checks": {
                        "positive_data_acceptance": {
                            "expected-statuses": [*ACCEPTANCE, "400", "406", "415", "422"],
                        }
                    },
                }
                for name in FINER
            ],
        }
        yield url, from_dict(document, config=SchemathesisConfig.from_dict(config))


def try_all(schema: BaseSchema) -> int:
    """Send all generated requests, which must be answered well; return how many were answered."""
    answered, failed = 0, dict[str, str]()
    for event in from_schema(schema).execute():
        if isinstance(event, events.NonFatalError):
            failed[event.label] = repr(event.value)
        elif isinstance(event, events.FatalError):
            failed["all"] = repr(event.exception)
        elif isinstance(event, events.ScenarioFinished):
            asked = event.recorder.interactions.values()
            answered += sum(each.response is not None for each in asked)
            for checks in event.recorder.checks.values():
                failed |= {
                    f"{event.label}, {check.name}": f"{found.failure}\n{found.code_sample}"
                    for check in checks
                    if (found := check.failure_info) is not None
                }
    assert not failed, "\n\n".join(f"{name}: {example}" for name, example in failed.items())
    return answered


def count(schema: BaseSchema) -> int:
    """The number of operations in the document."""
    return sum(1 for _ in schema.get_all_operations())


@pytest.fixture
def busy(server: LiveServer, client: redis.Redis, tmp_path: Path) -> Iterator[LiveServer]:
    """A farm that has everything that can be asked for."""
    farm = FarmClient(client)
    run_everything(client)
    for beat in farm.workers():  # nobody runs them, and they would never refuse a request
        farm.leave(beat.worker)
    for number in range(JOBS):
        job = make_job(client, 1, f"job-{number}")
        if not number % 3:
            job.cancel() if number % 2 else job.pause()
        elif not number % 5:
            job.end("failed", "no memory", 3600)
    # Texts that may be cut and texts that may not have an engine each: so a worker for each. They
    # beat in this process, which is busy with requests.
    one, other = (
        worker_on(server, f"cpu-{number}", heartbeat_ttl_seconds=60.0, **QUICK)
        for number in range(2)
    )
    with role(server, tmp_path, "schedule"), working(one), working(other):
        wait_until(lambda: {one.name, other.name} <= {beat.worker for beat in farm.workers()})
        yield server


@pytest.mark.farm
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of an answer with vectors
@pytest.mark.timeout(1200)  # some minutes on a machine that others use too
@pytest.mark.parametrize("jobs", [True, False], ids=["jobs", "others"])
@pytest.mark.parametrize(("cases", "sequences"), SIZES)
def test_the_document_is_kept(
    busy: LiveServer,
    tmp_path: Path,
    cases: int,
    sequences: int,
    jobs: bool,  # noqa: FBT001 # a half
) -> None:
    """Hundreds of good and bad requests and more get no 5xx, and answers as documented.

    The checks are all of schemathesis: statuses, types, schemas and headers of answers, nothing
    accepted that the document excludes, nothing refused that it allows, nothing open without a
    key, no unknown method, nothing there after it was deleted.
    """
    with asked(busy, NULL, tmp_path, cases, sequences) as (url, schema):
        ready = partial(httpx.get, f"{url}/readyz", timeout=REQUEST_SECONDS)
        wait_until(lambda: ready().json()["reasons"] == [NO_INGEST])
        rest = schema.exclude(path=[TOKENIZE, EVENTS])
        half = rest.exclude(lambda each: each.operation.path.startswith(JOBS_PATH) is not jobs)
        assert try_all(half) >= cases * count(half) / count(rest)


def test_the_tokenizer_keeps_it_too(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """The route for tokens keeps to the document as well, with a real model and no worker."""
    del client
    with asked(server, DEFAULT_MODEL, tmp_path, 5_000, 1) as (_, schema):
        assert try_all(schema.exclude(lambda each: each.operation.path != TOKENIZE)) >= 100
