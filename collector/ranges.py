"""Ranges of components, which vectors of "int8" are stored by."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.manifest import OutputError, check_bytes, read_manifest
from embedfarm.collector.search import iter_vectors
from embedfarm.collector.sinks import Vectors


def component_ranges(parts: Iterable[Vectors]) -> NDArray[np.float32]:
    """Return the least and greatest of each component over all vectors, shape (2, dimensions).

    Raises:
        OutputError: There are no vectors, or they are quantised themselves.
    """
    ranges: NDArray[np.float32] | None = None
    for vectors in parts:
        if vectors.matrix.dtype.kind != "f":
            raise OutputError("ranges come from an output of floats")
        if len(vectors.matrix):
            found = np.stack([vectors.matrix.min(axis=0), vectors.matrix.max(axis=0)])
            both = found if ranges is None else np.concatenate([ranges, found])
            ranges = np.stack([both.min(axis=0), both.max(axis=0)]).astype(np.float32)
    if ranges is None:
        raise OutputError("ranges come from an output that has vectors")
    return ranges


def read_ranges(path: Path, model: str) -> NDArray[np.float32]:
    """Read ranges from a finished output of floats, or from an .npy of shape (2, dimensions).

    Args:
        path: The output, or the file.
        model: Name of the model whose vectors are to be stored by them.

    Raises:
        OutputError: `path` is neither, or an output of another model.
    """
    if path.is_dir():
        manifest = read_manifest(path)
        if manifest.model != model:
            raise OutputError(
                f"the vectors of {path} are of {manifest.model}: no ranges of {model}"
            )
        for part in manifest.parts:
            check_bytes(path, part)
        return component_ranges(iter_vectors(path))
    try:
        found = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise OutputError(f"{path} holds no ranges: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiu":
        raise OutputError(f"{path} holds no ranges: it is no array of numbers")
    with np.errstate(over="ignore"):
        ranges = found.astype(np.float32)
    if ranges.ndim != 2 or len(ranges) != 2:  # noqa: PLR2004 # two rows
        raise OutputError(f"{path} holds no ranges: it has shape {ranges.shape}, not (2, n)")
    if not np.isfinite(ranges).all():
        raise OutputError(f"{path} holds no ranges: float32 has no such numbers")
    return ranges
