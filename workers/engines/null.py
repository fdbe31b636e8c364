"""A deterministic hash instead of a model: measures and tests everything but the model.

`null:<dimensions>` is as fast as the processor allows; `null:<dimensions>:<tokens per second>`
takes as long as a device of that speed would.
"""

import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedfarm import model_files
from embedfarm.records import JobSpec
from workers.engines import Tokenised

BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class NullEngine:
    """Vectors that depend on the text alone, of length 1; equal texts give equal bytes."""

    dimensions: int
    tokens_per_second: float
    fingerprint: dict[str, str]
    padded: bool = True
    batch_tokens: int = 65536
    launch_tokens: int = 65536

    @classmethod
    def open(cls, spec: JobSpec) -> "NullEngine":
        """The engine that `spec.model` describes.

        Raises:
            ModelError: The name is not "null:<dimensions>[:<tokens per second>]".
        """
        words = spec.model.split(":")[1:]
        try:
            dimensions, speed = int(words[0]), float(words[1]) if len(words) > 1 else 0.0
        except (ValueError, IndexError) as error:
            raise model_files.ModelError(
                f"{spec.model!r} is not null:<dimensions>[:<tokens per second>]"
            ) from error
        kept = min(spec.dimensions or dimensions, dimensions)
        return cls(
            kept, speed, model_files.fingerprint(f"null:{dimensions}", None, spec, "float32")
        )

    def tokenise(self, texts: Sequence[str]) -> Tokenised:
        """Hashes of the texts; a token is four bytes."""
        data = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, data), dtype=np.int64, count=len(data))
        hashes = np.fromiter(map(zlib.crc32, data), dtype=np.uint32, count=len(data))
        return Tokenised(np.maximum(1, lengths // BYTES_PER_TOKEN), hashes)

    def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """A multiplicative hash per component (Knuth, TAOCP 3, 6.4), scaled to length 1."""
        factors = np.arange(1, self.dimensions + 1, dtype=np.uint32) * np.uint32(2654435761)
        mixed = batch.features[rows, None] * (factors | np.uint32(1)) + factors
        vectors: NDArray[np.float32] = mixed.view(np.int32).astype(np.float32)
        norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
        vectors *= (1.0 / np.maximum(norms, 1.0))[:, None]
        if self.tokens_per_second:
            _pause(float(batch.lengths[rows].sum()) / self.tokens_per_second)
        return vectors


def _pause(seconds: float) -> None:
    """Take time, as a device would; the waiting is the work."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        threading.Event().wait(left)
