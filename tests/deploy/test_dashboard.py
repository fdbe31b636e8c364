"""Tests of the dashboard, and of what scales workers, by a Prometheus that scrapes a farm."""

import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from tests.deploy.kustomize import Document, by_name
from tests.deploy.manifests import ROOT, Overlays, every
from tests.farm.farm_of_all_roles import MODEL, whole_farm
from tests.support import LiveServer, free_port, wait_until

DASHBOARD: Final = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text("utf-8"))
CONFIGURATION: Final = ROOT / "deploy" / "prometheus.yml"
IN_CLUSTER: Final = ROOT / "deploy" / "kubernetes" / "prometheus.yml"
SLOW: Final = f"{MODEL}:10000"
SCRAPE: Final = "500ms"
INTERVAL: Final = "5s"
EMPTY: Final = {"GPUs: utilisation"}  # on a farm without GPUs


def program(name: str) -> str:
    """Return the path of a program of Prometheus."""
    found = shutil.which(name)
    assert found, f"{name} is missing: Debian's package prometheus has it"
    return found


def queries() -> dict[tuple[str, str], str]:
    """Return the queries of the dashboard, by the title of the panel and the letter there."""
    return {
        (panel["title"], target["refId"]): target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }


@contextlib.contextmanager
def prometheus(home: Path, target: httpx.URL) -> Iterator[httpx.Client]:
    """Run Prometheus with the configuration of `deploy`, which scrapes more often than usual."""
    configuration = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
    (job,) = configuration["scrape_configs"]
    configuration["global"]["scrape_interval"] = SCRAPE
    configuration["rule_files"] = [str(CONFIGURATION.parent / "alerts.yaml")]
    job["static_configs"] = [{"targets": [f"{target.host}:{target.port}"]}]
    job["authorization"]["credentials_file"] = str(home / "key")
    (home / "key").write_text("any", encoding="utf-8")  # on loopback there are no keys
    (home / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    port = free_port()
    command = [
        program("prometheus"),
        f"--config.file={home / 'prometheus.yml'}",
        f"--storage.tsdb.path={home / 'series'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        (home / "prometheus.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        try:
            wait_until(lambda: process.poll() is not None or _is_ready(client))
            assert process.poll() is None, (home / "prometheus.log").read_text()
            yield client
        finally:
            process.kill()


def _is_ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/-/ready").is_success
    return False


def ask(client: httpx.Client, query: str) -> list[Any]:
    """Return the values of a query now."""
    text = query.replace("$__rate_interval", INTERVAL)
    answer = client.get("/api/v1/query", params={"query": text})
    assert answer.is_success, (query, answer.text)
    return list(answer.json()["data"]["result"])


@pytest.mark.system
@pytest.mark.timeout(120)
def test_every_query_has_an_answer(server: LiveServer, tmp_path: Path, overlays: Overlays) -> None:
    """Each panel shows something of a farm at work, and KEDA gets one number from each query."""
    left = {place: query for place, query in queries().items() if place[0] not in EMPTY}

    def look(client: httpx.Client) -> bool:
        for place, query in list(left.items()):
            if ask(client, query):
                del left[place]
        return not left

    with whole_farm(tmp_path, lambda _: server.url) as farm, ThreadPoolExecutor(1) as pool:
        farm.embed_by_http()  # a job that has ended
        assert farm.web.get("/v1/jobs/none").status_code == 404
        with prometheus(tmp_path, farm.web.base_url) as client:
            embedding = pool.submit(farm.embed_corpus, "slow", 1200, SLOW)
            with contextlib.suppress(TimeoutError):
                wait_until(partial(look, client))
            assert not left
            for _, each in every(overlays, "ScaledObject"):
                for trigger in each["spec"]["triggers"]:
                    (found,) = ask(client, trigger["metadata"]["query"])
                    assert math.isfinite(float(found["value"][1]))
            for name in EMPTY:
                assert not ask(client, queries()[name, "A"])
        embedding.result()


def test_panels_are_in_order() -> None:
    """Panels have titles and places of their own, say what they show, and do not overlap."""
    panels = DASHBOARD["panels"]
    for fact in ("title", "id"):
        assert len({panel[fact] for panel in panels}) == len(panels)
    assert all(panel["description"].endswith(".") for panel in panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert x + w <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
        assert panel["targets"]
    assert {panel["title"] for panel in panels} >= EMPTY


def pods_wanted(scaled: Document, value: float) -> int:
    """Return how many pods KEDA and the autoscaler start for the value of the first trigger."""
    spec = scaled["spec"]
    threshold = float(spec["triggers"][0]["metadata"]["threshold"])
    # Without an `activationThreshold` more than 0 starts the first one.
    least, most = int(spec["minReplicaCount"]), int(spec["maxReplicaCount"])
    return max(least, min(most, math.ceil(value / threshold))) if value > 0 else least


# Recorded minute by minute: nobody has asked for anything, work comes, most is done, it is done.
ADVISED: Final = "_x9 1x4 {many}x9 {few}x14 0x20"


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "advised", "pods"),
    [("l4", (5, 2), (0, 1, 5, 2, 0)), ("h100", (12, 7), (0, 1, 2, 1, 0))],
    ids=["l4", "h100"],
)
def test_workers_come_and_go_with_the_backlog(
    overlays: Overlays, tmp_path: Path, kind: str, advised: tuple[int, int], pods: tuple[int, ...]
) -> None:
    """A recorded backlog starts as many pods as their workers are advised, and ends them again."""
    (scaled,) = [
        each
        for _, each in every(overlays, "ScaledObject")
        if each["metadata"]["name"] == f"worker-{kind}"
    ]
    trigger = scaled["spec"]["triggers"][0]
    many, few = advised
    values = (0.0, 1.0, float(many), float(few), 0.0)
    recorded = ADVISED.format(many=many - 1, few=few)
    series = {
        "embedfarm_server_up": "1x60",
        # The sum over models counts, and what one replica of `serve` says, not both.
        f'embedfarm_workers_advised{{kind="{kind}", model="a", instance="1"}}': recorded,
        f'embedfarm_workers_advised{{kind="{kind}", model="a", instance="2"}}': recorded,
        f'embedfarm_workers_advised{{kind="{kind}", model="b"}}': "_x14 1x9 0x35",
        'embedfarm_workers_advised{kind="other", model="a"}': "99x60",
    }
    test = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": told} for name, told in series.items()],
                "promql_expr_test": [
                    {
                        "expr": trigger["metadata"]["query"],
                        "eval_time": f"{minute}m",
                        "exp_samples": [{"labels": "{}", "value": value}],
                    }
                    for minute, value in zip((5, 12, 20, 30, 50), values, strict=True)
                ],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test), encoding="utf-8")
    command = [program("promtool"), "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tuple(pods_wanted(scaled, value) for value in values) == pods


@pytest.mark.system
@pytest.mark.parametrize("path", [CONFIGURATION, IN_CLUSTER], ids=["deploy", "kubernetes"])
def test_prometheus_takes_its_configuration(tmp_path: Path, path: Path) -> None:
    """Prometheus' own tool takes the configuration, once the file of the key is there."""
    key = tmp_path / "key"
    key.touch()
    text = path.read_text(encoding="utf-8")
    text = text.replace("/etc/prometheus/embedfarm.key", str(key))
    shutil.copy(CONFIGURATION.parent / "alerts.yaml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(text, encoding="utf-8")
    command = [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(key) in text


def test_prometheus_finds_the_replicas(overlays: Overlays) -> None:
    """The name that Prometheus in the cluster asks for is that of a service without an address."""
    (job,) = yaml.safe_load(IN_CLUSTER.read_text(encoding="utf-8"))["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    name, namespace, *_ = found["names"][0].split(".")
    for documents in overlays.values():
        spec = by_name(documents)["Service", name]["spec"]
        assert spec["clusterIP"] == "None"
        assert [port["port"] for port in spec["ports"]] == [found["port"]]
        assert by_name(documents)["Namespace", namespace]
