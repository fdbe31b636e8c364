"""The application: all routes behind the gate."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.staticfiles import StaticFiles

from embedfarm.contract.broker import connect
from embedfarm.contract.lane import Lane
from embedfarm.contract.settings import Settings
from embedfarm.watch.overview import read_jobs
from embedfarm.web.auth.keys import Key, Keyring
from embedfarm.web.auth.sessions import Sessions
from embedfarm.web.farm_readers import Readers
from embedfarm.web.gate import Gate
from embedfarm.web.http.head import HeadRequests
from embedfarm.web.http.problems import HANDLERS, Problem, is_openai
from embedfarm.web.interactive import InteractiveRequests
from embedfarm.web.jobs import (
    bulk,
    estimate_routes,
    events,
    failures,
    feeds,
    nearest_chunks,
    results,
    retries,
    submissions,
)
from embedfarm.web.jobs import routes as jobs
from embedfarm.web.jobs.job_watch import JobWatch
from embedfarm.web.openai import batches, files
from embedfarm.web.openai import embeddings as openai_protocol
from embedfarm.web.operations import advice_routes, metrics, process_logs, timeline_routes
from embedfarm.web.operations import routes as operations
from embedfarm.web.operations.metrics import Figures, Meter
from embedfarm.web.pages import (
    api_docs,
    charts,
    download,
    failure_page,
    job,
    log_page,
    raise_limit,
    scheduler,
    search_page,
    sign_in,
    steer,
    submit,
    workers,
)
from embedfarm.web.pages import jobs as all_jobs
from embedfarm.web.pages import overview as farm
from embedfarm.web.pages.chart_drawing import Gallery
from embedfarm.web.services import Passes, Services
from embedfarm.web.tei import routes as tei_protocol

PROTOCOLS: Final = (
    bulk, jobs, submissions, estimate_routes, retries, results, nearest_chunks, failures, events,
    feeds, operations, advice_routes, timeline_routes, process_logs, metrics,
    openai_protocol, files, batches, tei_protocol,
)  # fmt: skip
PAGES: Final = (
    api_docs.router, submit.router, farm.router, all_jobs.router, job.router, download.router,
    search_page.router, failure_page.router, workers.router, log_page.router,
    scheduler.router, scheduler.steering, charts.router, sign_in.router,
    raise_limit.router, steer.router,
)  # fmt: skip

OTHER_THREADS: Final = 64  # for routes that wait for the server only: anyio has 40


def create_app(settings: Settings, keys: Sequence[Key], passes: Passes) -> FastAPI:
    """Make the application of a farm; it connects at the first request.

    Args:
        settings: The farm's settings: limits, and `redis_url`.
        keys: Keys of those who may ask; without any everybody may, so that it must be served on
            loopback only. Keys that come from `keys_file` change with that file.
        passes: The passes that the farm's scheduler can run.
    """
    client = connect(settings.redis_url, settings.http_waiting_max + OTHER_THREADS)
    rq = connect(settings.queue_url) if settings.queue_url else client
    services = Services(client, settings, passes, rq)
    path = settings.keys_file.expanduser() if keys and settings.keys_file else None
    keyring = Keyring(keys, path)
    sessions = Sessions(client, keyring, settings.http_session_seconds)
    interactive = InteractiveRequests(Lane(client, settings), settings.http_waiting_max)
    watch = JobWatch(partial(read_jobs, services.farm), settings.http_streams_max)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await watch.close()
        client.close()  # which also ends the threads that wait for workers
        rq.close()

    app = FastAPI(
        title="embedfarm",
        version=version("embedfarm"),
        lifespan=lifespan,
        exception_handlers=HANDLERS,
        generate_unique_id_function=lambda route: route.name,  # what generated clients call it
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        telemetry={"auto_configure": False},  # nothing reports home (docs/decisions.md, 21)
    )
    app.state.services = services
    app.state.interactive = interactive
    app.state.watch = watch
    app.state.keyring = keyring
    app.state.sessions = sessions
    app.state.readers = Readers()
    app.state.gallery = Gallery()
    app.state.figures = Figures(services.farm, settings)
    app.state.figures.waiting.set_function(interactive.waiting.total)
    for router in (*(each.router for each in PROTOCOLS), *PAGES):
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"))
    app.add_middleware(HeadRequests)
    app.add_middleware(Gate, keys=keyring, settings=settings, sessions=sessions)
    app.add_middleware(Meter, figures=app.state.figures)
    app.openapi = lambda: _describe(app, keyed=bool(keys))  # type: ignore[method-assign] # as FastAPI documents it
    return app


def _describe(app: FastAPI, *, keyed: bool) -> dict[str, Any]:
    """Return the OpenAPI document, with the errors as sent, and whether keys are needed.

    FastAPI describes the items of a stream in words that OpenAPI has from 3.2 on only.
    """
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = document["components"]
        components["schemas"] |= submissions.SCHEMAS | {"Problem": Problem.model_json_schema()}
        for unused in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(unused, None)
        for path, operations_ in document["paths"].items():
            for operation in operations_.values():
                if is_openai(path):
                    operation["responses"].pop("422", None)
                if not keyed and "security" in operation:
                    operation["security"] = [{}, *operation["security"]]
                for answer in operation["responses"].values():
                    for media in answer.get("content", {}).values():
                        media.pop("itemSchema", None)
        app.openapi_schema = document
    return app.openapi_schema
