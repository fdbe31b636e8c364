"""Limits of vectors that are stored past the server."""

from typing import Annotated

from pydantic import BaseModel, Field, PositiveInt

from embedfarm.contract.settings.profiles import GIBIBYTE


class StorageSettings(BaseModel):
    """Where vectors may be stored past the server, and how many of them at a time."""

    stored_roots: Annotated[
        tuple[str, ...],
        Field(
            description='Directories and URLs, such as ["/mnt/vectors", "s3://bucket/vectors"], '
            "below which jobs may have vectors stored past Redis; empty: nowhere."
        ),
    ] = ()
    stored_bytes_max: Annotated[
        PositiveInt,
        Field(
            description="Vectors of a job that are stored past Redis and not on disk, at which its "
            "producer waits."
        ),
    ] = 2 * GIBIBYTE
