"""Digests by which a text is known again in another output."""

import hashlib
from collections.abc import Iterable
from typing import Final

DIGEST_BYTES: Final = 16
DIGESTS_FILE: Final = "_digests.bin"


def text_digests(texts: Iterable[str]) -> bytes:
    """Return the BLAKE2b of each text's UTF-8, 16 bytes each: texts are the same if these are."""
    return b"".join(
        hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest() for text in texts
    )
