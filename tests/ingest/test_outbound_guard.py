"""Tests of the guard: where requests that a user asks for may go."""

import contextlib
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from embedfarm.ingest.outbound import (
    RequestFailed,
    UrlRefused,
    find_addresses,
    is_public,
    parse_url,
    send,
)
from tests.ingest.loopback_server import Neighbour, Reply

PRIVATE = [
    "0.1.2.3", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1",
    "192.0.0.192", "192.0.2.1", "192.168.1.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b:1::1", "2001:db8::1", "2002:7f00:1::", "2001::1", "3fff::1", "fc00::1", "fe80::1",
    "fe80::1%1", "fec0::1", "ff02::1", "5f00::1",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@contextlib.contextmanager
def opened(url: str, *hosts: str, seconds: float = 10.0) -> Iterator[Any]:
    """Send a GET to a URL, whose host may be private if it is one of `hosts`."""
    deadline = time.monotonic() + seconds
    with send(parse_url(url), {}, hosts=hosts, deadline=deadline) as response:
        yield response


def read(url: str, *hosts: str, seconds: float = 10.0) -> bytes:
    """The body that a GET brings."""
    with opened(url, *hosts, seconds=seconds) as response:
        return b"".join(response.iter_stream())


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    """A server that answers with the Host header of the request."""
    with Neighbour().running() as each:
        each.answer = lambda request: Reply(body=request.headers["host"].encode())
        yield each


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    """An address that is private, reserved or hidden in another is not public."""
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    """A public address is public, also as IPv4 inside of IPv6."""
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST", "127.1", "2130706433", "0x7f.1", "[::1]"]
)
def test_loopback_by_any_name(neighbour: Neighbour, host: str) -> None:
    """A name that leads to loopback is refused however it is written, and nothing is sent."""
    with pytest.raises(UrlRefused, match="not public"):
        read(f"http://{host}:{neighbour.port}/")
    assert not neighbour.requests


def test_addresses_of_names_are_the_operators(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asks for a name that is not public learns no address of it; the log has it."""
    with pytest.raises(UrlRefused) as refused:
        find_addresses("localhost", 80, [])
    assert not re.search(r"127\.|::1", str(refused.value))
    assert re.search(r"localhost is at (127\.|::1)", caplog.text)


def test_a_named_host_may_be_private(neighbour: Neighbour) -> None:
    """A private host is allowed by the name on the list, with or without port, and no other."""
    port = neighbour.port
    assert read(neighbour.url, "127.0.0.1") == f"127.0.0.1:{port}".encode()
    assert read(f"http://LocalHost:{port}/", f"localhost:{port}") == f"localhost:{port}".encode()
    for other in (f"127.0.0.1:{port + 1}", "localhost"):
        with pytest.raises(UrlRefused):
            read(neighbour.url, other)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://example.com/", "begins with http"),
        ("file:///etc/passwd", "begins with http"),
        ("//example.com/", "begins with http"),
        ("http://me:secret@example.com/", "user name"),
        ("http://example.com@127.0.0.1/", "user name"),
        ("http://example.com\\@127.0.0.1/", "plain ASCII"),
        ("http://exam\nple.com/", "plain ASCII"),
        ("http://example.com/\x00", "plain ASCII"),
        ("http://example.com#@127.0.0.1/", "plain ASCII"),
        ("http://ex\u00e4mple.com/", "plain ASCII"),
        ("http://127.0.0%2e1/", "name of a host"),
        ("http://[fe80::1%25eth0]/", "cannot be read|name of a host"),
        ("http:///path", "name of a host"),
        ("http://[::1", "cannot be read"),
        ("http://[v1.a]/", "cannot be read"),
        ("http://example.com:99999/", "cannot be read"),
        ("http://example.com:0/", "port 0"),
        ("", "plain ASCII"),
    ],
)
def test_what_is_no_url(url: str, reason: str) -> None:
    """A URL that two programs could read in two ways is refused, and no password is repeated."""
    with pytest.raises(UrlRefused, match=reason) as refused:
        parse_url(url)
    assert "secret" not in str(refused.value)


def test_a_host_without_address() -> None:
    """A host without an address fails for now; a name too long to be one is refused for good."""
    with pytest.raises(RequestFailed, match="cannot be found"):
        find_addresses("nowhere.invalid", 80, ())
    with pytest.raises(UrlRefused, match="not the name"):
        find_addresses("a" * 64 + ".com", 80, ())


def test_a_name_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, neighbour: Neighbour
) -> None:
    """A connection goes to the address that was checked, whatever the name server says later.

    A host is refused if one of its several addresses is private.
    """
    public, answers, connected = "93.184.215.14", [["93.184.215.14"], ["127.0.0.1"]], list[Any]()
    resolve = socket.getaddrinfo

    def lie(host: Any, port: Any, *rest: Any, **more: Any) -> Any:  # noqa: ANN401 -- as the library has it
        names = answers.pop(0) if host == "rebinding.example" else [host]
        return [each for name in names for each in resolve(name, port, *rest, **more)]

    def refuse(event: str, words: Any) -> None:  # noqa: ANN401 -- as above
        if event == "socket.connect" and words[1][0] == public:
            connected.append(words[1])
            raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", lie)
    sys.addaudithook(refuse)
    with pytest.raises(RequestFailed):
        read(f"http://rebinding.example:{neighbour.port}/")
    assert connected == [(public, neighbour.port)]
    answers[:] = [[public, "127.0.0.1"]]
    with pytest.raises(UrlRefused, match=r"rebinding\.example has an address that is not public"):
        read(f"http://rebinding.example:{neighbour.port}/")
    assert "rebinding.example is at 127.0.0.1, which is not public" in caplog.text
    assert (len(connected), neighbour.requests) == (1, [])


def test_tls_is_for_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The certificate must be that of the name in the URL, though an address is connected to."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    asked = list[str | None]()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    context.sni_callback = lambda _, name, __: asked.append(name)
    with Neighbour(context).running() as neighbour:
        neighbour.answer = lambda _: Reply(body=b"hello")
        url = f"https://localhost:{neighbour.port}/"
        assert read(url, "localhost") == b"hello"
        with pytest.raises(RequestFailed, match="certificate verify failed"):
            read(neighbour.url, "127.0.0.1")
    assert asked == ["localhost", None]


def test_proxies_are_not_asked(monkeypatch: pytest.MonkeyPatch, neighbour: Neighbour) -> None:
    """The environment's proxy is not used, since it would connect to what nobody has checked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert read(neighbour.url, "127.0.0.1")


@pytest.mark.parametrize("promise", [b"HTTP/1.1 200 OK\r\nx-drip: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_drips(promise: bytes) -> None:
    """A server that sends a byte from time to time does not prolong the deadline."""
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(promise)
            while not over.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        address = listener.getsockname()
        try:
            began = time.monotonic()
            with pytest.raises(RequestFailed, match="time"):
                read(f"http://127.0.0.1:{address[1]}/", "127.0.0.1", seconds=0.5)
            assert time.monotonic() - began < 10
        finally:
            over.set()
            socket.create_connection(address).close()  # it may have waited for somebody in vain
            thread.join()
