"""A client of a server that embeds, by the protocol that OpenAI's `/v1/embeddings` has."""

import base64
import math
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2
import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.model_files import ModelError
from embedfarm.contract.redaction import hide_secrets
from embedfarm.workers.engines.engine import DeviceAway, ModelUnavailable

TEXTS_MAX: Final = 32  # in a request: as many as TEI takes unless it is told otherwise
CONNECT_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 0.1
PAUSE_SECONDS_MAX: Final = 2.0
REASON_CHARACTERS: Final = 300  # of what a server says of a request that it refuses
BUSY: Final = frozenset({429, 502, 503, 504})  # statuses of a server that may answer later


class RequestRefused(RuntimeError):
    """Raised when a server answers, but not with vectors; the message says what it answers."""


class Busy(Exception):
    """Raised when a server has no answer now.

    Attributes:
        seconds: Time after which it wants to be asked again, 0 if it does not say.
    """

    def __init__(self, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


class Item(msgspec.Struct):
    """A vector in an answer.

    Attributes:
        index: Place of its text in the request.
        embedding: Its components, or their bytes, as little-endian float32, in base64.
    """

    index: int
    embedding: str | list[float]


class Answer(msgspec.Struct):
    """What the farm reads of an answer with vectors."""

    data: list[Item]


class ServedModel(msgspec.Struct):
    """One of the models that a server names."""

    id: str


class ServedModels(msgspec.Struct):
    """The models that a server names."""

    data: list[ServedModel]


@dataclass(eq=False)
class EndpointClient:
    """Asks a server for vectors; safe between threads.

    Attributes:
        url: What stands before `/embeddings`, such as "http://host:8080/v1".
        requests_max: Requests at a time.
        patience_seconds: How long a server may be away, or busy, before a request is given up.
        key: API key, "" for none.
        model: Name that the server knows the model by.
    """

    url: str
    requests_max: int
    patience_seconds: float
    key: str = field(default="", repr=False)
    model: str = ""
    _client: httpx2.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        # How long a device batch may take is for the watchdog to say.
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        limits = httpx2.Limits(max_connections=self.requests_max)
        self._client = httpx2.Client(headers=headers, timeout=timeout, limits=limits)
        weakref.finalize(self, self._client.close)

    @property
    def shown(self) -> str:
        """The URL without secrets."""
        return hide_secrets(self.url)

    def find_model(self, wanted: str) -> str:
        """Return the name by which a server knows a model: that name, or the only one it has.

        Raises:
            ModelUnavailable: The server is away.
            ModelError: It has no such model.
        """
        try:
            models = self._persist("GET", "/models")
        except RequestRefused:
            return wanted  # not every server has a list
        except DeviceAway as error:
            raise ModelUnavailable(str(error)) from error
        names: list[str] = [each.id for each in _read(models, ServedModels).data]
        if wanted in names or not names:
            return wanted
        if len(names) == 1:
            return names[0]
        raise ModelError(f"{self.shown} has no model {wanted!r}, but {', '.join(names)}")

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts, shape (texts, dimensions), as the server gives them.

        Raises:
            DeviceAway: The server does not answer, or wants to be asked later, for longer than it
                is waited for.
            RequestRefused: It does not take this request.
        """
        request = {"model": self.model, "input": list(texts), "encoding_format": "base64"}
        answer = _read(self._persist("POST", "/embeddings", request), Answer)
        items = sorted(answer.data, key=lambda item: item.index)
        if [item.index for item in items] != list(range(len(texts))):
            raise RequestRefused(f"{len(texts)} texts were sent, and {len(items)} vectors came")
        vectors = [_components(item.embedding) for item in items]
        if len({len(vector) for vector in vectors}) > 1:
            raise RequestRefused("the vectors of one answer differ in their dimensions")
        return np.stack(vectors)

    def _persist(self, method: str, path: str, request: object = None) -> bytes:
        """Return the body of an answer; ask again while the server is away or busy."""
        until, pause = time.monotonic() + self.patience_seconds, FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._ask(method, path, request)
            except (Busy, httpx2.TransportError) as error:
                wait = max(pause, error.seconds if isinstance(error, Busy) else 0.0)
                if time.monotonic() + wait > until:
                    reason = str(error) or type(error).__name__
                    raise DeviceAway(f"{self.shown} does not embed now: {reason}") from error
                threading.Event().wait(wait)
                pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def _ask(self, method: str, path: str, request: object) -> bytes:
        content = None if request is None else msgspec.json.encode(request)
        headers = {"content-type": "application/json"} if content else {}
        url = self.url.rstrip("/") + path
        answer = self._client.request(method, url, content=content, headers=headers)
        if answer.status_code in BUSY:
            raise Busy(_says(answer), _seconds(answer.headers.get("retry-after", "")))
        if not answer.is_success:
            raise RequestRefused(_says(answer))
        return answer.content


def _says(answer: httpx2.Response) -> str:
    """Return what a server answers in place of vectors, for people."""
    return f"HTTP status {answer.status_code}: {answer.text[:REASON_CHARACTERS]}"


def _seconds(retry_after: str) -> float:
    """Read the seconds of a `Retry-After`; 0 for none, or a date."""
    try:
        seconds = float(retry_after)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _read(body: bytes, kind: type[Any]) -> Any:  # noqa: ANN401 # the kind that was given
    """Read the body of an answer.

    Raises:
        RequestRefused: It is something else.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise RequestRefused(f"an answer that is not the protocol's: {error}") from error


def _components(embedding: str | list[float]) -> NDArray[np.float32]:
    """Return the components of a vector.

    Raises:
        RequestRefused: They cannot be read.
    """
    if not isinstance(embedding, str):
        return np.asarray(embedding, np.float32)
    try:
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
    except ValueError as error:
        raise RequestRefused(f"a vector that cannot be read: {error}") from error
