"""Limits of texts and vectors that pass by the server."""

from typing import Annotated

from pydantic import BaseModel, Field, PositiveInt

from embedfarm.contract.settings.profiles import GIBIBYTE


class StorageSettings(BaseModel):
    """Where texts may be read and vectors stored past the server, and how many at a time."""

    source_roots: Annotated[
        tuple[str, ...],
        Field(
            description='Directories and URLs, such as ["/mnt/corpora", "s3://bucket/corpora"], '
            "below which workers read the texts of jobs whose blocks only refer to them; empty: "
            "nowhere."
        ),
    ] = ()
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
