"""A farm on several hosts, over a network that loses packets and is cut.

    python -m benchmarks.hosts [--seconds 20] [--cut 60] [--victim 3] [--loss 0.05]
        [--speed 50000]

Needs root, and the programs ip and nft. Each host is a network namespace of this machine with an
address, a name and a clock of its own, hours away from the others'; all are on one bridge. The
first has the server and the scheduler, the second the command of a job, the others a worker each,
with the null engine at `--speed` tokens a second. The job runs for some seconds as it is, then
with every packet of every host lost with a probability, in each direction, then with one host, by
default that of a worker, cut off; and then to its end, where every vector is compared.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Self

from benchmarks.crowd import DIMENSIONS, DRAIN_SECONDS, compare, wait_for, write
from embedfarm.contract.broker import PrivateServer, closing_client, wait_until_ready
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings

ADDRESS: Final = "10.77.0.{}"
PORT: Final = 6379
SERVER, COMMAND, *WORKERS = range(4)  # the hosts
CLOCKS: Final = (0, -5 * 3600, 3 * 3600, -7 * 3600)  # seconds that each host's clock is ahead
CHUNKS_PER_SECOND: Final = 1 / 256  # of a token a second
SERVER_SECONDS_MAX: Final = 30.0
RULES: Final = """
flush ruleset
table inet faults {{
  chain arriving {{ type filter hook input priority 0; iifname != "lo" {verdict}; }}
  chain leaving {{ type filter hook output priority 0; oifname != "lo" {verdict}; }}
}}
"""
CLOCK: Final = """
import os
import time

ahead = int(os.environ["CLOCK_AHEAD"])
wall, wall_ns = time.time, time.time_ns
time.time = lambda: wall() + ahead
time.time_ns = lambda: wall_ns() + ahead * 1_000_000_000
"""


@dataclass
class Hosts:
    """Network namespaces on one bridge.

    Attributes:
        count: Number of hosts.
        home: Directory for what their programs need.
    """

    count: int
    home: Path
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Make the hosts.

        Raises:
            subprocess.CalledProcessError: We are not root, or the kernel has no such thing.
        """
        (self.home / "sitecustomize.py").write_text(CLOCK, encoding="utf-8")
        with ExitStack() as stack:
            hub = self._make("hub", stack)
            _call("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
            _call("ip", "-n", hub, "link", "set", "bridge", "up")
            for number in range(self.count):
                host, far = self._make(str(number), stack), f"host{number}"
                _call("ip", "-n", host, "link", "add", "lan", "type", "veth", "peer", far)
                _call("ip", "-n", host, "link", "set", far, "netns", hub)
                _call("ip", "-n", hub, "link", "set", far, "master", "bridge", "up")
                _call("ip", "-n", host, "addr", "add", f"{self.address(number)}/24", "dev", "lan")
                _call("ip", "-n", host, "link", "set", "lan", "up")
                _call("ip", "-n", host, "link", "set", "lo", "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, number: int) -> str:
        """Return the address of a host."""
        return ADDRESS.format(number + 1)

    @contextmanager
    def running(
        self, number: int, words: Sequence[str], settings: Settings
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a program on a host, with its name and its clock; at the end it is stopped."""
        name = f'hostname host{number} && exec "$@"'
        inside = ["ip", "netns", "exec", self._name(str(number)), "unshare", "--uts"]
        environment = os.environ | settings.environment() | {
            "PYTHONPATH": os.pathsep.join([str(self.home), os.environ.get("PYTHONPATH", "")]),
            "CLOCK_AHEAD": str(CLOCKS[number % len(CLOCKS)]),
        }  # fmt: skip
        with (
            (self.home / f"host{number}.log").open("ab") as log,
            subprocess.Popen(
                [*inside, "sh", "-c", name, "sh", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            ) as process,
        ):
            try:
                yield process
            finally:
                process.terminate()
                process.wait(DRAIN_SECONDS)

    def lose(self, number: int, share: float) -> None:
        """Lose a share of a host's packets, in each direction; all of them if it is 1."""
        verdict = "drop" if share >= 1 else f"numgen random mod 1000 < {round(1000 * share)} drop"
        host = self._name(str(number))
        _call("ip", "netns", "exec", host, "nft", "-f", "-", said=RULES.format(verdict=verdict))

    def _name(self, host: str) -> str:
        return f"embedfarm-{os.getpid()}-{host}"

    def _make(self, host: str, stack: ExitStack) -> str:
        name = self._name(host)
        _call("ip", "netns", "add", name)
        stack.callback(_call, "ip", "netns", "del", name)
        return name


def _call(*words: str, said: str = "") -> None:
    subprocess.run(words, check=True, input=said.encode())


@dataclass
class Rates:
    """Chunks that were done in each second.

    Attributes:
        clean: On a good network.
        lossy: While packets were lost.
        cut: While a host was cut off.
    """

    clean: float
    lossy: float
    cut: float


@dataclass(frozen=True)
class Course:
    """What happens to a farm.

    Attributes:
        seconds: Time for which the network is good, and then loses packets.
        cut: Seconds for which a host is cut off behind that.
        victim: Number of the host.
        loss: Share of packets that are lost, in each direction.
        speed: Tokens per second of each of the two workers.
    """

    seconds: float = 20.0
    cut: float = 60.0
    victim: int = 3
    loss: float = 0.05
    speed: float = 50_000.0


def run(home: Path, course: Course) -> Rates:
    """Embed a job on four hosts, of which two have a worker each, and compare its vectors."""
    speed, victim = course.speed, course.victim
    chunks = int(len(WORKERS) * speed * CHUNKS_PER_SECOND * (4 * course.seconds + course.cut))
    corpus, out = write(home / "corpus.jsonl", chunks), home / "out"
    server, python = PrivateServer.at(home / "server"), [sys.executable, "-m", "embedfarm"]
    listen = ["--port", str(PORT), "--bind", "0.0.0.0", "--protected-mode", "no"]  # noqa: S104 # in a namespace
    with Hosts(2 + len(WORKERS), home) as hosts, ExitStack() as stack:
        settings = Settings(redis_url=f"redis://{hosts.address(SERVER)}:{PORT}")

        def start(number: int, *words: str) -> "subprocess.Popen[bytes]":
            return stack.enter_context(hosts.running(number, words, settings))

        stack.callback(server.leave)
        start(SERVER, *server.command(settings), *listen)
        wait_until_ready(server.url, threading.Event(), SERVER_SECONDS_MAX)
        farm = FarmClient(stack.enter_context(closing_client(server.url)))
        start(SERVER, *python, "schedule")
        for number in WORKERS:
            start(number, *python, "work", "--devices", "cpu", "--workers", "1")
        wait_for(lambda: len(farm.workers()) == len(WORKERS))
        model = f"null:{DIMENSIONS}:{speed:.0f}"
        embed = start(COMMAND, *python, "embed", str(corpus), "--out", str(out), "--model", model)
        wait_for(lambda: any(status.chunks_done for status in farm.statuses().values()))

        def rate(of: float) -> float:
            (before,), began = farm.statuses().values(), time.monotonic()
            threading.Event().wait(of)
            (now,), took = farm.statuses().values(), time.monotonic() - began
            return (now.chunks_done - before.chunks_done) / took

        clean = rate(course.seconds)
        for number in range(hosts.count):
            hosts.lose(number, course.loss)
        lossy = rate(course.seconds)
        for number in range(hosts.count):
            hosts.lose(number, 1 if number == victim else 0)
        rates = Rates(clean, lossy, rate(course.cut))
        hosts.lose(victim, 0)
        if embed.wait():
            raise SystemExit((home / f"host{COMMAND}.log").read_text(encoding="utf-8"))
    compare(out, corpus)
    return rates


def main() -> None:
    """Measure, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    for each in fields(Course):
        parser.add_argument(f"--{each.name}", type=type(each.default), default=each.default)
    course = Course(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory(prefix="embedfarm-hosts-") as home:
        rates = run(Path(home), course)
    sys.stdout.write(
        f"{rates.clean:,.0f} chunks/s; {rates.lossy:,.0f} with {course.loss:.0%} of packets lost "
        f"in each direction; {rates.cut:,.0f} in the {course.cut:.0f} s in which host "
        f"{course.victim} was cut off; every vector is right\n"
    )


if __name__ == "__main__":
    main()
