"""A process that has imported the command line, and runs each command in a copy of itself.

A program takes a third of a second of a processor to import its modules, and tests start hundreds
of them. The copy gets the arguments, variables, directory and files of its command, and runs what
the installed program runs, to its end. The server listens on its standard input, a socket, until
nobody has the other end.

A command that starts workers or a scheduler has a server of its own, a child of it, which was made
when no other thread ran, and runs each of them in a copy too.
"""

import atexit
import ctypes
import functools
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final, Self

from embedfarm.contract import processes
from embedfarm.contract.quick_imports import quick_imports

# What most commands import, and what some verbs import beside it, when the first of these comes.
ALWAYS: Final = (
    *(f"embedfarm.cli.{verb}" for verb in ("embed", "jobs", "outputs", "inspection", "simulate")),
    *(f"embedfarm.{each}" for each in ("runs.run", "collector.verify", "collector.export")),
)
ROLES: Final = ("embedfarm.workers.main", "embedfarm.scheduler.main")
LATER: Final = {
    **dict.fromkeys(("embed", *ROLES), (*ROLES, "embedfarm.workers.engines.null")),
    "ingest": ("embedfarm.cli.ingest", "embedfarm.ingest.recurring"),
    "schedule": ("embedfarm.cli.roles", "embedfarm.scheduler.loop"),
    "serve": ("embedfarm.cli.roles", "embedfarm.web.app", "embedfarm.web.server"),
    "work": ("embedfarm.cli.roles", "embedfarm.workers.supervisor", *ROLES),
}
STARTING: Final = ("embed", "work")  # verbs that start roles
LINE_BYTES: Final = 1000  # of a command, as others see it
REQUEST_BYTES_MAX: Final = 1 << 20
ANSWER_BYTES: Final = 16


class Copy:
    """A running `embedfarm`, with what tests use of `subprocess.Popen`.

    Args:
        words: The arguments behind the program's name.
        environment: All of its variables.
        output: File for its standard output, which nobody reads if there is none.
        errors: File for its standard error.
        source: File for its standard input, which has nothing in it if there is none.
        server: Socket of the server; None for that of this process.
    """

    def __init__(  # noqa: PLR0913, PLR0917 -- as `Popen` has them
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | None = None,
        errors: IO[bytes] | None = None,
        source: IO[bytes] | None = None,
        server: socket.socket | None = None,
    ) -> None:
        self.words = list(words)
        self.returncode: int | None = None
        request = {
            "words": self.words, "environment": dict(environment), "directory": str(Path.cwd()),
        }  # fmt: skip
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, Path(os.devnull).open("r+b") as nothing:
            files = (theirs, source or nothing, output or nothing, errors or nothing)
            data = json.dumps(request).encode()
            socket.send_fds(server or _server(), [data], [each.fileno() for each in files])
        self.pid = int(self._answers.recv(ANSWER_BYTES))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, for some seconds at most, and return the exit status.

        Raises:
            subprocess.TimeoutExpired: It goes on.
        """
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                answer = self._answers.recv(ANSWER_BYTES)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.words, timeout or 0.0) from None
            self.returncode = int(answer or -signal.SIGKILL)  # if the server was killed, so was it
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


@functools.cache
def _server() -> socket.socket:
    """Start the server of this process; it ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        room = " " * LINE_BYTES
        words = [sys.executable, "-c", f"from {__name__} import main; main()", room]
        # In a session of its own, so that it ends with the tests and not at their Ctrl-C.
        server = subprocess.Popen(words, stdin=theirs.fileno(), start_new_session=True)

    @atexit.register
    def end() -> None:
        ours.close()
        server.wait()

    return ours


class Role(Copy):
    """A role in a copy, of which its supervisor has the parent pipe."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes],
        server: socket.socket,
    ) -> None:
        reader, writer = os.pipe()
        self._pipe = os.fdopen(writer, "wb", 0)
        with os.fdopen(reader, "rb", 0) as source:
            super().__init__(words, environment, log, log, source, server)

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        super().__exit__()


def main() -> None:
    """Serve commands until nobody can ask for another; in a copy, run one."""
    _import(ALWAYS)
    words = _serve(socket.socket(fileno=os.dup(0)))
    if words is not None:
        role = _serve_roles() if words[0] in STARTING else None
        _run(role or words)


def _run(words: Sequence[str]) -> None:
    """Run a role, or a command."""
    if words[0] in ROLES:
        sys.argv = list(words)
        sys.exit(import_module(words[0]).main())
    sys.argv = ["embedfarm", *words]
    import_module("embedfarm.cli").main()


def _serve_roles() -> Sequence[str] | None:
    """Let a child serve the roles that this command starts; in a copy, return the role to run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        start_roles_in_copies(ours)
        return None
    ours.close()
    words = _serve(theirs)
    if words is None:
        os._exit(0)
    return words


def start_roles_in_copies(server: socket.socket | None = None) -> None:
    """Let this process start roles in copies of a server; of its own, if none is given."""
    start = functools.partial(_start, server or _server())
    ours_alone = SimpleNamespace(**vars(subprocess) | {"Popen": start})
    setattr(processes, "subprocess", ours_alone)  # noqa: B010 # in this process alone


def _start(server: socket.socket, command: Sequence[str], **options: Any) -> Any:  # noqa: ANN401
    """Start what a supervisor starts: in a copy if it is a role, else like `subprocess.Popen`."""
    begin, words = command[: len(processes.RUN_ROLE)], command[len(processes.RUN_ROLE) :]
    variables: dict[str, str] = options["env"]
    is_role = tuple(begin) == processes.RUN_ROLE and words[0] in ROLES
    if is_role and _read_at_start(variables) == FROM_START:
        return Role(words, variables, options["stdout"], server)
    return subprocess.Popen(command, **options)


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a program looks at when it starts, and a copy does not."""
    return {name: each for name, each in variables.items() if name.startswith(("PYTHON", "LD_"))}


FROM_START: Final = _read_at_start(os.environ)


def _import(names: Sequence[str]) -> None:
    with quick_imports():
        for name in names:
            import_module(name)
    gc.freeze()


def _serve(requests: socket.socket) -> list[str] | None:
    """Return the arguments of a command in the copy that is to run it, and None at the end."""
    running: dict[int, tuple[int, socket.socket]] = {}
    with requests, selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in running:
                    selector.unregister(key.fd)
                    pid, answers = running.pop(key.fd)
                    _, status = os.waitpid(pid, 0)
                    with answers, suppress(BrokenPipeError):  # a test that failed asks no more
                        answers.send(b"%d" % os.waitstatus_to_exitcode(status))
                    os.close(key.fd)
                    continue
                data, files, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
                if not data:
                    return None
                request = json.loads(data)
                _import(LATER.get(request["words"][0], ()))
                pid = os.fork()
                if not pid:
                    return _become(request, files)
                answers = socket.socket(fileno=files[0])
                for each in files[1:]:
                    os.close(each)
                process = os.pidfd_open(pid)
                running[process] = pid, answers
                selector.register(process, selectors.EVENT_READ)


def _become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Take on the files, variables and directory of a command; return its arguments.

    A role leads a group of its own before anybody knows its number, and so can signal that group.
    """
    words: list[str] = request["words"]
    if words[0] in ROLES:
        os.setsid()
    with socket.socket(fileno=os.dup(files[0])) as answers:
        answers.send(b"%d" % os.getpid())
    for place, each in enumerate(files[1:]):
        os.dup2(each, place)
    for each in files:
        os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    _show(words)
    return words


def _show(words: Sequence[str]) -> None:
    """Let others see these arguments where a process's own are seen."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    begin, size = int(stat[45]), int(stat[46]) - int(stat[45])  # `arg_start` and `arg_end`
    line = "\0".join([sys.executable, "-m", "embedfarm", *words]).encode()
    ctypes.memmove(begin, line[: size - 1].ljust(size, b"\0"), size)
