"""Canaries: fixed texts, by whose vectors a model is known again, wherever and however it runs.

A fingerprint compares the files of a model, exactly. Vectors tell of what files do not: a device
that computes wrongly, a server behind an address, an engine, a precision.
"""

from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.similarity import cosine

TEXTS: Final = (
    "canary",
    "The quick brown fox jumps over the lazy dog near the bank of the river.",
    "Wie hoch ist der Mount Everest, und wer hat ihn zuerst bestiegen?",
    "向量由同一个模型生成 因此可以互相比较",
    "Быстрая лиса прыгает через ленивую собаку; القطة نائمة في الشمس.",
    "def mean(values):\n    return sum(values) / len(values)  # 3.14159, 2.71828",
    " ".join(
        f"Section {number}: a stream delivers each of its entries to one member of a group, "
        f"and {number * 37 % 101} of {number * 53 % 211} lines describe how it is acknowledged."
        for number in range(1, 9)
    ),
)
"""What is embedded: several scripts, code, and lengths from a word to about 200 tokens.

Outputs keep the texts with the vectors, so that others may stand here later.
"""

COSINE_MIN: Final = {"float32": 0.9999, "bfloat16": 0.999, "float16": 0.999, "int8": 0.98}
"""Least cosine of two vectors of one text by one model, by the type that it computes in; of two
types that of the coarser one counts."""

LENGTH_TOLERANCE: Final = 0.01  # of a vector's length, where the model does not make it 1


class Canaries(msgspec.Struct, frozen=True, kw_only=True):
    """Vectors of the canaries, as a model makes them for a job, in float32 before they are stored.

    On the server, in manifests and in files they are JSON.

    Attributes:
        texts: What was embedded.
        dimensions: Components of a vector.
        vectors: A vector for each text, little-endian float32 (in JSON base64); zero where the
            model gave none.
    """

    texts: list[str]
    dimensions: Annotated[int, msgspec.Meta(ge=1)]
    vectors: bytes

    def __post_init__(self) -> None:
        """Refuse vectors of another size than is said.

        Raises:
            ValueError: There are more or fewer bytes.
        """
        wanted = len(self.texts) * self.dimensions * np.dtype("<f4").itemsize
        if len(self.vectors) != wanted:
            raise ValueError(f"{len(self.vectors)} bytes of canaries instead of {wanted}")

    def matrix(self) -> NDArray[np.float32]:
        """Return the vectors, shape (texts, dimensions)."""
        return np.frombuffer(self.vectors, "<f4").reshape(len(self.texts), self.dimensions)


def canaries_of(vectors: NDArray[np.float32], texts: tuple[str, ...] = TEXTS) -> Canaries:
    """Return canaries with their vectors.

    Args:
        vectors: A vector for each text, shape (texts, dimensions); what is not finite counts as
            none.
        texts: What was embedded.
    """
    sound = np.where(np.isfinite(vectors).all(axis=1, keepdims=True), vectors, 0)
    return Canaries(
        texts=list(texts), dimensions=vectors.shape[1], vectors=sound.astype("<f4").tobytes()
    )


class Likeness(NamedTuple):
    """How alike two embeddings of the same texts are.

    Attributes:
        least: Least cosine of a text's two vectors; 0 where one of them has none.
        mean: Mean of these cosines.
        lengths: Whether the vectors are as long, too.
    """

    least: float
    mean: float
    lengths: bool


def likeness(one: NDArray[np.float32], other: NDArray[np.float32]) -> Likeness:
    """Compare two embeddings of the same texts, each of shape (texts, dimensions).

    Texts of which neither has a vector are left out.
    """
    has_one, has_other = one.any(axis=1), other.any(axis=1)
    some = has_one | has_other
    if not some.any():
        return Likeness(1.0, 1.0, lengths=True)
    cosines = np.where(has_one & has_other, cosine(one, other), 0.0)[some]
    left, right = (np.linalg.norm(each[has_one & has_other], axis=1) for each in (one, other))
    same = bool(np.allclose(left, right, rtol=LENGTH_TOLERANCE))
    return Likeness(float(cosines.min()), float(cosines.mean()), lengths=same)


def cosine_min(*dtypes: str) -> float:
    """Return the least cosine of vectors by models that compute in these types.

    A type that is not known counts as float32.
    """
    return min(COSINE_MIN.get(dtype, COSINE_MIN["float32"]) for dtype in dtypes)


def disagreement(known: Canaries, made: Canaries, dtype: str) -> str:
    """Return in which way canaries are not those that are known, "" where they are.

    Canaries of other texts, as another version makes them, cannot be compared: they pass.

    Args:
        known: Vectors that others agreed on.
        made: Vectors that somebody made who has the same fingerprint.
        dtype: Type that the model computes in.
    """
    if made == known or made.texts != known.texts:
        return ""
    if made.dimensions != known.dimensions:
        return f"vectors of {made.dimensions:,} dimensions, and not of {known.dimensions:,}"
    found, least = likeness(known.matrix(), made.matrix()), cosine_min(dtype)
    if found.least < least:
        return f"a cosine of {found.least:.5f}, and at least {least} is wanted"
    return "" if found.lengths else "vectors of another length"
