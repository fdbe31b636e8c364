"""Tests of jobs by HTTP that fill a vector store: who may name which, and that no key is shown."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from fastapi.testclient import TestClient

from embedfarm.contract.settings import NamedStore, Settings
from embedfarm.ingest.job_directories import read_call
from embedfarm.web.auth.keys import make_key
from tests.support import LiveServer
from tests.web.conftest import client_of
from tests.web.test_gate import bearer

URL: Final = "postgresql://farm:hunter2@db.example/search#documents"
BROWSER: Final = {"accept": "text/html"}
STORES: Final = {
    "ours": NamedStore.model_validate({"url": URL}),
    "shop": NamedStore.model_validate({"url": URL, "tenants": ["shop"]}),
    "all": NamedStore.model_validate({"url": URL, "tenants": ["*"]}),
}
ASKED: Final = {"texts": ["a"], "others": "keep"}


@pytest.fixture
def web(server: LiveServer, tmp_path: Path) -> Iterator[tuple[TestClient, dict[str, str]]]:
    """An application with three stores, and the secret of a key for each tenant and an operator."""
    made = {
        name: make_key(name, ["submit", "read"], None if name == "operator" else name)
        for name in ("operator", "shop", "mail")
    }
    keys = [key for _, key in made.values()]
    with client_of(
        server, keys, jobs_directory=tmp_path / "jobs", models=("null:4",), stores=STORES
    ) as web:
        yield web, {name: secret for name, (secret, _) in made.items()}


@pytest.mark.parametrize(
    ("who", "may"), [("operator", "ours shop all"), ("shop", "shop all"), ("mail", "all")]
)
def test_a_key_names_the_stores_of_its_tenant(
    web: tuple[TestClient, dict[str, str]], tmp_path: Path, who: str, may: str
) -> None:
    """A store of others is refused as one that does not exist, and the form does not offer it."""
    client, secrets = web
    headers = bearer(secrets[who])
    form = client.get("/jobs/new", headers=headers | BROWSER).text
    for name in (*STORES, "none", URL):
        made = client.post("/v1/jobs", headers=headers, json=ASKED | {"to": name})
        if name in may.split():
            assert made.status_code == 201, made.text
            call = read_call(tmp_path / "jobs" / made.json()["job"])
            assert call is not None
            assert (call.options["to"], call.options["others"]) == (name, "keep")
            page = client.get(f"/jobs/{made.json()['job']}", headers=headers | BROWSER).text
            assert f"--to={name}" in page
            assert "db.example" not in page + made.text
        else:
            assert made.status_code == 422
            assert made.json()["detail"].startswith("to: there is no store")
            assert "hunter2" not in made.text
        assert (f"<option>{name}</option>" in form) is (name in may.split())


def test_urls_of_stores_are_for_children_only() -> None:
    """Settings print no URL of a store, and give it to a child process."""
    settings = Settings(stores={"search": {"url": URL}})  # type: ignore[dict-item] # pydantic makes it
    assert "hunter2" not in settings.model_dump_json() + repr(settings) + str(settings)
    assert URL in settings.environment()["EMBEDFARM_STORES"]
