"""API keys with their scopes and tenants. Only their SHA-256 is kept."""

import hashlib
import hmac
import logging
import re
import secrets
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.scheduling_terms import TENANT_CHARACTERS_MAX

LOGGER: Final = logging.getLogger(__name__)

PREFIX: Final = "ef_"  # shows that it is a key, wherever it turns up
SECRET_BYTES: Final = 32

_NAME: Final = re.compile(r"[\w.@-]{1,64}")
_TENANT: Final = re.compile(rf"[\w.@-]{{1,{TENANT_CHARACTERS_MAX}}}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Scope(StrEnum):
    """Something that a key may do; `ADMIN` includes the others."""

    SUBMIT = "submit"
    READ = "read"
    ADMIN = "admin"


class KeysError(EmbedfarmError, ValueError):
    """Raised when keys cannot be used; the message says where and why."""

    exit_status = 2


@dataclass(frozen=True)
class Key:
    """A key without its secret.

    Attributes:
        name: Name in logs and for limits.
        scopes: Scopes of what the key may do.
        sha256: SHA-256 of the secret, in hexadecimal.
        tenant: Tenant whose jobs and files the key is for; those of others do not exist for it.
            None for a key of the farm's operator, who sees all.
    """

    name: str
    scopes: frozenset[Scope]
    sha256: str = ""
    tenant: str | None = None

    @property
    def owner(self) -> list[str]:
        """Words that name the key and its tenant, and no key of another tenant."""
        return [self.name] if self.tenant is None else [self.tenant, self.name]

    def allows(self, scope: Scope) -> bool:
        """Tell whether the key has a scope, or that of an administrator."""
        return bool(self.scopes & {scope, Scope.ADMIN})

    def line(self) -> str:
        """Return the key as a line of the file that `read_keys` reads."""
        words = [self.name, ",".join(sorted(self.scopes)), self.sha256]
        return " ".join(words if self.tenant is None else [*words, self.tenant])


ANYBODY: Final = Key("anybody", frozenset({Scope.ADMIN}))  # the caller where no key is asked for


def make_key(name: str, scopes: Collection[str], tenant: str | None = None) -> tuple[str, Key]:
    """Make a random secret and its key; without a tenant it is an operator's.

    Raises:
        KeysError: The name, a scope or the tenant is not valid.
    """
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    words = [name, ",".join(scopes), _digest(secret)]
    return secret, _key(words if tenant is None else [*words, tenant])


def read_keys(path: Path) -> list[Key]:
    """Read the keys of a file, which has a line `name scope[,scope] sha256 [tenant]` for each.

    Blank lines, and lines that begin with #, are left out.

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
            key = _key(line.split())
        except KeysError as error:
            raise KeysError(f"{path}:{number}: {error}") from error
        if key.name in keys:
            raise KeysError(f"{path}:{number}: there is a key {key.name!r} already")
        keys[key.name] = key
    return list(keys.values())


def find_key(keys: Sequence[Key], secret: str) -> Key | None:
    """Find the key of a secret, in the same time whichever it is; None if there is no such key."""
    digest = _digest(secret)
    found = [key for key in keys if hmac.compare_digest(key.sha256, digest)]
    return found[0] if found else None


@dataclass
class Keyring:
    """The keys that are valid now; safe between threads.

    A file of keys is read again when it has changed, so that a key is taken away or given while the
    program runs. A file that cannot be read changes nothing: the keys of before stay valid.

    Attributes:
        keys: Keys that are valid now.
        path: File that the keys come from; None where they do not change.
        asked: Whether a key is asked for at all. Without keys at the start nobody needs one; a file
            that has lost its last key admits nobody.
        problem: Error of the file as it is now, "" for none.
    """

    keys: Sequence[Key] = ()
    path: Path | None = None
    problem: str = ""
    _signature: tuple[int, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.asked = bool(self.keys)

    def refresh(self) -> None:
        """Read the file again if it has changed since it was read last."""
        with self._lock:
            signature = self._look()
            if self.path is None or signature == self._signature:
                return
            self._signature = signature
            try:
                self.keys, self.problem = read_keys(self.path), ""
            except KeysError as error:
                self.problem = str(error)
                LOGGER.error("the keys of before go on counting: %s", error)  # noqa: TRY400 -- the message says all
            else:
                LOGGER.info("%d keys count now", len(self.keys))

    def find(self, secret: str) -> Key | None:
        """Find the key of a secret; None if there is no such key."""
        return find_key(self.keys, secret)

    def known(self, sha256: str) -> Key | None:
        """Find the key with this SHA-256 as it is now; None if there is none any more."""
        return next((key for key in self.keys if key.sha256 == sha256), None)

    def _look(self) -> tuple[int, ...]:
        """Return a signature of the file that changes with it, () where there is no file."""
        try:
            found = self.path.stat() if self.path else None
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_size, found.st_ino) if found else ()


def _key(words: Sequence[str]) -> Key:
    """Parse the words of a line into a key."""
    if len(words) not in {3, 4}:  # name, scopes, digest, tenant
        raise KeysError("not of the form: name scope[,scope] sha256 [tenant]")
    name, scopes, digest = words[:3]
    tenant = words[3] if len(words) > 3 else None  # noqa: PLR2004 -- the fourth
    if not _NAME.fullmatch(name):
        raise KeysError("a name has 1 to 64 letters, digits and . _ @ -")
    if not _DIGEST.fullmatch(digest):
        raise KeysError("a SHA-256 has 64 digits, in lower case")
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise KeysError("a tenant has 1 to 64 letters, digits and . _ @ -")
    return Key(name, _scopes(scopes, tenant), digest, tenant)


def _scopes(words: str, tenant: str | None) -> frozenset[Scope]:
    try:
        scopes = frozenset(map(Scope, words.split(",")))
    except ValueError as error:
        raise KeysError(f"{words!r}: scopes are {', '.join(Scope)}") from error
    if tenant is not None and Scope.ADMIN in scopes:
        raise KeysError("admin is for the whole farm: a tenant's key has submit and read")
    return scopes


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
