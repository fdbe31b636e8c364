"""What a collection says of the output that was last exported into it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from embedfarm.collector.stores.store import Found
from embedfarm.collector.text_digests import text_digests


class CollectionMark(msgspec.Struct, kw_only=True):
    """What a collection says of the export that it was last written by.

    Attributes:
        token: `ExportHead.token` of the export.
        job: Job of the output.
        exact: `ExportHead.exact` of the export.
        made: How the vectors were made: fingerprint of the model, and how they are stored.
        version: Version of this record.
    """

    token: str
    job: str
    exact: bool
    made: dict[str, str]
    version: int = 1


class Origin(msgspec.Struct, kw_only=True):
    """What an export must know of an output, finished or not.

    Attributes:
        job: Identifier of the job.
        settings: What was asked for (`Manifest.settings`).
        fingerprint: Fingerprint of the model.
    """

    job: str
    settings: Mapping[str, Any]
    fingerprint: Mapping[str, str]

    @property
    def made(self) -> dict[str, str]:
        """How the vectors were made, by component."""
        ranges = self.settings.get("ranges") or []
        stored = {
            "vector_dtype": self.settings.get("vector_dtype", "float32"),
            "lsh_bits": self.settings.get("lsh_bits") or "",
            "ranges": text_digests([str(ranges)]).hex() if any(map(len, ranges)) else "",
        }
        return dict(self.fingerprint) | {name: str(value) for name, value in stored.items()}


def read_mark(found: Found | None) -> CollectionMark | None:
    """Return the mark of a collection; None where it has none that can be read."""
    try:
        return None if found is None else msgspec.json.decode(found.mark, type=CollectionMark)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
