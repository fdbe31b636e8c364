"""The manifests with secrets, and the server that they would start."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from embedfarm.contract.broker import carried_server
from tests.deploy.kustomize import Document, render
from tests.deploy.manifests import OVERLAYS, Overlays, containers, copy_with_secrets, variables
from tests.support import free_port, wait_until


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the manifests with secrets, which are chosen once."""
    home = copy_with_secrets(tmp_path_factory.mktemp("kubernetes"))
    again = subprocess.run([str(home / "secrets.sh")], check=False, stderr=subprocess.PIPE)
    assert (again.returncode, b"in use" in again.stderr) == (1, True)
    return home


@pytest.fixture(scope="session")
def overlays(home: Path) -> Overlays:
    """The documents of each overlay."""
    return {name: render(home / "overlays" / name) for name in OVERLAYS}


@pytest.fixture(scope="session")
def valkey(overlays: Overlays) -> tuple[Document, dict[str, str]]:
    """The server's container, and its variables."""
    found = overlays["cpu"]
    (container,) = [each for *_, each in containers({"cpu": found}) if each["name"] == "valkey"]
    return container, variables(found, container)


@pytest.fixture(scope="session")
def port(
    valkey: tuple[Document, dict[str, str]], home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The port of a server with the options of the StatefulSet."""
    container, _ = valkey
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/data", "/users"]
    users = home / "valkey" / "secrets" / "users.acl"
    places = {"/data": str(tmp_path_factory.mktemp("data")), "/users/users.acl": str(users)}
    words = [places.get(word, word) for word in container["args"]]
    port = free_port()
    command = [*carried_server(), *words, "--port", str(port), "--bind", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: _answers(port))
            yield port
        finally:
            server.terminate()


def _answers(port: int) -> bool:
    with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client:
        try:
            client.ping()
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False
    raise AssertionError("the server lets in whoever comes")
