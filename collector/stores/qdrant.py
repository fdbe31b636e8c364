"""Qdrant: a collection of points, on a server or in a directory of this machine."""

import os
import uuid
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any, Final

from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from embedfarm.collector.stores.address import StoreAddress
from embedfarm.collector.stores.store import Element, Found, RowShape, StoreError, StoreRows

MARK: Final = "embedfarm"
NAMES: Final = uuid.UUID("8f9f4b5e-5a54-4ba0-8a6f-0c6bd3d5a1f4")  # namespace of the ids of points
NUMBER_MAX: Final = (1 << 64) - 1
TIMEOUT_SECONDS: Final = 60
DATATYPES: Final[dict[Element, models.Datatype]] = {
    "float32": models.Datatype.FLOAT32,
    "float16": models.Datatype.FLOAT16,
}
PASSING: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


class Qdrant:
    """A collection; the id of a point is the corpus's own where Qdrant takes it, or made of it.

    A URL without a host names a directory, which one process at a time may open.
    """

    elements: Sequence[Element] = tuple(DATATYPES)
    rows_max = 1000
    bytes_max = 1 << 20

    def __init__(self, address: StoreAddress) -> None:
        self._name = address.collection
        self._address = address
        self._open: QdrantClient | None = None

    @property
    def _client(self) -> QdrantClient:
        """The client, which opens a directory when it is first asked."""
        if self._open is None:
            self._open = _connect(self._address)
        return self._open

    def find(self) -> Found | None:
        """Return the collection's parameters and metadata."""
        if not self._client.collection_exists(self._name):
            return None
        config = self._client.get_collection(self._name).config
        vectors = config.params.vectors
        if not isinstance(vectors, models.VectorParams):
            raise StoreError(f"collection {self._name} has vectors with names of their own")
        datatype = vectors.datatype or models.Datatype.FLOAT32
        return Found(vectors.size, datatype.value, str((config.metadata or {}).get(MARK, "")))

    def create(self, shape: RowShape, mark: str) -> None:
        """Make the collection, for searches by cosine."""
        if self._client.collection_exists(self._name):
            return
        params = models.VectorParams(
            size=shape.dimensions,
            distance=models.Distance.COSINE,
            datatype=DATATYPES[shape.element],
        )
        self._client.create_collection(self._name, vectors_config=params, metadata={MARK: mark})

    def write_mark(self, mark: str) -> None:
        """Put the mark among the collection's metadata."""
        self._client.update_collection(self._name, metadata={MARK: mark})

    def upsert(self, rows: StoreRows, shape: RowShape) -> None:
        """Write points, each with its id in the corpus, or its index, as payload."""
        payloads: list[dict[str, Any]] = [{"id": name} for name in rows.names]
        if not shape.ids:
            for payload, index in zip(payloads, rows.indices.tolist(), strict=True):
                payload["index"] = index
        batch = models.Batch(
            ids=[point_id(name) for name in rows.names],
            vectors=rows.matrix.tolist(),
            payloads=payloads,
        )
        self._client.upsert(self._name, batch, wait=True)

    def delete(self, names: Sequence[str]) -> None:
        """Delete points by the names that their ids are made of."""
        self._delete([point_id(name) for name in names])

    def count(self) -> int:
        """Count the points exactly."""
        return self._client.count(self._name, exact=True).count

    def pages(self) -> Iterator[Sequence[str]]:
        """Yield the ids of all points, page by page."""
        after: Any = None
        while True:
            points, after = self._client.scroll(
                self._name,
                limit=self.rows_max,
                offset=after,
                with_payload=False,
                with_vectors=False,
            )
            yield [str(point.id) for point in points]
            if after is None:
                return

    def key(self, name: str) -> str:
        """Return the id of a point as text."""
        return str(point_id(name))

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete points by their ids."""
        self._delete([int(key) if key.isdecimal() else key for key in keys])

    def finish(self) -> None:
        """Do nothing: Qdrant builds its index by itself."""

    def may_pass(self, error: Exception) -> bool:
        """Tell whether the server was not there, had no resources, or failed by itself."""
        if isinstance(error, UnexpectedResponse):
            status = error.status_code or 0
            return status in PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return isinstance(error, (ResponseHandlingException, ResourceExhaustedResponse))

    def close(self) -> None:
        """Close the client, which lets go of a directory."""
        if self._open is not None:
            self._open.close()

    def _delete(self, ids: list[int | str]) -> None:
        points: list[models.ExtendedPointId] = list(ids)
        selector = models.PointIdsList(points=points)
        self._client.delete(self._name, selector, wait=True)


def point_id(name: str) -> int | str:
    """Return the id of the point of a row: the name itself if it is one, or else made of it.

    Qdrant takes numbers of 64 bits, and UUIDs.
    """
    if name.isascii() and name.isdecimal() and str(number := int(name)) == name:
        if number <= NUMBER_MAX:
            return number
    elif _is_uuid(name):
        return name
    return str(uuid.uuid5(NAMES, name))


def _is_uuid(name: str) -> bool:
    """Tell whether a name is a UUID in the form that Qdrant returns."""
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False


def _connect(address: StoreAddress) -> QdrantClient:
    """Return a client of a server, or of a directory if the address has no host.

    Raises:
        StoreError: Another process has the directory open.
    """
    if address.host:
        return QdrantClient(
            host=address.host,
            port=address.port or 6333,
            https=address.secure,
            api_key=address.password or address.user or os.environ.get("QDRANT_API_KEY"),
            timeout=TIMEOUT_SECONDS,
            check_compatibility=False,
        )
    try:
        return QdrantClient(path=address.path)
    except RuntimeError as error:
        raise StoreError(f"{address.path} cannot be opened: {error}") from error
