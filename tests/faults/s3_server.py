"""Server of S3 that does what stores do on bad days, as a process of its own.

    python -m tests.faults.s3_server --port N [--seed N] [--share S]

A share of all requests is answered late, or by 503 Slow Down. A share of the puts is done, though
the connection breaks before the answer. A listing lacks what was put within the last moment.
"""

import argparse
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Final

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.wrappers import Response

SLOW_SECONDS: Final = 0.3
BEHIND_SECONDS: Final = 0.5  # for which a listing lacks what was put
SLOW_DOWN: Final = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
ENTRY: Final = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
KEY: Final = re.compile(rb"<Key>(.*?)</Key>")

Environ = dict[str, Any]
Start = Callable[..., Any]
Application = Callable[[Environ, Start], Iterable[bytes]]


class Faulty:
    """An application that passes requests on to another one, and sometimes fails.

    Args:
        inner: The application.
        random: Decides which requests fail.
        share: Share of the requests that each kind of fault strikes.
    """

    def __init__(self, inner: Application, random: Random, share: float) -> None:
        self._inner, self._random, self._share = inner, random, share
        self._put_at: dict[bytes, float] = {}
        self._lock = threading.Lock()  # moto's stores are of one thread
        self._ended = threading.Event()  # the process, so that nobody sets it

    def __call__(self, environ: Environ, start: Start) -> Iterable[bytes]:
        """Answer a request, or let it fail."""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if self._strikes():
            self._ended.wait(self._random.uniform(0.0, SLOW_SECONDS))
        if self._strikes():
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [SLOW_DOWN]
        with self._lock:
            response = Response.from_app(self._inner, environ, buffered=True)
            if method == "PUT":
                self._put_at[path.split("/", 2)[-1].encode()] = time.monotonic()
        if method == "PUT" and self._strikes():
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("the reply is lost")
        if method == "GET" and "list-type" in environ["QUERY_STRING"]:
            response.data = ENTRY.sub(self._if_known, response.data)
        return response(environ, start)

    def _strikes(self) -> bool:
        return self._random.random() < self._share

    def _if_known(self, entry: re.Match[bytes]) -> bytes:
        """Return an entry of a listing, or nothing in its place if it is too new."""
        key = KEY.search(entry[0])
        put_at = 0.0 if key is None else self._put_at.get(key[1], 0.0)
        return b"" if time.monotonic() < put_at + BEHIND_SECONDS else entry[0]


def main() -> None:
    """Serve on the loopback interface until somebody ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.0)
    arguments = parser.parse_args()
    inner = DomainDispatcherApplication(create_backend_app)
    application = Faulty(inner, Random(arguments.seed), arguments.share)
    run_simple("127.0.0.1", arguments.port, application, threaded=True)


if __name__ == "__main__":
    main()
