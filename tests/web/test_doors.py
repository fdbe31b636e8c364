"""Tests that every door says the same of a farm, whatever has happened to it."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import redis

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.status import OVER_STATES
from tests.farm.harness import COMMAND
from tests.support import LiveServer, wait_until
from tests.web.conftest import client_of
from tests.web.doors import Doors, Seen, Sums

FAST: Final = "null:8:200000"
SLOW: Final = "null:8:2000"
LONG: Final = "a text that fails " * 20
ROLES: Final = {
    "worker": [sys.executable, "-m", "tests.web.frail_worker", "--device", "cpu-0"],
    "ingest": [*COMMAND, "ingest", "--workers", "3"],
    "scheduler": [*COMMAND, "schedule"],
}
SETTINGS: Final = {
    "heartbeat_seconds": 0.2,
    "heartbeat_ttl_seconds": 1.5,
    "lease_seconds": 1.5,
    "ingest_lease_seconds": 3,
    "cancelled_jobs_seconds": 0.5,
    "reconnect_seconds_max": 60,
}
STEPS: Final = 8
SETTLE_SECONDS: Final = 1.0
HISTORIES: Final = 200
COMPARED_MIN: Final = 40  # doors and jobs that stood still while they were asked, in a history


def agree(shown: Seen | Sums, truth: Seen | Sums) -> bool:
    """Tell whether all that a door shows is as it is."""
    known = truth._asdict()
    return all(value in {None, known[name]} for name, value in shown._asdict().items())


class History:
    """A farm to which things happen, and what its doors say meanwhile."""

    def __init__(self, server: LiveServer, home: Path, doors: Doors) -> None:
        self.server = server
        self.home = home
        self.doors = doors
        self.random = random.Random()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.compared = 0

    def start(self, name: str) -> None:
        """Start a role."""
        own = SETTINGS | {"redis_url": self.server.url, "jobs_directory": self.home / "jobs"}
        own |= {"state_directory": self.home / "state"}
        environment = {f"EMBEDFARM_{key.upper()}": str(value) for key, value in own.items()}
        self.processes[name] = subprocess.Popen(
            ROLES[name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | environment,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run all roles for the time of the block."""
        try:
            for name in ROLES:
                self.start(name)
            yield
        finally:
            for process in self.processes.values():
                process.terminate()
            for process in self.processes.values():
                process.wait(40)

    # What happens.

    def submit(self) -> None:
        """Ask for a job by HTTP: some texts fail, some rows are bad."""
        some = self.random
        texts = [f"text {number}" for number in range(some.choice([1, 9, 80, 600]))]
        rows = [json.dumps({"text": text}) for text in texts]
        for _ in range(some.choice([0, 0, 2])):
            rows.insert(some.randrange(len(rows) + 1), json.dumps({"text": LONG}))
        bad = some.choice([0, 0, 0, 3])
        for _ in range(bad):
            rows.insert(some.randrange(len(rows) + 1), '{"text": 1}')
        params = {
            "model": some.choice([FAST, SLOW]),
            "name": some.choice(["", "a name"]),
            "on_bad_row": some.choice(["skip", "skip", "fail"]),
        }
        answer = self.doors.web.post(
            "/v1/jobs",
            params=params,
            content="\n".join(rows).encode(),
            headers={"content-type": "application/jsonl"},
        )
        assert answer.status_code == 201, answer.text

    def steer(self) -> None:
        """Do something to a job, which it may allow or not."""
        if jobs := sorted(self.doors.truth()):
            job = self.random.choice(jobs)
            verb = self.random.choice(["pause", "resume", "cancel", "retry", "delete"])
            if verb == "delete":
                answer = self.doors.web.delete(f"/v1/jobs/{job}")
            else:
                answer = self.doors.web.post(f"/v1/jobs/{job}/{verb}")
            assert answer.status_code in {200, 202, 204, 404, 409}, answer.text

    def kill(self) -> None:
        """Kill a role; another one takes its place."""
        name = self.random.choice(list(ROLES))
        self.processes[name].kill()
        self.processes[name].wait()
        self.start(name)

    def restart_server(self) -> None:
        """Kill the server, and start it again on its log."""
        self.server.kill()
        self.server.start()
        wait_until(self._answers, 30)

    def _answers(self) -> bool:
        try:
            return bool(self.doors.farm.client.ping())
        except UNAVAILABLE:
            return False

    def wait(self) -> None:
        """Let something end, if anything may."""
        before = self._over()
        with contextlib.suppress(TimeoutError, AssertionError):
            wait_until(lambda: self._over() != before, SETTLE_SECONDS)

    def _over(self) -> set[str]:
        return {job for job, seen in self.doors.truth().items() if seen.state in OVER_STATES}

    def go(self) -> None:
        """Let something happen."""
        actions: list[Callable[[], None]] = [
            self.submit, self.submit, self.steer, self.steer, self.steer, self.wait, self.wait,
            self.kill, self.restart_server,
        ]  # fmt: skip
        self.random.choice(actions)()

    def workers(self) -> set[str]:
        """Return the processes of the live workers."""
        return {beat.incarnation for beat in self.doors.farm.workers()}

    def clear(self) -> None:
        """Remove all jobs, in whatever state they are."""
        for job in self.doors.truth():
            self.doors.farm.job(job).delete()

    # What must hold.

    def check(self) -> None:
        """Compare all doors with what the server has, before and after they were asked."""
        before, sums, processes = self.doors.truth(), self.doors.sums(), self.workers()
        shown = list(self.doors.all(before))
        said = list(self.doors.all_sums())
        after = self.doors.truth()
        for door, jobs in shown:
            for job, seen in jobs.items():
                if before.get(job) == after.get(job) is not None:
                    assert agree(seen, before[job]), (door, job, seen, before[job])
                    self.compared += 1
        if (before, sums, processes) == (after, self.doors.sums(), self.workers()):
            for door, found in said:
                assert agree(found, sums), (door, found, sums)
                self.compared += 1


@pytest.mark.farm
@pytest.mark.parametrize(
    "histories", [4, pytest.param(HISTORIES, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_all_doors_agree(
    server: LiveServer, client: redis.Redis, tmp_path: Path, histories: int
) -> None:
    """Pages, HTTP, command line, metrics and manifests agree at each step of random histories."""
    with client_of(server, models=(FAST, SLOW), jobs_directory=tmp_path / "jobs") as web:
        web._transport.raise_server_exceptions = True  # type: ignore[attr-defined] # of this client
        history = History(server, tmp_path, Doors(server, web, FarmClient(client)))
        with history.running():
            for seed in range(histories):
                history.random.seed(seed)
                for _ in range(STEPS):
                    history.go()
                    history.check()
                history.clear()
    assert history.compared > COMPARED_MIN * histories
