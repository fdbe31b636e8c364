"""Exports as commands that are killed, into stores that are restarted meanwhile."""

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedfarm.collector.store_journal import StoreJournal
from embedfarm.collector.stores.address import parse_address
from tests.stores.contents import assert_contents, vectors_of, write_output
from tests.stores.servers import MilvusServer, PostgresServer
from tests.support import wait_until

SERVERS: dict[str, type[PostgresServer | MilvusServer]] = {
    "postgresql": PostgresServer,
    "milvus": MilvusServer,
}
KINDS = ("postgresql", "milvus", "qdrant", "lancedb")  # the last two are in the command's process
CHANGED = 20  # one in so many rows
GONE = 50


class Bar:
    """One output and one collection, and commands that are killed between the two.

    Args:
        home: Directory for everything.
        kind: Kind of the store.
        count: Number of rows.
        dimensions: Components of a vector.
    """

    def __init__(self, home: Path, kind: str, count: int, dimensions: int) -> None:
        self.home, self.kind, self.dimensions = home, kind, dimensions
        self.texts = {f"id {n}": f"text {n}" for n in range(count)}
        self.generator = random.Random(count)
        self.server = SERVERS[kind](home) if kind in SERVERS else None
        place = self.server.url if self.server else f"{kind}://{home / 'store.db'}"
        self.url = f"{place}#documents"

    def write(self, name: str, before: Path | None = None) -> Path:
        """Write an output of the texts, in fifty parts."""
        matrix = vectors_of(list(self.texts.values()), self.dimensions)
        per_result = min(200, len(self.texts) // 250)
        return write_output(
            self.home / name, self.texts, before=before, matrix=matrix, per_result=per_result
        )

    def change(self) -> int:
        """Change the texts and their order; return the number of rows that are others now."""
        names = [name for n, name in enumerate(self.texts) if n % GONE != 1]
        self.generator.shuffle(names)
        changed = {name for name in names if int(name[3:]) % CHANGED == 0}
        self.texts = {
            name: f"other {name}" if name in changed else self.texts[name] for name in names
        }
        return len(changed)

    @contextlib.contextmanager
    def command(self, out: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run an export as a process."""
        words = ["export", str(out), "--to", self.url, "--others", "delete", "--json"]
        command = [sys.executable, "-W", "ignore", "-m", "embedfarm", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                yield process
            finally:
                process.kill()

    def kill(self, out: Path, *, restart: bool) -> None:
        """Kill an export some time after it has sent a part; before that, restart its server."""
        before = self.confirmed(out)
        with self.command(out) as process:
            wait_until(lambda: self.confirmed(out) > before or process.poll() is not None, 120)
            threading.Event().wait(self.generator.random() * len(self.texts) / 500_000)
            assert process.poll() is None, "it was at its end before it could be killed"
            if restart and self.server is not None:
                self.server.kill()
                threading.Event().wait(0.5)
                self.server.start()
            process.kill()

    def confirmed(self, out: Path) -> int:
        """Return the number of parts that the store has confirmed."""
        return len(StoreJournal.of(out, parse_address(self.url)).parts)

    def finish(self, out: Path) -> dict[str, int]:
        """Export to the end, and return what the command says."""
        with self.command(out) as process:
            said, errors = process.communicate(timeout=250)
            assert process.returncode == 0, errors.decode()
        report: dict[str, int] = json.loads(said)
        return report

    def check(self) -> None:
        """Assert that the collection has the rows and no others."""
        names = list(self.texts)
        rows = vectors_of(list(self.texts.values()), self.dimensions)
        assert_contents(self.url, dict(zip(names, rows, strict=True)), 1e-6)


def through_kills(bar: Bar, kills: int, restarts: int) -> None:
    """Export an output through kills and restarts, and a new version of it; compare all rows."""
    with bar.server or contextlib.nullcontext():
        first, count = bar.write("first"), len(bar.texts)
        began = time.monotonic()
        for number in range(kills):
            restart = number * restarts // kills != (number + 1) * restarts // kills
            bar.kill(first, restart=restart)
        left = bar.finish(first)
        assert left["rows"] == len(bar.texts)
        assert 0 < left["sent"] < len(bar.texts)
        seconds = time.monotonic() - began
        bar.check()
        changed = bar.change()
        second = bar.write("second", before=first)
        report = bar.finish(second)
        assert report["sent"] == changed
        assert report["rows"] == len(bar.texts)
        bar.check()
    sys.stdout.write(
        f"{bar.kind}: {count:,} rows of {bar.dimensions} dimensions, {kills} kills and "
        f"{restarts if bar.server else 0} restarts in {seconds:.0f} s; {changed:,} rows updated\n"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_export(tmp_path: Path, kind: str) -> None:
    """Two kills, one of them with a restart of the store, cost no row and double none."""
    through_kills(Bar(tmp_path, kind, 2000, 16), kills=2, restarts=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_kills(tmp_path: Path, kind: str) -> None:
    """Ten kills and two restarts during 50,000 vectors cost no row and double none."""
    through_kills(Bar(tmp_path, kind, 50_000, 384), kills=10, restarts=2)
