"""Helpers that run the command line, look inside while it runs, and check what it left."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embedfarm.contract.broker import UNAVAILABLE, closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.status import JobGone
from embedfarm.workers.engines.null import NullEngine
from tests.farm.command_server import Copy
from tests.support import Reachable, wait_until

COMMAND = [sys.executable, "-c", "from embedfarm.cli import main; main()"]
SECONDS_MAX = 280.0


def run(
    *words: object,
    environment: dict[str, str] | None = None,
    stdin: bytes | None = None,
    seconds_max: float = SECONDS_MAX,
) -> subprocess.CompletedProcess[str]:
    """Run `embedfarm` to its end, and return its status and output."""
    command, variables = [*map(str, words)], os.environ | (environment or {})
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        if stdin is None:
            with Copy(command, variables, output, errors) as copy:
                try:
                    status = copy.wait(seconds_max)
                finally:
                    copy.kill()
        else:
            done = subprocess.run(
                [*COMMAND, *command],
                input=stdin,
                stdout=output,
                stderr=errors,
                timeout=seconds_max,
                check=False,
                env=variables,
            )
            status = done.returncode
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(
            command, status, output.read().decode(), errors.read().decode()
        )


def start_role(server: Reachable, home: Path, *words: str, **settings: str) -> Copy:
    """Start a long-running role."""
    environment = os.environ | {"EMBEDFARM_REDIS_URL": server.url, "HOME": str(home)}
    environment |= {f"EMBEDFARM_{name.upper()}": value for name, value in settings.items()}
    return Copy(words, environment)


@contextlib.contextmanager
def role(server: Reachable, home: Path, *words: str, **settings: str) -> Iterator[int]:
    """Run a long-running role, and yield its process id; SIGTERM must end it with status 0."""
    with start_role(server, home, *words, **settings) as process:
        try:
            yield process.pid
            process.terminate()
            assert process.wait(40) == 0
        finally:
            process.kill()


def write_corpus(path: Path, texts: Sequence[str], ids: Sequence[str] | None = None) -> Path:
    """Write a JSON Lines corpus, and return its path."""
    with path.open("w", encoding="utf-8") as file:
        for index, text in enumerate(texts):
            row = {"text": text} if ids is None else {"text": text, "id": ids[index]}
            file.write(json.dumps(row) + "\n")
    return path


def null_vectors(texts: Sequence[str], dimensions: int) -> NDArray[np.float32]:
    """Return the null engine's vectors of texts, shape (len(texts), dimensions)."""
    engine = NullEngine.open(JobSpec(model=f"null:{dimensions}"))
    return engine.forward(engine.tokenise(texts), np.arange(len(texts)))


def read_parquet(out: Path) -> tuple[list[int], NDArray[np.float32], list[str] | None]:
    """Return indices, vectors and ids of all parts, in the order of the files."""
    tables = [pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))]
    indices = [index for table in tables for index in table.column("index").to_pylist()]
    vectors = np.concatenate([np.stack(table.column("embedding").to_numpy()) for table in tables])
    if "id" not in tables[0].column_names:
        return indices, vectors, None
    return indices, vectors, [each for table in tables for each in table.column("id").to_pylist()]


def check_output(out: Path, texts: Sequence[str], dimensions: int) -> None:
    """Assert that each index is there once, in order, with the vector of its own text."""
    indices, vectors, _ = read_parquet(out)
    assert indices == list(range(len(texts)))
    np.testing.assert_array_equal(vectors, null_vectors(texts, dimensions))


class Embedding:
    """A running `embedfarm embed`, with its private farm."""

    def __init__(self, words: Sequence[object], out: Path, environment: dict[str, str]) -> None:
        self.out = out
        with (out.parent / "embed.log").open("ab") as log:
            command = ["embed", *map(str, words), "--out", str(out)]
            variables = os.environ | environment
            self.process: Copy | subprocess.Popen[bytes] = Copy(command, variables, log, log)

    def wait(self, seconds: float = SECONDS_MAX) -> int:
        """Wait for the end of the command, and return its exit status."""
        return self.process.wait(seconds)

    def log(self) -> str:
        """Return what the command has printed."""
        return (self.out.parent / "embed.log").read_text()

    def parts(self) -> int:
        """Return how many parts in Parquet its output has."""
        return len(list(self.out.glob("part-*.parquet")))

    def wait_for_parts(self, count: int) -> None:
        """Wait until its output has so many parts, or the command has come to its end before."""
        wait_until(lambda: self.parts() >= count or self.process.poll() is not None, 60)

    def kill(self) -> None:
        """End the command itself as a crash would; its children must notice by themselves."""
        self.process.kill()
        self.process.wait()

    def pids(self, role: str) -> list[int]:
        """Return the process ids of a role: "worker", "scheduler" or "server"."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if _role(words) == role:
                found.append(process.pid)
        return found

    def kill_one(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal one process of a role, as soon as there is one."""
        wait_until(lambda: self.pids(role), 30)
        os.kill(self.pids(role)[0], number)

    def chunks_done(self) -> int:
        """Return the chunks embedded so far, -1 while nobody can say."""
        socket = self.out / ".embedfarm" / "server" / "socket"
        try:
            with closing_client(f"unix://{socket.read_text()}") as client:
                farm = FarmClient(client)
                return farm.job(farm.job_ids()[0]).status().chunks_done
        except (*UNAVAILABLE, FileNotFoundError, JobGone, IndexError):
            return -1


def _role(words: Sequence[str]) -> str:
    if "embedfarm.workers.main" in words:
        return "worker"
    if "embedfarm.scheduler.main" in words:
        return "scheduler"
    program = words[0] if words else ""  # a server that runs writes its socket behind its name
    return "server" if re.search("(redis|valkey)-server", program) else ""


class Watch:
    """A thread that notes the longest time in which the number of embedded chunks stood still."""

    def __init__(self, embedding: Embedding) -> None:
        self.embedding = embedding
        self.gap_seconds_max = 0.0
        self.chunks_done = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        changed = time.monotonic()
        while not self._ended.wait(0.1):
            done = self.embedding.chunks_done()
            if done in {-1, self.chunks_done} and self.chunks_done:
                continue
            now = time.monotonic()
            if self.chunks_done:
                self.gap_seconds_max = max(self.gap_seconds_max, now - changed)
            self.chunks_done, changed = max(done, 0), now


def manifest(out: Path) -> dict[str, Any]:
    """Return the content of _manifest.json."""
    facts: dict[str, Any] = json.loads((out / "_manifest.json").read_text())
    return facts


def texts_of(count: int, seed: int = 0) -> Iterator[str]:
    """Yield distinct texts of mixed length."""
    generator = np.random.default_rng(seed)
    for index, size in enumerate(generator.lognormal(3, 1, count)):
        yield f"chunk {index} " + "word " * int(min(size, 300))
