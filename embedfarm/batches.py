"""What is made of each line of a file of requests, between its reading and its answer."""

import msgspec

ENDPOINT = "/v1/embeddings"


class Planned(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of a batch.

    Attributes:
        custom_id: As its line has it; None if it has none.
        code: Of what is wrong with the line, "" if nothing is.
        message: What that is.
        chunks: Texts that it asks for.
        dimensions: Leading components wanted, 0 for all.
        base64: Whether vectors are wanted as base64 of little-endian float32.
    """

    custom_id: str | None = None
    code: str = ""
    message: str = ""
    chunks: int = 0
    dimensions: int = 0
    base64: bool = False
