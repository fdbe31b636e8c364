"""Tests of links that hang or are slow at the main command of each role: all roles go on."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

import httpx
import pytest

from embedfarm.contract.settings import Settings
from tests.farm.farm_of_all_roles import MODEL, WholeFarm, whole_farm
from tests.faults.proxy import Fault, Proxy
from tests.support import SERVERS, LiveServer, wait_until

MAIN: Final = {
    "worker": "commit",
    "scheduler": "publish",
    "producer": "push",
    "collector": "drain",
    "ingest": "BLMOVE",
    "web": "ask",
}
SECONDS_MAX: Final = 60.0


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy in front of a server."""
    place = tmp_path_factory.mktemp("half-open") / "server"
    server = LiveServer(place, SERVERS[0], Settings())
    try:
        server.start()
        with Proxy(server.private.socket) as proxy:
            yield proxy
    finally:
        server.stop()


@pytest.fixture(scope="module")
def farm(proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeFarm]:
    """All roles behind the proxy, in the same processes for all faults."""
    home = tmp_path_factory.mktemp("farm")
    limits = {"part_bytes_max": 32_000, "lease_seconds": 3.5, "ingest_lease_seconds": 6}
    with whole_farm(home, lambda _: proxy.url, **limits) as farm:
        yield farm


def ask(farm: WholeFarm) -> None:
    """Ask for vectors until they come, as clients do while the server is away."""

    def is_answered() -> bool:
        answer = farm.web.post("/v1/embeddings", json={"input": ["one"], "model": MODEL})
        busy = answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert answer.is_success or busy, answer.text
        return answer.is_success

    wait_until(is_answered, SECONDS_MAX)


def do_everything(farm: WholeFarm, name: str) -> None:
    """Embed a corpus from a terminal and one by HTTP, and send a request, all at once."""
    with ThreadPoolExecutor(3) as pool:
        embedding = pool.submit(farm.embed_corpus, name, 1000)
        others = pool.submit(farm.embed_by_http), pool.submit(ask, farm)
        for each in (embedding, *others):
            each.result()


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("stall", "reply"),
        ("delay", "request"),
        pytest.param("stall", "request", marks=pytest.mark.slow),
        pytest.param("delay", "reply", marks=pytest.mark.slow),
    ],
)
def test_every_role_goes_on(
    farm: WholeFarm,
    proxy: Proxy,
    what: Literal["stall", "delay"],
    where: Literal["request", "reply"],
) -> None:
    """Each role finishes its work after a fault, once and in its place, and the next work too."""
    fault, before = Fault(what, where), len(proxy.hits)
    for command in MAIN.values():
        proxy.aim(command, fault)
    do_everything(farm, f"{what}-{where}")
    for command in MAIN.values():
        proxy.wait_hit(command)
    struck = {command for command, hit in proxy.hits[before:] if hit == fault}
    assert struck == {*MAIN.values()}
    farm.embed_by_http()
    ask(farm)
