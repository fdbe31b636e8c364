"""Tests that all doors show the same devices' time and the same cost of a job."""

import io
import json

import msgspec
import redis
from fastapi.testclient import TestClient
from rich.console import Console

from embedfarm.cli.progress import View
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.outlook import OutlookReader
from embedfarm.contract.settings import Settings
from tests.contract.little_job import embed, make_job
from tests.farm.harness import run
from tests.support import LiveServer

BROWSER = {"accept": "text/html"}
HOURS, COST = 1.5, 12.34


def spend(client: redis.Redis) -> None:
    """Let two workers of two prices embed half of a job."""
    job = make_job(client, 4)
    for worker, seconds, cost in (("cheap", 3600, 2.34), ("dear", 1800, 10.0)):
        entry, result = embed(job.stream.read(worker, 1)[0])
        said = msgspec.structs.replace(result, worker=worker, seconds=seconds, cost=cost)
        assert job.stream.commit([(entry, said)]) == ["committed"]


def test_all_doors_show_the_same(web: TestClient, server: LiveServer, client: redis.Redis) -> None:
    """HTTP, both pages, the command line's list and its progress say the same, also at the end."""
    spend(client)
    farm = FarmClient(client)
    lines = io.StringIO()
    view = View(Console(file=lines, width=200), lines=True)
    view.show(farm.job("little").status(), farm.workers(), OutlookReader(farm, "little"))
    assert "1 h 30 min of devices' time, cost 12.34" in lines.getvalue()
    for ended in (False, True):
        if ended:
            farm.end("little", "failed", "", Settings())
        shown = web.get("/v1/jobs/little").json()
        assert (shown["device_hours"], shown["cost"]) == (HOURS, COST)
        told = json.loads(run("jobs", "show", "little", "--redis", server.url, "--json").stdout)
        assert (told["device_hours"], told["cost"]) == (HOURS, COST)
        words = ["--ended"] if ended else []
        (row,) = run("jobs", "ls", *words, "--redis", server.url).stdout.splitlines()[1:]
        assert row.split()[-1] == "12.34"
        page = web.get("/jobs/little", headers=BROWSER).text
        assert "1 h 30 min" in page
        assert "cost 12.34" in page
        assert "cost 12.34" in web.get("/jobs", headers=BROWSER).text


def test_without_a_price_there_is_no_cost(web: TestClient, client: redis.Redis) -> None:
    """Where nobody has set a price, devices' time is shown, and that there is no price."""
    job = make_job(client, 2)
    entry, result = embed(job.stream.read("one", 1)[0])
    result.seconds = 36.0
    job.stream.commit([(entry, result)])
    page = web.get("/jobs/little", headers=BROWSER).text
    assert "36 s" in page
    assert "no price of it is set" in page
    assert "cost" not in web.get("/jobs", headers=BROWSER).text
