"""A sample of an output's texts, kept with it: by them another model can be compared with its own.

The sample is those texts of a corpus with the least digests (a bottom-k sketch, Cohen and Kaplan
2007). Which these are depends on the set of the texts alone: the same corpus has the same sample in
any order, with repeats, and however often its reading was interrupted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.text_digests import DIGEST_BYTES
from embedfarm.contract.durable_files import replacing
from embedfarm.contract.records import Result

CHARACTERS_MAX: Final = 8192  # of a text that may be in a sample
KEY: Final = np.dtype(">u8")  # the first half of a digest, by which texts are ordered
KEY_MAX: Final = (1 << 64) - 1


class SampledText(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A text of a sample.

    Attributes:
        digest: Its digest (`text_digests`).
        index: Index of the first chunk that has it.
        text: The text.
    """

    digest: bytes
    index: int
    text: str


class KeptSample(msgspec.Struct):
    """What is kept of a sample while its corpus is read.

    Attributes:
        facts: What the source looked like.
        texts: The sample of its rows that were read.
    """

    facts: str
    texts: list[SampledText]


class TextSample:
    """The texts with the least digests among those that were read so far.

    Attributes:
        vectors: The vectors of those that have come by in a result, each shape (width,), by the
            digests of their texts.

    Args:
        path: File that keeps them for a later run, which reads on from a mark.
        size: Most texts; 0 for none.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self.vectors: dict[bytes, NDArray[Any]] = {}
        self._texts: dict[bytes, SampledText] = {}
        self._bound = KEY_MAX
        self._saved: KeptSample | None = None

    @property
    def texts(self) -> list[SampledText]:
        """The sample, in the order of its digests."""
        return sorted(self._texts.values())

    def begin(self) -> None:
        """Begin with the corpus."""
        self._take([])

    def recall(self, facts: str) -> bool:
        """Go on with what an earlier run has kept of the same corpus; tell whether there is that.

        Args:
            facts: What the source looks like.
        """
        if not self._size:
            return True
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=KeptSample)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return False
        if kept.facts == facts:
            self._take(kept.texts)
        return kept.facts == facts

    def add(self, digests: bytes, texts: Sequence[str], row: int) -> None:
        """Take the next rows.

        Args:
            digests: Their digests.
            texts: Their texts.
            row: Index of the first of them.
        """
        for at in np.flatnonzero(self._are_low(digests)).tolist():
            digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            if int.from_bytes(digest[:8]) > self._bound or len(texts[at]) > CHARACTERS_MAX:
                continue
            if digest not in self._texts:
                self._texts[digest] = SampledText(digest, row + at, texts[at])
                if len(self._texts) > self._size:
                    self._take(self.texts[: self._size])

    def keep_vectors(self, result: Result, digests: bytes) -> None:
        """Keep the vectors that a result has of texts of the sample, on their way to the disk.

        Texts are read before they have a vector, and of those that were read, texts only ever leave
        the sample. What is in it at the end was in it when its vector came.

        Args:
            result: The result, which lacks no vector; those that are stored elsewhere are not kept.
            digests: The digests of its texts.
        """
        if result.is_elsewhere:
            return
        failed = {error.index for error in result.errors}
        for at in np.flatnonzero(self._are_low(digests)).tolist():
            digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            known, index = self._texts.get(digest), result.start + at
            if known is None or known.index != index:
                continue
            if index in failed:
                self.vectors.pop(digest, None)
            else:
                self.vectors[digest] = result.matrix()[at].copy()

    def so_far(self, facts: str) -> KeptSample:
        """Return what is to be kept of the rows so far."""
        return KeptSample(facts, self.texts)

    def keep(self, kept: KeptSample) -> None:
        """Keep the sample for a later run, which reads on in the same corpus.

        Raises:
            OSError: The disk refused.
        """
        if self._size and kept != self._saved:
            with replacing(self._path) as file:
                file.write(msgspec.json.encode(kept))
            self._saved = kept

    def _are_low(self, digests: bytes) -> NDArray[np.bool_]:
        """Tell which digests are low enough for the sample, shape (texts,); none if it has none."""
        return (np.frombuffer(digests, KEY)[::2] <= np.uint64(self._bound)) & (self._size > 0)

    def _take(self, texts: Sequence[SampledText]) -> None:
        self._texts = {each.digest: each for each in texts}
        self.vectors = {each: self.vectors[each] for each in self._texts if each in self.vectors}
        full = len(texts) >= self._size > 0
        self._bound = int.from_bytes(max(self._texts)[:8]) if full else KEY_MAX
