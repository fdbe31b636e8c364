"""The secret that webhooks are signed with, which is printed as asterisks."""

import base64
from typing import Annotated, Final

from pydantic import AfterValidator, SecretStr

NO_SECRET: Final = SecretStr("")
_PREFIX: Final = "whsec_"
_BYTES: Final = range(24, 65)


def _check(secret: SecretStr) -> SecretStr:
    """Refuse a secret that a receiver's library would not take."""
    text = secret.get_secret_value()
    if not text or (text.startswith(_PREFIX) and _length(text.removeprefix(_PREFIX)) in _BYTES):
        return secret
    raise ValueError("it must be whsec_ and 24 to 64 bytes in base64")


def _length(text: str) -> int:
    """Return how many bytes a text in base64 stands for; 0 if it is none."""
    try:
        return len(base64.b64decode(text, validate=True))
    except ValueError:
        return 0


WebhookSecret = Annotated[SecretStr, AfterValidator(_check)]
"""As Standard Webhooks has them, or none: an empty one."""
