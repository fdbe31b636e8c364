"""Limits on the size of a job."""

from collections.abc import Sequence

from embedfarm.collector.manifest import OutputError, Part
from embedfarm.contract.settings import Settings
from embedfarm.readers.limits import Limits


def corpus_limits(settings: Settings) -> Limits:
    """Return the chunks and bytes that a corpus may have at most."""
    return Limits(chunks_max=settings.job_chunks_max or 0, bytes_max=settings.corpus_bytes_max or 0)


def check_output(parts: Sequence[Part], settings: Settings) -> None:
    """Refuse an output that is larger than it may be.

    Raises:
        OutputError: The output is too large; the message names the limit.
    """
    most = settings.job_output_bytes_max
    size = sum(part.bytes + part.ids_bytes + part.stored_bytes for part in parts)
    if most and size > most:
        raise OutputError(f"the output is larger than job_output_bytes_max allows, {most:,} bytes")
