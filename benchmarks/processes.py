"""Runner of a command that watches every process below it: processor time and resident memory."""

import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import psutil

SAMPLE_SECONDS: Final = 0.5  # more often, it would take what it measures
ERROR_CHARACTERS: Final = 2_000


class CommandFailed(RuntimeError):
    """Raised when a command ends with a status other than 0; has the end of its output."""


@dataclass
class Usage:
    """Processor time and memory of one process, or of several of one name.

    Attributes:
        cpu_seconds: User and system time in seconds.
        rss_bytes: Resident memory at each sample.
    """

    cpu_seconds: float = 0.0
    rss_bytes: list[int] = field(default_factory=list)

    @property
    def rss_bytes_max(self) -> int:
        """Largest of the samples, in bytes."""
        return max(self.rss_bytes, default=0)


@dataclass
class Finished:
    """A command that ended with status 0.

    Attributes:
        output: Its standard output.
        wall_seconds: Time from the command's start to its end.
        usage: Usage by name of process.
        rss_bytes_max: Peak of the sum over all processes; pages that two share count twice.
    """

    output: str
    wall_seconds: float
    usage: dict[str, Usage]
    rss_bytes_max: int


def run_watched(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Finished:
    """Run a command to its end.

    Raises:
        CommandFailed: The command's status was not 0.
    """
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        watcher = _Watcher(process.pid)
        watcher.start()
        output, errors = process.communicate()
        watcher.stop()
    if process.returncode:
        said = (errors.strip() or output.strip())[-ERROR_CHARACTERS:]
        raise CommandFailed(f"{command[0]} ended with {process.returncode}: {said}")
    seconds = time.monotonic() - began
    return Finished(output, seconds, dict(watcher.usage), max(watcher.sums, default=0))


class _Watcher(threading.Thread):
    """Thread that samples a process and its descendants until it is stopped."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.usage: dict[str, Usage] = defaultdict(Usage)
        self.sums: list[int] = []
        self._root = psutil.Process(pid)
        self._ended = threading.Event()

    def run(self) -> None:
        """Take a sample every `SAMPLE_SECONDS`."""
        while not self._ended.wait(SAMPLE_SECONDS):
            try:
                processes = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self.sums.append(sum(map(self._sample, processes)))

    def stop(self) -> None:
        """Stop, and wait until no sample will be taken any more."""
        self._ended.set()
        self.join()

    def _sample(self, process: psutil.Process) -> int:
        """Note what a process uses now; return its resident bytes."""
        try:
            usage = self.usage[_name(process)]
            times = process.cpu_times()
            usage.cpu_seconds = times.user + times.system
            usage.rss_bytes.append(process.memory_info().rss)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            return 0  # it ended between two looks
        return usage.rss_bytes[-1]


def _name(process: psutil.Process) -> str:
    """Return the name of a process's role in the farm."""
    words = process.cmdline()
    if "embedfarm.scheduler.main" in words:
        return "scheduler"
    if "embedfarm.workers.main" in words:
        return f"worker {words[-1]}"
    if any("valkey-server" in word or "redis-server" in word for word in words[:1]):
        return "server"
    return "embed (producer and collector)" if "embed" in words else "starting"
