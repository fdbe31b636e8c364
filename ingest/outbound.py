"""Requests that the farm sends because a user asked for them, to public addresses only.

A name is resolved once, each address it has is checked, and the connection goes to one of those, so
that no second answer of a name server counts. TLS still asks for the certificate of the name.
"""

import ipaddress
import logging
import re
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ssl import SSLContext
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpcore2

from embedfarm.contract.errors import EmbedfarmError

CONNECT_SECONDS: Final = 10.0
SILENCE_SECONDS: Final = 20.0
PORTS: Final = {"http": 80, "https": 443}
HEADERS: Final[dict[str, str]] = {"user-agent": "embedfarm", "accept-encoding": "identity"}

_PLAIN: Final = re.compile(r"[!$-;=?-Z\[\]_a-z~]+")  # printable ASCII, of which no parser differs
_HOST: Final = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_.])?")
_GLOBAL_UNICAST: Final = ipaddress.ip_network("2000::/3")
_IPV4_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC: Final = tuple(  # though `is_global` of some versions of Python says so
    ipaddress.ip_network(each) for each in ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")
)

log = logging.getLogger(__name__)


class UrlRefused(EmbedfarmError, ValueError):
    """Raised when nothing is sent to a URL; the message says why, without what may be secret."""

    exit_status = 2


class RequestFailed(EmbedfarmError, RuntimeError):
    """Raised when the other side was not reached or did not answer as it should; later it may."""


class Url(NamedTuple):
    """An http or https URL, in parts; its string is for requests, `place` for people.

    Attributes:
        scheme: "http" or "https".
        host: Host in lower case; an IPv6 address without brackets.
        port: Port, also where the URL names none.
        path: Path, at least "/".
        query: Query without the "?".
    """

    scheme: str
    host: str
    port: int
    path: str
    query: str

    @property
    def origin(self) -> str:
        """Scheme, host, and port where it is not the usual one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    @property
    def place(self) -> str:
        """The URL without its query, which may hold a signature."""
        return self.origin + self.path

    @property
    def target(self) -> str:
        """Path and query, as a request has them."""
        return f"{self.path}?{self.query}" if self.query else self.path

    def __str__(self) -> str:
        return self.origin + self.target


def parse_url(text: str) -> Url:
    """Split a URL into its parts.

    Raises:
        UrlRefused: The text is no http or https URL, names a user, or could be read in more than
            one way.
    """
    if not _PLAIN.fullmatch(text):
        raise UrlRefused("a URL is plain ASCII without blanks, quotes, backslashes and fragments")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        if "[" in parts.netloc:
            host = ipaddress.IPv6Address(host).compressed
    except ValueError as error:
        raise UrlRefused(f"a URL cannot be read: {error}") from error
    if parts.scheme not in PORTS:
        raise UrlRefused(f"a URL begins with http:// or https://, and not with {text[:8]!r}")
    if "@" in parts.netloc:
        raise UrlRefused("a URL with a user name or a password is refused")
    if "%" in parts.netloc or not (":" in host or _HOST.fullmatch(host)):
        raise UrlRefused(f"a URL needs the name of a host, which {host!r} is not")
    if port == 0:
        raise UrlRefused("a URL cannot have port 0")
    return Url(parts.scheme, host, port or PORTS[parts.scheme], parts.path or "/", parts.query)


def is_public(address: str) -> bool:
    """Tell whether an IP address is public, by the IPv4 address in it if it carries one."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        carried = ip.ipv4_mapped or ip.sixtofour
        if ip in _IPV4_TRANSLATED:
            carried = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if carried is not None:
            return is_public(str(carried))
        if ip not in _GLOBAL_UNICAST:
            return False
    listed = any(ip in network for network in _NOT_PUBLIC if network.version == ip.version)
    return ip.is_global and not ip.is_multicast and not listed


def find_addresses(host: str, port: int, hosts: Collection[str]) -> list[str]:
    """Return the addresses of a host, all of which may be sent to.

    Args:
        host: Name or address.
        port: Port to connect to.
        hosts: Names, or name:port, whose addresses may be private.

    Raises:
        UrlRefused: An address of the host is not public, or that is no name of a host.
        RequestFailed: The host has no address now.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RequestFailed(f"{host} cannot be found: {error}") from error
    except UnicodeError as error:
        raise UrlRefused(f"{host!r} is not the name of a host") from error
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    named = f"[{host}]" if ":" in host else host
    if {named, f"{named}:{port}"}.isdisjoint(each.lower() for each in hosts):
        for address in addresses:
            if not is_public(address):
                # Whoever named the host must not learn what names of this network stand for.
                log.warning("%s is at %s, which is not public: see outbound_hosts", host, address)
                raise UrlRefused(f"{host} has an address that is not public: see outbound_hosts")
    return addresses


@contextmanager
def send(
    url: Url,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    hosts: Collection[str],
    deadline: float,
) -> Iterator[httpcore2.Response]:
    """Send a GET, or with a body a POST, and yield the answer, whose body is still to be read.

    No redirect is followed, and no proxy used.

    Args:
        url: URL to send to.
        headers: Headers to send beside `HEADERS`.
        body: Body of the request.
        hosts: Names, or name:port, whose addresses may be private.
        deadline: Time on the monotonic clock by which the whole answer must be there.

    Raises:
        UrlRefused: An address of the host is not public.
        RequestFailed: There is no answer, or not in time, here or while the body is read.
    """
    waits = dict.fromkeys(("connect", "pool"), CONNECT_SECONDS)
    waits |= dict.fromkeys(("read", "write"), SILENCE_SECONDS)
    try:
        with (
            httpcore2.ConnectionPool(network_backend=_Guard(hosts, deadline)) as pool,
            pool.stream(
                "POST" if body else "GET",
                httpcore2.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target),
                headers=list((HEADERS | dict(headers)).items()),
                content=body or None,
                extensions={"timeout": waits},
            ) as response,
        ):
            yield response
    except (
        httpcore2.TimeoutException,
        httpcore2.NetworkError,
        httpcore2.ProtocolError,
    ) as error:
        raise RequestFailed(f"{url.origin}: {str(error) or type(error).__name__}") from error


def header(response: httpcore2.Response, name: str) -> str:
    """Return the value of a header; "" where there is none."""
    values = [value for key, value in response.headers if key.lower() == name.encode()]
    return values[0].decode("ascii", "ignore") if values else ""


class _Guard(httpcore2.NetworkBackend):
    """A network backend that only connects to addresses that were checked."""

    def __init__(self, hosts: Collection[str], deadline: float) -> None:
        self._hosts = hosts
        self._deadline = deadline
        self._network = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect to the first of the host's addresses that answers."""
        del local_address, socket_options  # the pool has none
        *others, last = find_addresses(host, port, self._hosts)
        for address in others:
            try:
                return self._connect(address, port, timeout)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return self._connect(last, port, timeout)

    def _connect(self, address: str, port: int, timeout: float | None) -> httpcore2.NetworkStream:
        seconds = _left(self._deadline, timeout)
        return _Timed(self._network.connect_tcp(address, port, seconds), self._deadline)


class _Timed(httpcore2.NetworkStream):
    """A connection whose every step ends by the deadline, however slowly the other side goes."""

    def __init__(self, stream: httpcore2.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline, timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline, timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.NetworkStream:
        seconds = _left(self._deadline, timeout)
        stream = self._stream.start_tls(ssl_context, server_hostname, seconds)
        return _Timed(stream, self._deadline)

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 -- as the library has it
        return self._stream.get_extra_info(info)


def _left(deadline: float, seconds: float | None) -> float:
    """Return the seconds that a step may take: those given, but not beyond the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore2.ReadTimeout("the time is up")
    return left if seconds is None else min(left, seconds)
