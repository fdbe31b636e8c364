"""Limits on the size of a job from outside, unless settings say them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from embedfarm.contract.settings import Settings
from embedfarm.ingest.outbound import Url

CHUNKS_MAX: Final = 1_000_000_000
OUTPUT_BYTES_MAX: Final = 1 << 40


def limit(settings: Settings, sources: Sequence[Path | Url]) -> Settings:
    """Return settings with limits for the command of a job that others asked for.

    What came from elsewhere may unpack to no more than could have come as it is.
    """
    found = {"job_chunks_max": CHUNKS_MAX, "job_output_bytes_max": OUTPUT_BYTES_MAX}
    if any(isinstance(source, Url) for source in sources):
        found["corpus_bytes_max"] = settings.fetch_bytes_max
    elif any(_is_upload(source, settings) for source in sources):
        found["corpus_bytes_max"] = settings.http_upload_bytes_max
    return settings.model_copy(
        update={name: most for name, most in found.items() if getattr(settings, name) is None}
    )


def _is_upload(source: Path | Url, settings: Settings) -> bool:
    return isinstance(source, Path) and source.is_relative_to(settings.jobs_path.resolve())
