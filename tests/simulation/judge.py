"""Judge of an output: is it what its source held? It asks the files alone, by no code of the farm.

A run that says "finished" has the vector of each row of its source, as that was at some moment
between the beginning of its last reading and the end of the run: row by row, in order. A run may
say instead that its source has changed, if it has.
"""

import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embedfarm.collector.manifest import Manifest
from embedfarm.contract.canaries import TEXTS
from embedfarm.workers.engines.null import NullEngine
from tests.simulation.corpora import Version
from tests.simulation.states import State

DIMENSIONS: Final = 4
SAMPLE_TEXTS: Final = 4  # that an output keeps

LISTED: Final = State("vectors listed", "a finished output lists where its vectors are stored")

Objects = Mapping[str, Mapping[str, bytes]]
"""The objects of each place of a storage, by name."""

_forward: Final = NullEngine.forward  # as it is, whatever a run puts in its place


class Failure(AssertionError):
    """Raised when a run has broken a promise."""


@dataclass(frozen=True)
class Stored:
    """The content of an output.

    Attributes:
        count: Number of chunks, from its manifest.
        vectors: Vectors by index of the chunk; those of failed chunks mean nothing.
        attempts: Attempts by index of each chunk that was given up on.
        sample: Vectors of the texts that are kept beside theirs; None where nobody looked.
        canaries: Vectors of the canaries, as bytes; None where there are none.
        made: Number of chunks that were embedded for it.
    """

    count: int
    vectors: dict[int, NDArray[np.float32]]
    attempts: dict[int, int]
    sample: dict[str, NDArray[np.float32]] | None = None
    canaries: bytes | None = None
    made: int = 0


def read_output(out: Path, manifest: Manifest, objects: Objects = MappingProxyType({})) -> Stored:
    """Read all of a finished output, also what it lists of the objects of a storage."""
    attempts, reused = _attempts(out), sum(manifest.reused.values())
    canaries = None if manifest.canaries is None else manifest.canaries.vectors
    made = manifest.count - manifest.failed - reused
    vectors = _listed_vectors(out, objects) if _lists(manifest) else _vectors(out, manifest)
    sample = _sample(out)
    return Stored(manifest.count, vectors, attempts, sample, canaries, made)


def _sample(out: Path) -> dict[str, NDArray[np.float32]]:
    """Return the vectors of the texts that an output keeps, by text."""
    path = out / "_sample.parquet"
    # By its path: Arrow's threads may let go of a Python object when the interpreter has ended, and
    # that ends the process with SIGABRT.
    rows = pq.read_table(path).to_pylist() if path.exists() else []
    return {row["text"]: np.array(row["embedding"], np.float32) for row in rows}


def _vectors(out: Path, manifest: Manifest) -> dict[int, NDArray[np.float32]]:
    """Return the vectors of an output by index, each of shape (dimensions,)."""
    if manifest.format == "npy" and manifest.count:
        return dict(enumerate(np.load(out / "embeddings.npy")))
    rows = [
        json.loads(line)
        for path in sorted(out.glob("part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    indices = [row["index"] for row in rows]
    if indices != sorted(set(indices)):
        raise Failure(f"indices are not in order: {indices}")
    return {row["index"]: np.array(row["embedding"], np.float32) for row in rows}


def _lists(manifest: Manifest) -> bool:
    return manifest.format == "stored"


def _listings(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the lists of stored vectors of an output, in the order of its parts."""
    for path in sorted(out.glob("part-*.stored.json")):
        yield json.loads(path.read_text())


def listed_names(out: Path) -> set[str]:
    """Return the names of the objects that an output lists."""
    return {piece["file"] for listing in _listings(out) for piece in listing["pieces"]}


def _listed_vectors(out: Path, objects: Objects) -> dict[int, NDArray[np.float32]]:
    """Return the vectors that an output lists by index, each of shape (dimensions,)."""
    vectors: dict[int, NDArray[np.float32]] = {}
    for listing in _listings(out):
        there = objects.get(listing["place"], {})
        for piece in listing["pieces"]:
            name, start, end = piece["file"], piece["start"], piece["start"] + piece["count"]
            if name not in there:
                raise Failure(f"{name} is listed for chunks from {start} on, and is not there")
            size = 4 * DIMENSIONS * (end - start)
            data = there[name][piece["offset"] : piece["offset"] + size]
            if len(data) != size or zlib.crc32(data) != piece["checksum"]:
                raise Failure(f"{name} has other bytes for chunks from {start} on")
            if vectors and start <= max(vectors):
                raise Failure(f"chunk {start} is listed behind {max(vectors)}")
            rows = np.frombuffer(data, "<f4").reshape(-1, DIMENSIONS)
            indices = [index for index in range(start, end) if index not in listing["failed"]]
            vectors |= {index: rows[index - start] for index in indices}
    LISTED.reach(bool(vectors))
    return vectors


def _attempts(out: Path) -> dict[int, int]:
    """Return the attempts by index of the chunks that were given up on."""
    path = out / "_errors.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["index"]: row["attempts"] for row in map(json.loads, lines)}


def expected_vectors(texts: Sequence[str], weights: str = "") -> NDArray[np.float32]:
    """Return the vectors that a null model of these weights makes of texts, (n, dimensions)."""
    if not texts:
        return np.zeros((0, DIMENSIONS), np.float32)
    engine = NullEngine(DIMENSIONS, 0.0, {}, weights)
    return _forward(engine, engine.tokenise(texts), np.arange(len(texts)))


def judge(
    stored: Stored,
    versions: Sequence[Version],
    deadly: Collection[str],
    tries_min: int,
    weights: str = "",
) -> None:
    """Assert that an output is one of the versions that its source has held.

    Args:
        stored: The content of the output.
        versions: Versions of the source during the run, the newest first.
        deadly: Texts that nobody can embed.
        tries_min: How often a chunk is tried before it is given up on.
        weights: Name of the weights of the job's null model.

    Raises:
        Failure: The output is none of the versions, or failed chunks are wrong.
    """
    wrongs = []
    for version in versions:
        wrong = difference(stored, version.texts, weights)
        wrong = wrong or sample_difference(stored, version.texts, weights)
        if not wrong:
            _check_canaries(stored, weights)
            _check_failed(stored, version.texts, deadly, tries_min)
            return
        wrongs.append(wrong)
    held = f" (nor what was held earlier: {'; '.join(wrongs[1:])})" if wrongs[1:] else ""
    raise Failure(wrongs[0] + held)


def difference(stored: Stored, texts: Sequence[str], weights: str = "") -> str:
    """Say how an output differs from the vectors of some texts; return "" if it does not."""
    if stored.count != len(texts):
        return f"{stored.count} chunks in the output, {len(texts)} in the corpus"
    kept = [index for index in range(len(texts)) if index not in stored.attempts]
    found = stored.vectors.keys() - stored.attempts.keys()
    if found != set(kept):
        return f"chunks {sorted(found)} in the output, {kept} expected"
    expected = expected_vectors(texts, weights)
    wrong = [i for i in kept if not np.array_equal(stored.vectors[i], expected[i])]
    return f"wrong vectors of chunks {wrong}" if wrong else ""


def sample_difference(stored: Stored, texts: Sequence[str], weights: str = "") -> str:
    """Say how the sample of an output differs from that of some texts; return "" if it does not."""
    if stored.sample is None:
        return ""
    digests = {text: blake2b(text.encode(), digest_size=16).digest() for text in texts}
    least = sorted(digests, key=lambda text: digests[text])[:SAMPLE_TEXTS]
    wanted = [text for text in least if texts.index(text) not in stored.attempts]
    if stored.sample.keys() != set(wanted):
        return f"the sample has {sorted(stored.sample)}, and {sorted(wanted)} are expected"
    expected = dict(zip(wanted, expected_vectors(wanted, weights), strict=True))
    wrong = [text for text in wanted if not np.array_equal(stored.sample[text], expected[text])]
    return f"wrong vectors in the sample of {wrong}" if wrong else ""


def _check_canaries(stored: Stored, weights: str) -> None:
    """Raise an error if an output does not say what its model makes of the canaries."""
    if stored.made and stored.canaries is None:
        raise Failure(f"{stored.made} chunks were embedded, and no canaries are there")
    if stored.canaries not in {None, expected_vectors(TEXTS, weights).tobytes()}:
        raise Failure("the canaries are those of another model")


def _check_failed(
    stored: Stored, texts: Sequence[str], deadly: Collection[str], tries_min: int
) -> None:
    """Raise an error for a deadly text that did not fail, and for a failure after too few tries."""
    harmful = {index for index, text in enumerate(texts) if text in deadly}
    if missing := harmful - stored.attempts.keys():
        raise Failure(f"deadly texts not named: {sorted(missing)}")
    if hasty := {index for index, tries in stored.attempts.items() if tries < tries_min}:
        raise Failure(f"given up on after too few tries: {sorted(hasty)}")
