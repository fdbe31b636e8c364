"""Tests of data sets on the Hugging Face Hub as a corpus, with a hub of a few routes here."""

import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
COMMIT = "a" * 40


def parquet(first: int) -> bytes:
    """Return a file of the data set."""
    file = io.BytesIO()
    rows = range(first, first + 100)
    pq.write_table(pa.table({"text": [f"text {n}" for n in rows], "n": rows}), file)
    return file.getvalue()


FILES = {f"data/train-{n}.parquet": parquet(100 * n) for n in range(2)} | {"README.md": b"hello"}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers what the hub's client asks for a data set of `FILES`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Keep what was asked to itself."""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with a file or a part of it, a list of files, or the facts of the data set."""
        path = urlsplit(self.path).path
        if "/resolve/" in path:
            self._send_file(path.partition("/resolve/")[2].partition("/")[2])
        elif "/tree/" in path:
            self._send_json(list(_list(path.partition("/tree/")[2].partition("/")[2])))
        else:
            names = [{"rfilename": name} for name in FILES]
            self._send_json({"id": "me/set", "sha": COMMIT, "siblings": names})

    def _send_file(self, name: str) -> None:
        data, headers = FILES[name], {"ETag": f'"{_digest(name)}"', "X-Repo-Commit": COMMIT}
        first, last = 0, len(data) - 1
        if asked := self.headers.get("Range", "").removeprefix("bytes="):
            first = int(asked.partition("-")[0])
            last = min(int(asked.partition("-")[2] or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._send(206 if asked else 200, data[first : last + 1], headers)

    def _send_json(self, value: Any) -> None:  # noqa: ANN401 # what JSON can say
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(name: str) -> str:
    return hashlib.sha1(FILES[name], usedforsecurity=False).hexdigest()


def _list(directory: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of a directory."""
    for name in FILES:
        parent = str(Path(name).parent).removeprefix(".")
        if parent == directory:
            size = len(FILES[name])
            yield {"type": "file", "path": name, "size": size, "oid": _digest(name)}
        elif not directory and name == "data/train-0.parquet":
            yield {"type": "directory", "path": parent, "oid": "0" * 40}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Run a hub, and give the environment of a program that uses it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    server.shutdown()
    thread.join()
    server.server_close()


CODE = """
import json, sys
from collections import deque
from embedfarm.readers import *
from embedfarm.readers.kept_columns import find_columns
columns, sources, options = deque(), sys.argv[1:], CorpusOptions(keep=("n",))
texts = [
    text
    for rows in read_corpus(sources, options, fail_on_bad_row, columns=columns)
    for text in rows.texts
]
kept = [n for batch in columns for n in batch.column("n").to_pylist()]
names = find_columns(sources, options).names
print(json.dumps([texts, kept, names, look_at(sources, options)]))
"""


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("hf://datasets/me/set/data/train-*.parquet", 0),
        ("hf://datasets/me/set/data", 0),
        ("hf://datasets/me/set/data/train-1.parquet", 100),
    ],
)
def test_a_data_set_of_the_hub(environment: dict[str, str], source: str, first: int) -> None:
    """Files, globs and directories of a data set are a corpus, which says when it has changed."""
    command = [sys.executable, "-c", CODE, source]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    texts, kept, names, (digest, settled) = json.loads(done.stdout)
    assert texts == [f"text {n}" for n in range(first, 200)]
    assert (kept, names) == (list(range(first, 200)), ["n"])
    assert len(digest) == 64
    assert settled
