"""Test that what scales workers on Kubernetes gets the advice of a farm, by way of Prometheus."""

from functools import partial
from pathlib import Path

import httpx
import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from tests.contract.little_job import embed
from tests.deploy.manifests import Overlays, every
from tests.deploy.test_dashboard import ask, prometheus
from tests.support import LiveServer, wait_until
from tests.web.test_advice_figures import backlog, remember
from tests.web.test_gate import served

KIND = "l4"  # as the manifests name it by EMBEDFARM_DEVICE_KIND


@pytest.mark.system
def test_keda_gets_the_advice_for_a_recorded_backlog(
    server: LiveServer, client: redis.Redis, tmp_path: Path, overlays: Overlays
) -> None:
    """The number that KEDA asks for goes from none up with a backlog, and to none again."""
    farm = FarmClient(client)
    (query,) = {
        each["spec"]["triggers"][0]["metadata"]["query"]
        for _, each in every(overlays, "ScaledObject")
        if each["metadata"]["name"] == "worker-l4"
    }
    remember(farm, "gone:cuda-0", KIND)
    with served(server) as ((host, port), _):
        url = httpx.URL(f"http://{host}:{port}")
        with prometheus(tmp_path, url) as asked:

            def gets(count: int) -> bool:
                """Tell whether KEDA gets that number of workers."""
                return [float(each["value"][1]) for each in ask(asked, query)] == [count]

            wait_until(partial(gets, 0))
            job = backlog(farm, 1)
            wait_until(partial(gets, 1))
            backlog(farm, 9, "more")
            advised = httpx.get(url.join("/v1/advice"), params={"kind": KIND}).json()
            assert advised["workers_advised"] > 1
            wait_until(partial(gets, advised["workers_advised"]))
            farm.job("more").cancel()
            wait_until(partial(gets, 1))
            job.stream.commit([embed(entry) for entry in job.stream.read("gone:cuda-0", 1)])
            wait_until(partial(gets, 0))
