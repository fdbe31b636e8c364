"""Sessions of the pages: a random id in a cookie, of which the server keeps a hash."""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Final, cast

import redis

from embedfarm.contract import wire
from embedfarm.web.auth.keys import Key, Keyring

COOKIE: Final = "embedfarm_session"
SECRET_BYTES: Final = 32


@dataclass(frozen=True)
class Sessions:
    """Sessions on the farm's server, so that any `serve` knows them.

    The SHA-256 of its key is kept with a session, so that the session ends with its key.

    Attributes:
        client: Client of the farm's server.
        keys: Keys of those who may sign in.
        seconds: Life of a session, in seconds.
    """

    client: redis.Redis
    keys: Keyring
    seconds: int

    def begin(self, key: Key) -> str:
        """Begin a session, and return its secret, which is for the cookie alone."""
        secret = secrets.token_urlsafe(SECRET_BYTES)
        self.client.set(_place(secret), key.sha256, ex=self.seconds)
        return secret

    def find(self, secret: str) -> Key | None:
        """Find the key with which a session was begun; None if it has ended or the key is gone."""
        digest = cast("bytes | None", self.client.get(_place(secret)))
        return None if digest is None else self.keys.known(digest.decode(errors="replace"))

    def end(self, secret: str) -> None:
        """Forget a session."""
        self.client.delete(_place(secret))


def _place(secret: str) -> str:
    return wire.session_key(hashlib.sha256(secret.encode(errors="replace")).hexdigest())
