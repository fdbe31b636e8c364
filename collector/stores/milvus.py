"""Milvus, or Milvus Lite in a local path: a collection, whose properties have the mark."""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import grpc
from pymilvus import DataType, MilvusClient, MilvusException
from pymilvus.exceptions import ConnectionConfigException

from embedfarm.collector.stores.address import StoreAddress
from embedfarm.collector.stores.store import Element, Found, RowShape, StoreError, StoreRows

MARK: Final = "embedfarm"
ID_BYTES_MAX: Final = 1024
TIMEOUT_SECONDS: Final = 60.0
PAGE_ROWS: Final = 16_000  # at most 16,384; Milvus Lite takes as long for a page of few
ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r"})
TYPES: Final = {DataType.FLOAT_VECTOR: "float32"}
# Codes of Milvus: not ready, not there, out of memory, too many requests, out of disk, too fast,
# and beyond a quota.
PASSING: Final = frozenset({1, 2, 3, 4, 7, 8, 9})


class Milvus:
    """A collection; ids are texts of up to `ID_BYTES_MAX` bytes.

    A URL without a host names a path of Milvus Lite, which one process at a time may open.
    """

    elements: Sequence[Element] = ("float32",)
    rows_max = 1000
    bytes_max = 4 << 20

    def __init__(self, address: StoreAddress) -> None:
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it logs what it raises as well
        self._name = address.collection
        self._address = address
        self._open: Any = None
        self._loaded = False

    @property
    def _client(self) -> Any:  # noqa: ANN401 # it ships no types
        """The client, which connects when it is first asked."""
        if self._open is None:
            self._open = _connect(self._address)
        return self._open

    def find(self) -> Found | None:
        """Return the collection's fields and properties."""
        if not self._client.has_collection(self._name):
            return None
        facts = self._client.describe_collection(self._name)
        fields = {field["name"]: field for field in facts["fields"]}
        if not {"id", "embedding"} <= fields.keys():
            raise StoreError(f"collection {self._name} has no fields id and embedding")
        vectors = fields["embedding"]
        return Found(
            int(vectors["params"].get("dim", 0)),
            TYPES.get(vectors["type"], str(vectors["type"])),
            facts.get("properties", {}).get(MARK, ""),
            "index" not in fields,
        )

    def create(self, shape: RowShape, mark: str) -> None:
        """Make the collection, for searches by cosine."""
        if self._client.has_collection(self._name):
            return
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=ID_BYTES_MAX)
        if not shape.ids:
            schema.add_field("index", DataType.INT64)
        schema.add_field("embedding", DataType.FLOAT_VECTOR, dim=shape.dimensions)
        index = self._client.prepare_index_params()
        index.add_index("embedding", index_type="AUTOINDEX", metric_type="COSINE")
        self._client.create_collection(
            self._name,
            schema=schema,
            index_params=index,
            properties={MARK: mark},
            timeout=TIMEOUT_SECONDS,
        )

    def write_mark(self, mark: str) -> None:
        """Put the mark among the collection's properties."""
        self._client.alter_collection_properties(self._name, {MARK: mark}, timeout=TIMEOUT_SECONDS)

    def upsert(self, rows: StoreRows, shape: RowShape) -> None:
        """Write entities by their ids."""
        data: list[dict[str, Any]] = [
            {"id": name, "embedding": vector}
            for name, vector in zip(rows.names, rows.matrix, strict=True)
        ]
        if not shape.ids:
            for entity, index in zip(data, rows.indices.tolist(), strict=True):
                entity["index"] = index
        self._client.upsert(self._name, data, timeout=TIMEOUT_SECONDS)

    def delete(self, names: Sequence[str]) -> None:
        """Delete entities by their ids."""
        listed = ", ".join(map(_literal, names))
        self._client.delete(self._name, filter=f"id in [{listed}]", timeout=TIMEOUT_SECONDS)

    def count(self) -> int:
        """Count the entities, all writes seen."""
        self._load()
        answer = self._client.query(
            self._name,
            output_fields=["count(*)"],
            consistency_level="Strong",
            timeout=TIMEOUT_SECONDS,
        )
        return int(answer[0]["count(*)"])

    def pages(self) -> Iterator[Sequence[str]]:
        """Yield all ids, batch by batch, each from an iterator of its own.

        The client's iterators put the id that they go on behind into a filter as it is.
        """
        self._load()
        names = self._page("")
        while names:
            yield names
            names = self._page(f"id > {_literal(names[-1])}")

    def _page(self, condition: str) -> list[str]:
        """Return the first ids, in their order, of entities for which a condition holds."""
        pages = self._client.query_iterator(
            self._name,
            filter=condition,
            batch_size=PAGE_ROWS,
            output_fields=["id"],
            consistency_level="Strong",
        )
        names = [entity["id"] for entity in pages.next()]
        pages.close()
        return names

    def key(self, name: str) -> str:
        """Return the name itself."""
        return name

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete entities by their ids."""
        self.delete(keys)

    def finish(self) -> None:
        """Have the collection loaded, so that searches find it ready."""
        self._load()

    def may_pass(self, error: Exception) -> bool:
        """Tell whether the server was not there, or had no resources."""
        if isinstance(error, MilvusException):
            return error.code in PASSING or isinstance(error.code, grpc.StatusCode)
        return isinstance(error, grpc.RpcError)

    def close(self) -> None:
        """Close the client; Milvus Lite stops with it."""
        if self._open is not None:
            self._open.close()

    def _load(self) -> None:
        """Have the collection loaded, which one is not after a restart of Milvus Lite."""
        self._client.load_collection(self._name, timeout=TIMEOUT_SECONDS)


def _literal(name: str) -> str:
    """Return an id as a literal of a filter.

    The client does not escape ids, and Milvus Lite takes no parameters of a filter.
    """
    return f'"{name.translate(ESCAPES)}"'


def _connect(address: StoreAddress) -> Any:  # noqa: ANN401 # it ships no types
    """Return a client of a server, or of a path if the address has no host.

    Raises:
        StoreError: The path cannot be opened, such as while another process has it open.
    """
    if not address.host:
        try:
            return MilvusClient(address.path)
        except ConnectionConfigException as error:
            raise StoreError(f"{address.path} cannot be opened: {error.__cause__}") from error
    scheme = "https" if address.secure else "http"
    token = f"{address.user}:{address.password}" if address.password else address.user
    return MilvusClient(
        f"{scheme}://{address.host}:{address.port or 19530}",
        token=token or os.environ.get("MILVUS_TOKEN", ""),
        db_name=address.path.strip("/"),
        timeout=TIMEOUT_SECONDS,
    )
