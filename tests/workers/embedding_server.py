"""A server that embeds by OpenAI's protocol, and has the failings that such servers have."""

import base64
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from numpy.typing import NDArray

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
Refusal = tuple[int, dict[str, str], str]


class EmbeddingServer:
    """A server in threads of the test.

    Attributes:
        embed: The model.
        names: Models that it says it has; None for a server that has no such list.
        key: API key that it wants, "" for none.
        base64: Whether it knows vectors in base64.
        texts_max: Most texts in a request.
        refusals: Answers to the next requests for vectors, in place of vectors.
        takes: Whether it takes a text.
        is_busy: Whether it has no time now for a request of these texts.
        requests: Texts of each request for vectors that came.
        port: Where it listens, also when it was stopped and started again.
    """

    def __init__(self, embed: Embed) -> None:
        self.embed = embed
        self.names: list[str] | None = ["some-model"]
        self.key = ""
        self.base64 = True
        self.texts_max = 32
        self.refusals: deque[Refusal] = deque()
        self.takes: Callable[[str], bool] = lambda _text: True
        self.is_busy: Callable[[Sequence[str]], bool] = lambda _texts: False
        self.requests: list[list[str]] = []
        self.port = 0
        self._lock = threading.Lock()  # a model's tokenizer has one user at a time
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """What stands before `/embeddings`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Listen at its port."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        """Listen no more, and close the connections that there are."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server = None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            """Answers one request on each connection, so that none outlives the server."""

            def do_GET(self) -> None:  # http.server calls it by this name
                """List the models by name."""
                if server.names is None:
                    self._send(404, {}, "there is no such page")
                else:
                    data = [{"id": name, "object": "model"} for name in server.names]
                    self._send(200, {}, json.dumps({"object": "list", "data": data}))

            def do_POST(self) -> None:  # as above
                """Answer with vectors, or not."""
                body = self.rfile.read(int(self.headers["content-length"]))
                self._send(*server.answer(json.loads(body), dict(self.headers)))

            def _send(self, status: int, headers: dict[str, str], body: str) -> None:
                data = body.encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Log nothing of it."""

        return Handler

    def answer(self, request: dict[str, Any], headers: dict[str, str]) -> Refusal:
        """Answer a request for vectors: status, headers and body."""
        texts = request["input"]
        with self._lock:
            self.requests.append(texts)
            if self.key and headers.get("authorization") != f"Bearer {self.key}":
                return 401, {}, "no such key"
            if self.refusals:
                return self.refusals.popleft()
            if self.is_busy(texts):
                return 503, {}, "shutting down"
            if len(texts) > self.texts_max or not all(map(self.takes, texts)):
                return 422, {}, "these texts are not to our liking"
            vectors = self.embed(texts).astype("<f4")
        in_base64 = self.base64 and request["encoding_format"] == "base64"
        data = [
            {"index": index, "embedding": _base64(vector) if in_base64 else vector.tolist()}
            for index, vector in enumerate(vectors)
        ]
        return 200, {}, json.dumps({"object": "list", "data": data[::-1]})


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.tobytes()).decode()


@contextmanager
def listening(server: EmbeddingServer) -> Iterator[EmbeddingServer]:
    """Have a server listen for the time of the block."""
    server.start()
    try:
        yield server
    finally:
        server.stop()
