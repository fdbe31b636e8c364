"""API keys: who may ask for what. Only their SHA-256 is kept."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

PREFIX: Final = "ef_"  # by which a key is recognised where it does not belong
SECRET_BYTES: Final = 32

_NAME: Final = re.compile(r"[\w.@-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Scope(StrEnum):
    """What a key may do; `ADMIN` includes the others."""

    SUBMIT = "submit"
    READ = "read"
    ADMIN = "admin"


class KeysError(ValueError):
    """Keys that cannot be used; the message says where and why."""


@dataclass(frozen=True)
class Key:
    """A key without its secret.

    Attributes:
        name: For logs and limits.
        scopes: What it may do.
        sha256: Of the secret, in hexadecimal.
    """

    name: str
    scopes: frozenset[Scope]
    sha256: str = ""

    def allows(self, scope: Scope) -> bool:
        """Whether who has this key may do that."""
        return bool(self.scopes & {scope, Scope.ADMIN})

    def line(self) -> str:
        """What `read_keys` reads."""
        return f"{self.name} {','.join(sorted(self.scopes))} {self.sha256}"


ANYBODY: Final = Key("anybody", frozenset({Scope.ADMIN}))  # where no key is asked for


def make_key(name: str, scopes: Collection[str]) -> tuple[str, Key]:
    """A new random secret, and its key.

    Raises:
        KeysError: The name or a scope is none.
    """
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    return secret, _parse(f"{name} {','.join(scopes)} {_digest(secret)}")


def read_keys(path: Path) -> list[Key]:
    """The keys of a file: `name scope[,scope] sha256` in a line; blank lines and # lines are left.

    Raises:
        KeysError: The file cannot be read, a line is not of that form, or a name comes twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"keys: {error}") from error
    keys: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            key = _parse(line)
        except KeysError as error:
            raise KeysError(f"{path}:{number}: {error}") from error
        if key.name in keys:
            raise KeysError(f"{path}:{number}: there is a key {key.name!r} already")
        keys[key.name] = key
    return list(keys.values())


def find_key(keys: Sequence[Key], secret: str) -> Key | None:
    """The key of a secret; it takes as long whichever it is, and if it is none."""
    digest = _digest(secret)
    found = [key for key in keys if hmac.compare_digest(key.sha256, digest)]
    return found[0] if found else None


def _parse(line: str) -> Key:
    words = line.split()
    if len(words) != 3:  # noqa: PLR2004 -- name, scopes, digest
        raise KeysError("not of the form: name scope[,scope] sha256")
    name, scopes, digest = words
    if not _NAME.fullmatch(name):
        raise KeysError("a name has 1 to 64 letters, digits and . _ @ -")
    if not _DIGEST.fullmatch(digest):
        raise KeysError("a SHA-256 has 64 digits, in lower case")
    try:
        return Key(name, frozenset(map(Scope, scopes.split(","))), digest)
    except ValueError as error:
        raise KeysError(f"{scopes!r}: scopes are {', '.join(Scope)}") from error


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
