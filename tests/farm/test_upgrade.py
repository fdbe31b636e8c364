"""Tests of an upgrade while a job runs: the last release and this one on one job, both ways."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from tests.farm.harness import check_output, texts_of, write_corpus
from tests.farm.release import unpack_release
from tests.farm.service import Service
from tests.support import LiveServer, wait_until

DIMENSIONS: Final = 16
MODEL: Final = f"null:{DIMENSIONS}:10000"  # tokens a second
SHORT, LONG = 1000, 3000  # chunks of a job in which nobody is replaced, and of one with them
INTERRUPTED: Final = 130
PROGRAM: Final = (sys.executable, "-P", "-m", "embedfarm")  # -P: as PYTHONPATH has it

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The last release, unpacked."""
    return unpack_release(tmp_path_factory.mktemp("release"))


class Upgrade:
    """Roles of both versions on one server, and one job for them."""

    def __init__(self, server: LiveServer, client: redis.Redis, folder: Path, chunks: int) -> None:
        self.server = server
        self.farm = FarmClient(client)
        self.folder = folder
        self.texts = list(texts_of(chunks))
        self.corpus = write_corpus(folder / "corpus.jsonl", self.texts)
        self.out = folder / "out"

    def role(self, version: dict[str, str], *words: str) -> Service:
        """Return a role of a version; {} is this one."""
        service = Service([*PROGRAM, *words], self.server, state_directory=self.folder / "state")
        service.environment |= version
        return service

    def workers(self, version: dict[str, str]) -> Service:
        """Return `embedfarm work` of a version, with one worker."""
        return self.role(version, "work", "--devices", "cpu", "--workers", "1")

    def scheduler(self, version: dict[str, str]) -> Service:
        """Return a scheduler of a version."""
        return self.role(version, "schedule")

    def command(self, version: dict[str, str]) -> Service:
        """Return `embedfarm embed` of a version."""
        words = ["embed", str(self.corpus), "--out", str(self.out), "--model", MODEL]
        return self.role(version, *words)

    def chunks_done(self) -> int:
        """Return how many chunks of the one job are done."""
        return sum(status.chunks_done for status in self.farm.statuses().values())

    def await_progress(self) -> None:
        """Wait until workers have embedded more than they had, and see that some is left."""
        before = self.chunks_done()
        wait_until(lambda: self.chunks_done() > before, 60)
        assert self.chunks_done() < len(self.texts), "the job is too short for this machine"

    def replace(self, old: Service, new: Service, status: int = 0) -> None:
        """Stop a role, start the other version's in its place, and see that the job goes on."""
        old.ask_to_stop()
        assert old.wait() == status
        new.start()
        self.await_progress()

    def check(self) -> None:
        """Assert that each chunk is there once, with its vector, and that nothing has failed."""
        check_output(self.out, self.texts, DIMENSIONS)
        ended = [self.farm.job(job).status() for job in self.farm.ended_ids(9)]
        assert [(job.chunks_done, job.chunks_failed) for job in ended] == [(len(self.texts), 0)]


@pytest.mark.parametrize("older", ["workers", "scheduler and command"])
def test_two_versions_do_one_job(
    older: str, server: LiveServer, client: redis.Redis, tmp_path: Path, release: dict[str, str]
) -> None:
    """Workers of one version do the job of another one's command by another one's scheduler."""
    upgrade = Upgrade(server, client, tmp_path, SHORT)
    this: dict[str, str] = {}
    theirs, ours = (release, this) if older == "workers" else (this, release)
    with upgrade.workers(theirs), upgrade.scheduler(ours), upgrade.command(ours) as command:
        assert command.wait(120) == 0
    upgrade.check()


@pytest.mark.parametrize(
    "back", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["upgrade", "back"]
)
def test_roles_are_replaced_in_mid_job(
    *,
    back: bool,
    server: LiveServer,
    client: redis.Redis,
    tmp_path: Path,
    release: dict[str, str],
) -> None:
    """A job goes on over a change of its workers, then the scheduler, then the command itself."""
    upgrade = Upgrade(server, client, tmp_path, LONG)
    old, new = ({}, release) if back else (release, {})
    roles = (upgrade.workers, upgrade.scheduler, upgrade.command)
    with ExitStack() as stack:
        first = [stack.enter_context(role(old)) for role in roles]
        then = [role(new) for role in roles]
        for service in then:
            stack.push(service.__exit__)
        upgrade.await_progress()
        statuses = (0, 0, INTERRUPTED)
        order = list(zip(first, then, statuses, strict=True))
        for before, after, status in reversed(order) if back else order:
            upgrade.replace(before, after, status)
        assert then[-1].wait(120) == 0
    upgrade.check()
