"""Test of a primary that dies, and of the replica that sentinels put in its place."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from embedfarm.contract.broker import UNAVAILABLE, closing_client
from embedfarm.contract.farm_client import FarmClient
from tests.farm.farm_of_all_roles import whole_farm
from tests.farm.harness import COMMAND, check_output, texts_of, write_corpus
from tests.farm.sentinel_ring import Ring
from tests.support import SERVERS, wait_until


@pytest.fixture(params=SERVERS)
def ring(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ring]:
    """Start a ring."""
    (tmp_path / "ring").mkdir()
    ring = Ring(tmp_path / "ring", request.param)
    with ring.running():
        yield ring


def test_the_primary_dies_in_the_middle_of_a_job(ring: Ring, tmp_path: Path) -> None:
    """A job ends complete on the replica, and so do a job by HTTP and a request afterwards."""
    texts = list(texts_of(4000))
    corpus, out = write_corpus(tmp_path / "corpus.jsonl", texts), tmp_path / "out"
    with whole_farm(tmp_path, ring.url) as farm, closing_client(ring.url("admin")) as client:
        words = [*COMMAND, "embed", str(corpus), "--out", str(out), "--model", "null:16:20000"]
        variables = farm.variables("submitter") | {"EMBEDFARM_PART_BYTES_MAX": "64000"}
        with subprocess.Popen(words, env=variables, stderr=subprocess.PIPE) as embedding:
            wait_until(lambda: _chunks_done(client) > 500, 60)
            ring.servers[0].kill()
            _, said = embedding.communicate(timeout=120)
        assert embedding.returncode == 0, said.decode()
        check_output(out, texts, 16)
        farm.embed_by_http()
        farm.ask()


def _chunks_done(client: redis.Redis) -> int:
    with contextlib.suppress(*UNAVAILABLE):
        return sum(status.chunks_done for status in FarmClient(client).statuses().values())
    return 0
