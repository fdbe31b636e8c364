"""The HTTP server: uvicorn, with limits that it lacks by itself.

uvicorn limits connections, the size of a head that comes in pieces, and the time between requests.
The time for a head to arrive is limited here, its whole size and the time for a body in the gate.
"""

import asyncio
import contextlib
import ctypes
import gc
import socket
from http import HTTPStatus
from typing import Final

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from embedfarm.contract.settings import Settings
from embedfarm.contract.systemd_notify import Notifier
from embedfarm.web.gate import HEAD_BYTES_MAX
from embedfarm.web.http.problems import MEDIA_TYPE, SECURITY_HEADERS, Problem

BACKLOG: Final = 128
M_MMAP_THRESHOLD: Final = -3  # of malloc.h
M_ARENA_MAX: Final = -8
LARGE_BYTES: Final = 1 << 17  # glibc's first value, which it raises when larger blocks are freed
ARENAS_MAX: Final = 2
TOO_SLOW: Final = "the head came too slowly"


class _Protocol(H11Protocol):
    """HTTP/1.1 that refuses a head that is late or no HTTP, in the shape of every other error."""

    head_seconds: float
    _give_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as its base
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Take data, and wait for a head from the end of a request to the head's last byte."""
        super().data_received(data)
        self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse a head that cannot be read, whatever path it names, and close."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for a head."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._give_up is None:
            self._give_up = self.loop.call_later(
                self.head_seconds, self._refuse, HTTPStatus.REQUEST_TIMEOUT, TOO_SLOW
            )

    def _stop_waiting(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        problem = Problem(title=status.phrase, status=status, detail=detail)
        body = problem.model_dump_json().encode()
        headers = {
            "content-type": MEDIA_TYPE,
            "content-length": str(len(body)),
            "connection": "close",
            **SECURITY_HEADERS,
        }
        head = h11.Response(status_code=status, headers=[*headers.items()], reason=status.phrase)
        for event in (head, h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def patient_for(seconds: float) -> type[H11Protocol]:
    """Return a protocol that closes connections on which a request's head takes longer."""
    return type("Protocol", (_Protocol,), {"head_seconds": seconds})


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that takes connections, at a free port if `port` is 0.

    Raises:
        OSError: The address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # Its connections inherit it: a body would wait, 40 ms and more, until its head is acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _give_memory_back() -> None:
    """Have large blocks returned to the system once they are free, and take few arenas.

    glibc keeps tens of megabytes for each thread otherwise, once large bodies were freed there.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_ARENA_MAX, ARENAS_MAX)


class Server(uvicorn.Server):
    """uvicorn's server, which ends streams first: its connections would not end by themselves.

    Args:
        config: uvicorn's configuration.
        notifier: Notifier that is told each time the loop goes round while the server listens.
    """

    def __init__(self, config: uvicorn.Config, notifier: Notifier) -> None:
        super().__init__(config)
        self._notifier = notifier

    async def on_tick(self, counter: int) -> bool:
        """Tell the service manager that the event loop is alive, then do what uvicorn does."""
        self._notifier.tick("serving")
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the notifier and end all streams, then shut down like the base."""
        self._notifier.stop()
        await self.config.app.state.watch.close()  # type: ignore[union-attr] # an application
        await super().shutdown(sockets)


def make_server(app: FastAPI, settings: Settings, notifier: Notifier) -> uvicorn.Server:
    """Make a server that on SIGTERM or SIGINT answers requests in work, for half the drain time.

    What is loaded by now stays, and is not looked through for garbage again and again: among a
    body's objects that would hold everybody up for a tenth of a second.
    """
    gc.freeze()
    _give_memory_back()
    return Server(
        uvicorn.Config(
            app,
            http=patient_for(settings.http_head_seconds),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=settings.http_connections_max,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            timeout_graceful_shutdown=int(settings.drain_seconds / 2),
        ),
        notifier,
    )
