"""Tests of the array job for Slurm, run by bash as Slurm would run it, and of all scripts."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from embedfarm.contract.broker import connect
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.processes import KILL_SECONDS
from embedfarm.contract.settings import Settings
from tests.deploy.manifests import ROOT
from tests.farm.harness import check_output, run, texts_of, write_corpus
from tests.support import LiveServer, wait_until

SCRIPT: Final = ROOT / "deploy" / "slurm" / "workers.sbatch"
SCRIPTS: Final = [
    SCRIPT,
    ROOT / "deploy" / "kubernetes" / "secrets.sh",
    ROOT / ".ci" / "run",
]
CHUNKS: Final = 800
# Slurm's own start the command on the hosts of the task, send it a signal, and queue the task anew.
# As with Slurm's, a signal for srun itself ends the command at once.
STANDING_IN: Final = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
"$@" &
echo $! > "$STEP"
trap 'kill -KILL $!; exit 137' TERM
wait $!
""",
    "scancel": '[[ $1 == --signal=TERM && $2 == "$SLURM_JOB_ID" ]] && kill -TERM $(< "$STEP")\n',
    "scontrol": 'echo "$@" >> "$SAID"\n',
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script: Path) -> None:
    """A script is one of which shellcheck has nothing to say."""
    command = [str(Path(sys.executable).parent / "shellcheck"), "--shell=bash", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_slurm_is_asked_for_what_a_worker_needs() -> None:
    """A task is requeued, is told in time that its time is up, and appends to its log."""
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", SCRIPT.read_text(), re.MULTILINE)
    asked = dict(options)
    assert len(asked) == len(options)
    assert asked["open-mode"] == "append"
    assert "requeue" in asked
    shell, seconds = asked["signal"].split("@")
    assert shell == "B:TERM"
    # Slurm may send it up to a minute early, and never late.
    assert int(seconds) > Settings().drain_seconds + KILL_SECONDS
    # Slurm reads no option behind the first command.
    first = SCRIPT.read_text().index("\nset -euo")
    assert "#SBATCH" not in SCRIPT.read_text()[first:]


class Cluster:
    """A place where the script runs as tasks of an array."""

    def __init__(self, home: Path, server: LiveServer) -> None:
        self.said = home / "scontrol"
        programs = home / "programs"
        programs.mkdir()
        for name, text in STANDING_IN.items():
            (programs / name).write_text(f"#!/usr/bin/env bash\n{text}")
            (programs / name).chmod(0o755)
        self._log = home / "tasks.log"
        self._environment = os.environ | {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SAID": str(self.said),
            "STEP": str(home / "step"),
            "TMPDIR": str(home),
            "SLURM_JOB_ID": "12",
            "SLURM_ARRAY_JOB_ID": "9",
            "SLURM_ARRAY_TASK_ID": "3",
            "EMBEDFARM_REDIS_URL": server.url,
            "FARM_DEVICES": "cpu",
            "FARM_LOOK_SECONDS": "0.2",
        }

    @contextlib.contextmanager
    def task(self, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a task; the end of the block kills what is left of it."""
        with (
            self._log.open("ab") as log,
            subprocess.Popen(
                ["/bin/bash", str(SCRIPT)],
                env=self._environment | environment,
                stdout=log,
                stderr=log,
                process_group=0,
            ) as task,
        ):
            try:
                yield task
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(task.pid, signal.SIGKILL)

    def log(self) -> str:
        """Return what all tasks have said."""
        return self._log.read_text()


@pytest.mark.timeout(120)
def test_a_task_works_drains_and_comes_again(server: LiveServer, tmp_path: Path) -> None:
    """A task whose time is up in mid-job is requeued, and goes on; without work it ends."""
    cluster, client = Cluster(tmp_path, server), connect(server.url)
    farm, texts = FarmClient(client), list(texts_of(CHUNKS))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    words = ["embed", corpus, "--out", tmp_path / "out", "--model", "null:16:10000"]
    with ThreadPoolExecutor(1) as pool, cluster.task() as first:
        embedding = pool.submit(run, *words, "--redis", server.url)
        wait_until(lambda: any(job.chunks_done for job in farm.statuses().values()), 60)
        first.terminate()  # as `--signal=B:TERM` does: the script alone
        assert first.wait(45) == 0, cluster.log()
        assert cluster.said.read_text() == "requeue 9_3\n"
        # It has handed back what it had: nobody misses a worker, or waits for its leases.
        assert farm.call_roll() == ([], {})
        assert not embedding.done()
        with cluster.task(FARM_OPERATOR_URL=server.url, FARM_IDLE_SECONDS="1") as again:
            assert embedding.result().returncode == 0
            assert again.wait(45) == 0, cluster.log()
    check_output(tmp_path / "out", texts, 16)
    assert "no job was in work for 1 s" in cluster.log()
    assert cluster.said.read_text() == "requeue 9_3\n"
    client.close()


@pytest.mark.timeout(120)
def test_a_preempted_step_needs_no_requeue(server: LiveServer, tmp_path: Path) -> None:
    """A task whose step Slurm has told to end waits until Slurm, which requeues it, ends it."""
    cluster, client = Cluster(tmp_path, server), connect(server.url)
    farm = FarmClient(client)
    with cluster.task() as task:
        wait_until(lambda: farm.workers() or task.poll() is not None, 60)
        os.kill(int((tmp_path / "step").read_text()), signal.SIGTERM)
        wait_until(lambda: "Slurm takes the host" in cluster.log(), 45)
        assert farm.call_roll() == ([], {})
        assert task.poll() is None
        os.killpg(task.pid, signal.SIGTERM)
        assert task.wait(45) == -signal.SIGTERM
    assert not cluster.said.exists()
    client.close()
