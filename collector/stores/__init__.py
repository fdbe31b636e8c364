"""Vector stores that outputs are exported to, behind one small protocol."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Final, TypeAlias

from embedfarm.collector.stores.address import StoreAddress
from embedfarm.collector.stores.store import Store, StoreError

StoreKind: TypeAlias = Callable[[StoreAddress], Store]
ENTRY_POINTS: Final = "embedfarm.stores"
STORES: Final[Mapping[str, str]] = {
    "qdrant": "qdrant:Qdrant",
    "postgresql": "postgresql:PostgreSql",
    "milvus": "milvus:Milvus",
    "lancedb": "lancedb:LanceDb",
}
"""Module and class of our own stores by name; installed packages bring others."""


def store_names() -> tuple[str, ...]:
    """Return the names of all stores: our own, and those that installed packages bring."""
    others = sorted(each.name for each in entry_points(group=ENTRY_POINTS))
    return (*STORES, *(name for name in others if name not in STORES))


def open_store(address: StoreAddress) -> Store:
    """Return the collection at an address; the store need not answer yet.

    Raises:
        StoreError: There is no such kind of store, or its client is not installed.
    """
    return _store_kind(address.kind)(address)


def _store_kind(name: str) -> StoreKind:
    """Return what opens a kind of store; its client is imported by that."""
    if name in STORES:
        module, _, attribute = STORES[name].partition(":")
        try:
            found: StoreKind = getattr(import_module(f"{__name__}.{module}"), attribute)
        except ModuleNotFoundError as error:
            raise StoreError(
                f"{name} needs the package {error.name}: pip install 'embedfarm[{name}]'"
            ) from error
        return found
    for each in entry_points(group=ENTRY_POINTS, name=name):
        try:
            found = each.load()
        except Exception as error:
            raise StoreError(f"store {name!r} of {each.value} does not load: {error}") from error
        return found
    raise StoreError(f"no store {name!r}; there are {', '.join(store_names())}")
