"""URLs of the server: one that is named, with TLS or without, that sentinels name, or a cluster.

    redis://user:password@host:6379/0
    rediss://user:password@host:6380?ssl_ca_certs=/etc/embedfarm/ca.pem
    unix:///run/valkey/valkey.sock
    redis+sentinel://user:password@host1:26379,host2:26379/name/0?sentinel_password=…
    redis+cluster://user:password@host1:6379,host2:6379

A cluster's nodes are found through any of those that are named, and have the same user, password
and arguments; `rediss+cluster` speaks TLS to all of them. `sentinel` is short for `redis+sentinel`;
with `rediss+sentinel` TLS is spoken to sentinels and servers. What stands behind `?` are arguments
of redis-py's connections; those that begin with `sentinel_` are for the connections to sentinels,
which otherwise need no password.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import redis
import redis.backoff
import redis.connection
import redis.retry
import redis.sentinel

from embedfarm.contract.errors import EmbedfarmError

SENTINEL_SCHEMES: Final = {
    "sentinel": "redis",
    "redis+sentinel": "redis",
    "rediss+sentinel": "rediss",
}
SENTINEL_PORT: Final = 26379
SENTINEL_SECONDS: Final = 1.0  # for a sentinel's answer, before the next one is asked
CLUSTER_SCHEMES: Final = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
SERVER_PORT: Final = 6379
PLAIN_SCHEMES: Final = ("redis", "rediss", "unix")
SCHEMES: Final = (*PLAIN_SCHEMES, *SENTINEL_SCHEMES, *CLUSTER_SCHEMES)
FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
ENCODE: Final = "write / ? # [ ] @ of a password as %2F %3F %23 %5B %5D %40"


class UrlError(EmbedfarmError, ValueError):
    """Raised when a URL is not one of a server; the message has no value that may be a password."""

    exit_status = 2


def make_pool(url: str, **arguments: Any) -> redis.ConnectionPool:  # noqa: ANN401 -- as redis-py
    """Return a pool of connections to the server of `url`; the first use connects.

    That of a cluster's URL is to the first node that it names.

    Args:
        url: URL in one of the forms that the module's docstring lists.
        arguments: Arguments of the pool and of its connections, which overrule the URL's.

    Raises:
        UrlError: The URL is not one of a server, or names a file that is not there.
    """
    if is_cluster(url):
        return make_pool(node_url(url, *cluster_seeds(url)[0]), **arguments)
    parts = _split(url)
    arguments["driver_info"] = None  # CLIENT SETINFO is in no ACL file that Redis 7.0 can read
    try:
        if parts.scheme in SENTINEL_SCHEMES:
            pool = _sentinel_pool(parts, arguments)
        else:
            pool = redis.ConnectionPool(**(redis.connection.parse_url(url) | arguments))
        pool.make_connection()  # which is not connected, but refuses arguments that are none
    except (ValueError, TypeError, redis.RedisError) as error:
        raise UrlError(str(error)) from None
    for name in FILES:
        path = pool.connection_kwargs.get(name)
        if path and not Path(path).is_file():
            raise UrlError(f"{name}: there is no file {path}")
    return pool


def is_cluster(url: str) -> bool:
    """Tell whether a URL names a cluster."""
    return url.partition("://")[0] in CLUSTER_SCHEMES


def cluster_seeds(url: str) -> list[tuple[str, int]]:
    """Return host and port of each node that a cluster's URL names.

    Raises:
        UrlError: It has a number of a database, which clusters have not, or is no URL.
    """
    parts = _split(url)
    if parts.path.strip("/0"):
        raise UrlError("a cluster has no databases: its URL ends with the last host")
    _, _, hosts = parts.netloc.rpartition("@")
    try:
        return [_address(host, SERVER_PORT) for host in hosts.split(",")]
    except ValueError:
        raise UrlError(f"its port is no number, or its host no name; {ENCODE}") from None


def node_url(url: str, host: str, port: int) -> str:
    """Return the URL of one node of a cluster, with the user, password and arguments of all."""
    parts = _split(url)
    user, at, _ = parts.netloc.rpartition("@")
    name = f"[{host}]" if ":" in host else host
    scheme, query = CLUSTER_SCHEMES[parts.scheme], parts.query and f"?{parts.query}"
    return f"{scheme}://{user}{at}{name}:{port}{query}"


def _split(url: str) -> SplitResult:
    """Split a URL; refuse one that a password breaks, of which urllib's errors would quote parts.

    Only the first of several hosts is looked at; urllib may refuse an address after a comma.
    """
    scheme, slashes, rest = url.partition("://")
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    first = netloc.partition(",")[0]
    try:
        parts = urlsplit(f"{scheme}{slashes}{first}{rest[len(netloc) :]}")._replace(netloc=netloc)
        _address(first, SERVER_PORT)
    except ValueError:
        raise UrlError(f"its port is no number, or its host no name; {ENCODE}") from None
    if parts.scheme not in SCHEMES:
        raise UrlError(f"it begins with none of {', '.join(SCHEMES)}")
    if "@" in url and "@" not in parts.netloc and parts.scheme != "unix":
        raise UrlError(f"its user and password end before the @; {ENCODE}")
    return parts


def _address(netloc: str, port: int) -> tuple[str, int]:
    """Return a host and its port, or the usual one; a user before them is passed over."""
    parts = urlsplit(f"//{netloc}")
    return parts.hostname or "localhost", parts.port or port


def _sentinel_pool(parts: SplitResult, arguments: Mapping[str, Any]) -> redis.ConnectionPool:
    """Return a pool of connections to a service's primary, looked up for each new connection."""
    user, at, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise UrlError("it has no name of a service behind the sentinels")
    server = f"{SENTINEL_SCHEMES[parts.scheme]}://{user}{at}/{database}?{parts.query}"
    given = redis.connection.parse_url(server)
    tls = given.pop("connection_class", None) is not None
    asking = {key: given.pop(key) for key in list(given) if key.startswith("sentinel_")}
    asking = {key.removeprefix("sentinel_"): value for key, value in asking.items()}
    if tls:
        asking |= {"ssl": True} | {k: v for k, v in given.items() if k.startswith("ssl_")}
    manager = redis.sentinel.Sentinel(
        [_address(host, SENTINEL_PORT) for host in hosts.split(",")],
        sentinel_kwargs={
            "socket_timeout": SENTINEL_SECONDS,
            "socket_connect_timeout": SENTINEL_SECONDS,
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        }
        | asking,
    )
    return redis.sentinel.SentinelConnectionPool(name, manager, ssl=tls, **(given | arguments))
