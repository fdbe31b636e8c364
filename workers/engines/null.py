"""A deterministic hash instead of a model: measures and tests everything but the model.

`null:<dimensions>` is as fast as the processor allows; `null:<dimensions>:<tokens per second>`
takes as long as a device of that speed would, and `null:<dimensions>:<tokens per second>:<weights>`
gives other vectors for each name of weights.
"""

import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.workers.engines.engine import Chunk, Finish, Tokenised, only_texts

BYTES_PER_TOKEN = 4
CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class NullEngine:
    """An engine whose vectors depend on text and weights alone: equal ones give equal bytes.

    A vector is four runs of components, each looked up by one byte of the text's CRC-32, so that
    making one costs little more than copying it. Its length is 1 if `dimensions` divides by four.
    """

    dimensions: int
    tokens_per_second: float
    fingerprint: dict[str, str]
    weights: str = ""
    name: str = "null"
    peak_flops_per_second: float = 0.0
    normalised: bool = False
    padded: bool = True
    batch_tokens: int = 65536
    launch_tokens: int = 65536
    tokenisation: None = None
    exact_twin: None = None
    asynchronous: bool = False

    @classmethod
    def open(cls, spec: JobSpec) -> "NullEngine":
        """Make the engine that `spec.model` describes.

        Raises:
            ModelError: The name is not "null:<dimensions>[:<tokens per second>[:<weights>]]", or
                the job names a prompt.
        """
        if spec.prompt_name:
            raise model_files.ModelError(
                f"it has no prompt {spec.prompt_name!r}: it has none at all"
            )
        words = spec.model.split(":")[1:]
        try:
            dimensions, speed = int(words[0]), float(words[1]) if len(words) > 1 else 0.0
        except (ValueError, IndexError):
            dimensions, speed = 0, 0.0
        if dimensions < 1 or speed < 0:
            raise model_files.ModelError(
                f"{spec.model!r} is not null:<dimensions>[:<tokens per second>[:<weights>]]"
            )
        kept, weights = min(spec.dimensions or dimensions, dimensions), ":".join(words[2:])
        made = f"null:{dimensions}:{weights}" if weights else f"null:{dimensions}"
        return cls(kept, speed, model_files.fingerprint(made, None, spec, "float32"), weights)

    def for_job(self, spec: JobSpec) -> "NullEngine | None":
        """Return an engine for another job on the same null model; None for another model."""
        if not model_files.is_null(spec.model):
            return None
        other = self.open(spec)
        same = other.fingerprint["weights"] == self.fingerprint["weights"]
        return other if same and other.tokens_per_second == self.tokens_per_second else None

    @cached_property
    def runs(self) -> NDArray[np.float32]:
        """The runs of components that vectors are made of, shape (4 * 256, dimensions / 4)."""
        size = -(-self.dimensions // CHECKSUM_BYTES)
        seed = zlib.crc32(self.weights.encode())
        runs = np.random.default_rng(seed).standard_normal((CHECKSUM_BYTES * 256, size))
        norms = np.linalg.norm(runs, axis=1, keepdims=True) * np.sqrt(CHECKSUM_BYTES)
        return np.asarray(runs / norms, dtype=np.float32)

    def flops(self, lengths: NDArray[np.int64]) -> float:  # noqa: ARG002 # the protocol's
        """Return 0: a hash is no arithmetic."""
        return 0.0

    def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
        """Make checksums of the texts; four bytes count as a token."""
        data = list(map(str.encode, only_texts(chunks)))
        lengths = np.fromiter(map(len, data), dtype=np.int64, count=len(data))
        checksums = np.fromiter(map(zlib.crc32, data), dtype="<u4", count=len(data))
        return Tokenised(np.maximum(1, lengths // BYTES_PER_TOKEN), checksums)

    def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
        """Embed the rows at once; what is returned has their vectors already."""
        vectors = self.forward(batch, rows)
        return lambda: vectors

    def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Return as vectors the runs that the checksums' bytes choose, side by side."""
        chosen = batch.features[rows].view(np.uint8).reshape(len(rows), CHECKSUM_BYTES)
        places = chosen + np.arange(CHECKSUM_BYTES) * 256
        vectors = self.runs[places].reshape(len(rows), -1)[:, : self.dimensions]
        if self.tokens_per_second:
            _pause(float(batch.lengths[rows].sum()) / self.tokens_per_second)
        return np.asarray(vectors)


def _pause(seconds: float) -> None:
    """Take time, as a device would; the waiting is the work."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        threading.Event().wait(left)
