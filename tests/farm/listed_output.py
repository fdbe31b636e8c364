"""Reading of an output that lists where its vectors are stored, by none of the farm's own code."""

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from tests.farm.harness import null_vectors


def listings(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the lists of an output in the order of its parts."""
    for path in sorted(out.glob("part-*.stored.json")):
        yield json.loads(path.read_bytes())


def listed_files(out: Path) -> set[str]:
    """Return the paths or URLs of all files that an output lists."""
    return {
        f"{each['place']}/{piece['file']}" for each in listings(out) for piece in each["pieces"]
    }


def read_listed(out: Path, dimensions: int) -> tuple[list[int], NDArray[np.float32]]:
    """Return indices and vectors of all chunks that did not fail, of shape (n, dimensions)."""
    indices, rows = list[int](), list[NDArray[np.float32]]()
    for each in listings(out):
        for piece in each["pieces"]:
            with fsspec.open(f"{each['place']}/{piece['file']}") as file:
                file.seek(piece["offset"])
                data = file.read(piece["count"] * dimensions * 4)
            assert zlib.crc32(data) == piece["checksum"]
            matrix = np.frombuffer(data, "<f4").reshape(piece["count"], dimensions)
            for row, index in enumerate(range(piece["start"], piece["start"] + piece["count"])):
                if index not in each["failed"]:
                    indices.append(index)
                    rows.append(matrix[row])
    return indices, np.array(rows, np.float32).reshape(-1, dimensions)


def check_listed(out: Path, texts: Sequence[str], dimensions: int) -> None:
    """Assert that each index is listed once, in order, with the vector of its own text."""
    indices, vectors = read_listed(out, dimensions)
    assert indices == list(range(len(texts)))
    np.testing.assert_array_equal(vectors, null_vectors(texts, dimensions))
