"""Applications on a real server for tests that ask without sockets, and keys."""

from collections.abc import Iterator, Sequence
from typing import Final

import pytest
import redis
from fastapi.testclient import TestClient
from starlette.routing import BaseRoute

from embedfarm.contract.settings import Settings
from embedfarm.scheduler.policies import DEFAULT_POLICY, POLICIES, check_policy, pass_names
from embedfarm.web.app import create_app
from embedfarm.web.auth.keys import Key, Scope, make_key
from embedfarm.web.services import Passes
from tests.support import LiveServer

# Those of the first application, which all have alike: FastAPI prepares them at the first requests.
_ROUTES: Final[list[BaseRoute]] = []


def client_of(server: LiveServer, keys: Sequence[Key] = (), **settings: object) -> TestClient:
    """A client of an application with some other settings; a `with` block runs the application."""
    chosen = Settings().model_copy(update={"redis_url": server.url, **settings})
    passes = Passes(
        pass_names(), POLICIES[DEFAULT_POLICY], lambda names: check_policy(names, chosen)
    )
    app = create_app(chosen, keys, passes)
    _ROUTES[:] = _ROUTES or app.router.routes[1:]  # behind that of its own document
    app.router.routes[1:] = _ROUTES
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture
def web(server: LiveServer, client: redis.Redis) -> Iterator[TestClient]:
    """An application without keys."""
    del client
    with client_of(server) as web:
        yield web


@pytest.fixture
def keys() -> dict[str, tuple[str, Key]]:
    """A secret and its key for each scope."""
    return {scope: make_key(f"k-{scope}", [scope]) for scope in Scope}
