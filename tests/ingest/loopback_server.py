"""A server on loopback, for URLs that a user may name."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ssl import SSLContext
from typing import NamedTuple


class Request(NamedTuple):
    """A request that came, with its headers by name in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Reply(NamedTuple):
    """A reply to send; a header of "" is left out, and content-length may be a false one."""

    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012 -- nobody changes it
    body: bytes = b""


class Neighbour:
    """A server that answers as it is told, and remembers the requests that came.

    Args:
        tls: TLS context with the server's certificate; None for plain HTTP.

    Attributes:
        answer: Function that makes the reply to a request.
        requests: Requests that came.
    """

    def __init__(self, tls: SSLContext | None = None) -> None:
        self.answer: Callable[[Request], Reply] = lambda _: Reply()
        self.requests = list[Request]()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.port = self._server.server_address[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        neighbour = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("content-length", 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, self.rfile.read(size))
                neighbour.requests.append(request)
                reply = neighbour.answer(request)
                self.send_response(reply.status)
                length = {} if reply.status == 304 else {"content-length": str(len(reply.body))}
                for name, value in (length | reply.headers).items():
                    if value:
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

            do_POST = do_GET  # noqa: N815 -- as the library names it

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- as above
                del format, args

        return Handler

    @contextmanager
    def running(self) -> Iterator["Neighbour"]:
        """Answer until the end of the block."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
