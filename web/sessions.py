"""Who has signed in on the pages: a random id in a cookie, of which the server keeps a hash."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import redis

from embedfarm import wire
from web.keys import Key

COOKIE: Final = "embedfarm_session"
SECRET_BYTES: Final = 32


@dataclass(frozen=True)
class Sessions:
    """Sessions on the farm's server, so that any `serve` knows them.

    What is kept of a key is its SHA-256, so that a session ends with its key.

    Attributes:
        client: Of the server.
        keys: Who may sign in.
        seconds: Life of a session.
    """

    client: redis.Redis
    keys: Sequence[Key]
    seconds: int

    def begin(self, key: Key) -> str:
        """A new session's secret, for the cookie alone."""
        secret = secrets.token_urlsafe(SECRET_BYTES)
        self.client.set(_place(secret), key.sha256, ex=self.seconds)
        return secret

    def find(self, secret: str) -> Key | None:
        """The key with which a session was begun; None if it has ended, or the key is none now."""
        digest = cast("bytes | None", self.client.get(_place(secret)))
        return next((key for key in self.keys if key.sha256.encode() == digest), None)

    def end(self, secret: str) -> None:
        """Forget a session."""
        self.client.delete(_place(secret))


def _place(secret: str) -> str:
    return wire.session_key(hashlib.sha256(secret.encode(errors="replace")).hexdigest())
