"""Requests of a batch file, as planned from each of its lines until they are answered."""

from typing import Final

import msgspec

ENDPOINT: Final = "/v1/embeddings"

# Files of the plan, in the batch's output directory.
PLAN: Final = "plan.json"  # written last: of which file, and how many requests there are
REQUESTS: Final = "requests.jsonl"  # a `Planned` in each line
ENDS: Final = "ends.u64"  # for each request that is not bad, the index after its last chunk


class Planned(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of a batch, planned from its line in the file.

    Attributes:
        custom_id: Id that the line gives the request; None if it gives none.
        line: Number of the line, from 1 on, if something is wrong with it.
        code: Code of the line's error, "" if nothing is wrong with it.
        message: Message of the line's error, "" if nothing is wrong with it.
        chunks: Number of texts that it asks vectors for.
        dimensions: Leading components wanted, 0 for all.
        base64: Whether vectors are wanted as base64 of little-endian float32.
    """

    custom_id: str | None = None
    line: int = 0
    code: str = ""
    message: str = ""
    chunks: int = 0
    dimensions: int = 0
    base64: bool = False
