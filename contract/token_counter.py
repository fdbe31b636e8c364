"""Tokens that a model goes through for texts, estimated from their bytes, for whoever makes none.

Producers and estimates count alike: the speed that a farm remembers is in a producer's tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import own_limit
from embedfarm.contract.sizing import BYTES_PER_TOKEN

FRAMING: Final = 2  # tokens around a text
TOKENS_MAX: Final = 512  # of a text, where neither its job nor the model's files say it


@dataclass(frozen=True)
class TokenCounter:
    """Counts tokens by bytes, after what is too long for the model is cut, or became windows.

    Attributes:
        tokens_max: Tokens that the model takes at once, with those that frame a text.
        overlap: Tokens that a window repeats of the one before; None where texts are cut.
        bytes_per_token: Bytes that a token has; None where no tokenizer has told.
    """

    tokens_max: int = TOKENS_MAX
    overlap: int | None = None
    bytes_per_token: float | None = None

    @classmethod
    def of_job(
        cls, spec: JobSpec, directory: Path | None, bytes_per_token: float | None = None
    ) -> "TokenCounter":
        """Make the counter of a job.

        Args:
            spec: What the job asks for.
            directory: Directory of the model's files; None where they are not here, or there are
                none.
            bytes_per_token: Bytes that a token has, if a tokenizer has told.
        """
        limits = [spec.max_length] if spec.max_length else []
        limits += [own_limit(directory)] if directory else []
        overlap = spec.long_overlap if spec.long == "windows" else None
        return cls(min(limits, default=TOKENS_MAX), overlap, bytes_per_token)

    def estimate(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of texts of so many bytes of UTF-8."""
        own = (sizes / (self.bytes_per_token or BYTES_PER_TOKEN)).astype(np.int64)
        if self.overlap is None:
            return np.minimum(own + FRAMING, self.tokens_max)
        room = max(1, self.tokens_max - FRAMING)
        overlap = min(self.overlap, room // 2)  # workers refuse a job with more
        more = np.maximum(-(-(own - room) // (room - overlap)), 0)  # windows after the first one
        tokens: NDArray[np.int64] = own + FRAMING + more * (overlap + FRAMING)
        return tokens
