"""Tests that the example of docs/http.md runs, and that its routes are those of the server."""

import json
import re
import subprocess
from pathlib import Path
from typing import Final

import numpy as np
import redis
from fastapi.testclient import TestClient

from embedfarm.contract.farm_client import FarmClient
from tests.farm.harness import null_vectors, role
from tests.support import LiveServer, wait_until
from tests.web.conftest import client_of
from tests.web.test_gate import served

PAGE: Final = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
MODEL: Final = "null:16"


def test_the_example_of_a_feed(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """Texts go in, their vectors come out in order, and the feed is finished."""
    (example,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    with (
        role(server, tmp_path, "schedule"),
        role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"),
        served(server, models=json.dumps([MODEL])) as ((host, port), _),
    ):
        wait_until(FarmClient(client).workers)
        done = subprocess.run(
            ["/bin/bash", "-euc", f"FARM=http://{host}:{port}\n{example}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    texts = ["first", "second", "third"]
    taken = '{"next":2}{"next":3}'
    assert done.stdout.startswith(taken), done.stdout
    lines = [json.loads(line) for line in done.stdout.removeprefix(taken).splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line.get("id") for line in lines] == [None, None, "c"]
    vectors = np.array([line["embedding"] for line in lines], "<f4")
    np.testing.assert_array_equal(vectors, null_vectors(texts, 16))
    (feed,) = FarmClient(client).ended_ids(9)
    assert FarmClient(client).job(feed).status().state == "finished"


def test_the_routes_of_the_page(server: LiveServer, client: redis.Redis) -> None:
    """Each job and feed route of the page is in the API's document."""
    del client
    with client_of(server) as web:
        paths = set(_document(web))
    named = set(re.findall(r"(/v1/(?:jobs|feeds)[\w/{}]*)`", PAGE))
    assert len(named) > 5
    assert named <= paths


def _document(web: TestClient) -> list[str]:
    return list(web.get("/openapi.json").json()["paths"])
