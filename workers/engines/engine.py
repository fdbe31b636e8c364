"""The protocol of engines, which turn texts into vectors, and what they take and give.

An engine is used by two threads at once: one tokenises the next micro-batch while the other runs
the current one through the model.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.records import TokenisationSettings


class OutOfMemory(RuntimeError):
    """Raised when a device batch does not fit in memory; a smaller one may."""


class ModelUnavailable(ModelError):
    """Raised when a model is not to be had now; it may be later."""


class NoRoom(ModelUnavailable):
    """Raised when there is no memory for a model now."""


class DeviceFailed(RuntimeError):
    """Raised when the device itself has failed: only a new process can use it again."""


class DeviceAway(DeviceFailed):
    """Raised when the device has failed whatever it was given, so that no text is to blame."""


Chunk: TypeAlias = str | NDArray[np.int64]
"""A text, or its token ids."""


def only_texts(chunks: Sequence[Chunk]) -> list[str]:
    """Return the chunks, which must be texts, for an engine without tokenisation settings.

    Raises:
        ValueError: A chunk is no text.
    """
    texts = [chunk for chunk in chunks if isinstance(chunk, str)]
    if len(texts) < len(chunks):
        raise ValueError("this model takes texts here, and no token ids")
    return texts


@dataclass(frozen=True)
class Tokenised:
    """Texts ready for the model, a row each, or several where long texts are cut into windows.

    Attributes:
        lengths: Tokens of each row after truncation, shape (rows,).
        features: What the engine needs to run any subset of the rows.
        owners: The text of each row, ascending, shape (rows,); None where each text is a row.
        reasons: Why single texts cannot be embedded, by text.
        limit: Tokens at which a row is cut.
    """

    lengths: NDArray[np.int64]
    features: Any
    owners: NDArray[np.intp] | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)
    limit: int = sys.maxsize

    @property
    def full(self) -> NDArray[np.bool_]:
        """Whether each row is as long as the limit: what its text has beyond it was cut off."""
        return np.asarray(self.lengths >= self.limit)

    @property
    def text_lengths(self) -> NDArray[np.int64]:
        """Tokens of each text in all its rows, shape (texts,)."""
        if self.owners is None:
            return self.lengths
        return np.bincount(self.owners, weights=self.lengths).astype(np.int64)

    def rows_of(self, texts: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the rows of some texts."""
        return texts if self.owners is None else np.flatnonzero(np.isin(self.owners, texts))

    def texts_of(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the text of each of some rows."""
        return rows if self.owners is None else self.owners[rows]

    def tokens_of(self, rows: NDArray[np.intp]) -> int:
        """Return the tokens of some rows together."""
        return int(self.lengths[rows].sum())


Finish: TypeAlias = Callable[[], NDArray[np.float32]]
"""Waits for the vectors of a device batch, shape (rows, dimensions)."""


TRYING: Final = threading.Event()
"""Set while this process tries engines against each other, before it loads the faster one."""


class Engine(Protocol):
    """One model on one device."""

    @property
    def name(self) -> str:
        """Name of the engine, such as "torch"."""

    @property
    def dimensions(self) -> int:
        """Components of a vector."""

    @property
    def normalised(self) -> bool:
        """Whether all vectors have length 1."""

    @property
    def padded(self) -> bool:
        """Whether a device batch is padded to its longest text."""

    @property
    def asynchronous(self) -> bool:
        """Whether `start` returns before the device has done its work."""

    @property
    def batch_tokens(self) -> int:
        """Padded tokens in one device batch, before memory is learned."""

    @property
    def launch_tokens(self) -> int:
        """Cost of a device batch by itself, as the tokens that would take as long."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """Properties that must be equal for two vectors to be comparable."""

    @property
    def peak_flops_per_second(self) -> float:
        """Operations per second of the device at best in the model's precision; 0 when unknown."""

    @property
    def tokenisation(self) -> TokenisationSettings | None:
        """Settings by which producers make token ids; None when they must send texts."""

    @property
    def exact_twin(self) -> "Engine | None":
        """Engine of this model in float32, if one is at hand; itself where it computes in that."""

    def for_job(self, spec: JobSpec) -> "Engine | None":
        """Return the engine of another job on the same weights; None where it needs others.

        It is asked only about jobs for this engine.

        Raises:
            ModelError: The model cannot do what the job asks for.
        """

    def flops(self, lengths: NDArray[np.int64]) -> float:
        """Return the arithmetic operations for texts of these lengths, unpadded; 0 if unknown."""

    def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
        """Tokenise texts, cut to the model's limit; ids that came for texts are tokens already.

        Raises:
            ValueError: Ids are not the model's, or `tokenisation` is None and a chunk is no text.
        """

    def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
        """Begin to embed some rows, and return a function that waits for their vectors.

        A device that works by itself is then free to be given the next batch; one that does not
        has done everything when this returns. Batches are finished in the order of their starts.
        Both calls raise what `forward` raises.
        """

    def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Embed some rows, to vectors of shape (len(rows), dimensions).

        Raises:
            OutOfMemory: The rows do not fit on the device together.
            DeviceFailed: Nothing works on this device any more.
        """
