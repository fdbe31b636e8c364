"""A server that knows the users of deploy/users.acl, and notes which commands each of them used."""

import contextlib
import re
import socket
import socketserver
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import redis

from embedfarm.contract.broker import closing_client
from embedfarm.contract.settings import Settings
from tests.support import LiveServer, free_port

ROOT: Final = Path(__file__).parents[2]
USERS_FILE: Final = ROOT / "deploy" / "users.acl"
DOCUMENT: Final = ROOT / "docs" / "security.md"
# What the farm's processes are; the others administer the server.
USERS: Final = ("worker", "scheduler", "submitter", "enqueuer", "ingest", "web", "operator")
CONTAINERS: Final = frozenset({"client", "script", "xgroup", "xinfo", "config"})


def command_of(words: Sequence[str]) -> str:
    """Return a command in the form in which an ACL file names it."""
    return "|".join(words[: 1 + (words[0] in CONTAINERS)])


def make_passwords(directory: Path) -> dict[str, str]:
    """Make passwords by user as docs/security.md says, and a `users.acl` in the directory."""
    [command] = re.findall(r"^```bash\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    command = command.replace("deploy/users.acl", str(USERS_FILE))
    subprocess.run(["/bin/bash", "-euc", command], cwd=directory, check=True)
    lines = (directory / "passwords").read_text().splitlines()
    return {user: password for user, _, password in (line.partition(" ") for line in lines)}


@dataclass
class GuardedServer:
    """A server with the users of deploy/users.acl, and the commands that each has used.

    Attributes:
        port: Its TCP port on loopback.
        passwords: The passwords by user.
        used: Commands by user, as an ACL file names them, while it was watched.
    """

    port: int
    passwords: dict[str, str]
    used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _doors: dict[str, int] = field(default_factory=dict)

    def url(self, user: str) -> str:
        """Return a user's URL, with a port of the user's own while the server is watched."""
        port = self._doors.get(user, self.port)
        return f"redis://{user}:{self.passwords[user]}@127.0.0.1:{port}"

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note who uses which command: each user comes from an address of its own."""
        addresses = {f"127.0.0.{place}": user for place, user in enumerate(USERS, start=2)}
        with contextlib.ExitStack() as stack:
            for address, user in addresses.items():
                self._doors[user] = stack.enter_context(_door(self.port, address))
            patient = redis.Redis.from_url(self.url("admin"), socket_timeout=None)
            admin = stack.enter_context(patient)
            monitor = stack.enter_context(admin.monitor())
            thread = threading.Thread(target=self._note, args=(monitor, addresses))
            thread.start()
            try:
                yield
            finally:
                admin.echo("the end")
                thread.join()
                self._doors.clear()

    def _note(self, monitor: Any, addresses: dict[str, str]) -> None:  # noqa: ANN401 -- untyped
        """Note commands until "echo"; those of a script, which follow it, are its caller's."""
        user = None
        for seen in monitor.listen():
            words = seen["command"].lower().split(" ", 2)
            if words[0] == "echo":
                return
            if seen["client_type"] != "lua":
                user = addresses.get(seen["client_address"])
            if user is not None:
                self.used[user].add(command_of(words))

    def refusals(self) -> list[dict[str, Any]]:
        """Return what users were refused lately, the newest first."""
        with closing_client(self.url("admin")) as admin:
            return list(admin.acl_log())


@contextlib.contextmanager
def guarded_server(directory: Path, kind: str) -> Iterator[GuardedServer]:
    """Run a guarded server, with its files in the directory."""
    directory.mkdir()
    passwords = make_passwords(directory)
    port = free_port()
    guarded = GuardedServer(port, passwords)
    words = ["--port", str(port), "--aclfile", str(directory / "users.acl")]
    live = LiveServer(directory / "server", kind, Settings(), guarded.url("admin"), words)
    try:
        live.start()
        yield guarded
    finally:
        live.stop()


@contextlib.contextmanager
def _door(port: int, address: str) -> Iterator[int]:
    """Open a port of loopback that leads to another one, where its callers come from `address`."""

    class Passage(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port), None, (address, 0)) as inside:
                back = threading.Thread(target=_pump, args=(inside, self.request), daemon=True)
                back.start()
                _pump(self.request, inside)
                back.join()

    class Door(socketserver.ThreadingTCPServer):
        daemon_threads = True  # whoever still talks does not hold up the end

    with Door(("127.0.0.1", 0), Passage) as door:
        thread = threading.Thread(target=door.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield door.server_address[1]
        finally:
            door.shutdown()
            thread.join()


def _pump(one: socket.socket, other: socket.socket) -> None:
    """Pass on what one side says, and that it has hung up."""
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_RDWR)
