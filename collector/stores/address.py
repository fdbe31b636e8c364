"""Where a vector store is: its URL, taken apart."""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from embedfarm.collector.manifest import OutputError
from embedfarm.contract.redaction import hide_in_word


class StoreAddress(NamedTuple):
    """Parts of a store's URL, `KIND://USER:PASSWORD@HOST:PORT/PATH?OPTIONS#COLLECTION`.

    Attributes:
        url: The URL as it was given.
        kind: Name of the store's kind.
        secure: Whether the scheme ends with "+https".
        host: Name of the server; "" for a store in a local path.
        port: Port of the server; None for the usual one.
        user: Name of the user, or "".
        password: Password or key, or "".
        path: Path of a local store, or of a database on the server, with its slash.
        options: Options by name.
        collection: Name of the collection or table.
    """

    url: str
    kind: str
    secure: bool
    host: str
    port: int | None
    user: str
    password: str
    path: str
    options: Mapping[str, str]
    collection: str

    @property
    def shown(self) -> str:
        """The URL for people, without its secrets."""
        place = hide_in_word(self.url.partition("#")[0])
        return f"{place}#{self.collection}"

    @property
    def digest(self) -> str:
        """Name of the collection in file names: the same whoever asks, by whatever options."""
        port = "" if self.port is None else f":{self.port}"
        place = f"{self.kind}://{self.host}{port}{self.path}#{self.collection}"
        return hashlib.sha256(place.encode()).hexdigest()[:16]


def parse_address(url: str) -> StoreAddress:
    """Take a store's URL apart.

    Raises:
        OutputError: It is no such URL, or names no collection.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise OutputError(f"the URL of a store cannot be read: {error}") from error
    kind, _, protocol = parts.scheme.partition("+")
    if not kind or protocol not in {"", "https"} or not (parts.hostname or parts.path):
        raise OutputError(f"{hide_in_word(url)!r} is not the URL of a store")
    if not parts.fragment:
        raise OutputError(
            f"{hide_in_word(url)} names no collection: it comes last, as in {kind}://…#documents"
        )
    return StoreAddress(
        url,
        kind,
        protocol == "https",
        parts.hostname or "",
        port,
        unquote(parts.username or ""),
        unquote(parts.password or ""),
        unquote(parts.path),
        dict(parse_qsl(parts.query)),
        unquote(parts.fragment),
    )
