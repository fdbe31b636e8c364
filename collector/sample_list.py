"""The list of some texts of an output, beside their vectors."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embedfarm.collector.manifest import SAMPLE_FILE, OutputError, SampleList
from embedfarm.collector.output_reader import OutputReader
from embedfarm.collector.sinks.arrow_columns import numbers, strings
from embedfarm.collector.text_sample import SampledText, TextSample
from embedfarm.contract.durable_files import replacing, sha256_of, sync_directory, whole


class SampledVectors(NamedTuple):
    """A sample of an output.

    Attributes:
        texts: Its texts.
        matrix: Their vectors as they are stored, shape (texts, width).
    """

    texts: list[str]
    matrix: NDArray[Any]


def write_sample(directory: Path, sample: TextSample) -> SampleList | None:
    """Put texts beside the vectors that an output has of them; those that failed are left out.

    Args:
        directory: The output, all of whose parts are on the disk. The vectors that the sample has
            not kept are read from them.
        sample: A sample of its texts.

    Returns:
        What is in the list, which is on the disk; None where there is none.

    Raises:
        OutputError: A part is damaged, or gone.
        OSError: The disk refused; this may be called again.
    """
    path = directory / SAMPLE_FILE
    kept, rows = _find_vectors(directory, sample)
    if not kept:
        if path.exists():  # of a run that did not come to its end
            path.unlink()
            sync_directory(directory)
        return None
    indices, said = [each.index for each in kept], [each.text for each in kept]
    return write_table(directory, indices, said, np.stack(rows))


def write_table(
    directory: Path, indices: Sequence[int], texts: Sequence[str], matrix: NDArray[Any]
) -> SampleList:
    """Put texts beside their vectors into the list of an output.

    Args:
        directory: The output.
        indices: Index of the chunk of each text.
        texts: The texts.
        matrix: Their vectors as they are stored, shape (texts, width).

    Raises:
        OSError: The disk refused.
    """
    path = directory / SAMPLE_FILE
    columns = {
        "index": numbers(np.array(indices, np.int64)),
        "text": strings(texts),
        "embedding": pa.FixedSizeListArray.from_arrays(
            numbers(matrix.reshape(-1)), matrix.shape[1]
        ),
    }
    with replacing(path) as file:
        pq.write_table(pa.table(columns), file)
    return SampleList(len(texts), sha256_of([whole(path)]))


def _find_vectors(
    directory: Path, sample: TextSample
) -> tuple[list[SampledText], list[NDArray[Any]]]:
    """Return those texts, in order, of which an output has a vector, and their vectors."""
    texts = sorted(sample.texts, key=lambda each: each.index)
    found = dict(sample.vectors)
    missing = [each for each in texts if each.digest not in found]
    if missing:
        with OutputReader(directory) as reader:
            chunks = None
            for each in missing:
                if chunks is None or each.index >= chunks.end:
                    chunks = reader.read(each.index, 1 if reader.lists else sys.maxsize)
                row = each.index - (chunks.batch.start if chunks else 0)
                if chunks is not None and chunks.batch.good[row]:
                    found[each.digest] = chunks.batch.matrix[row].copy()
    kept = [each for each in texts if each.digest in found]
    return kept, [found[each.digest] for each in kept]


def read_sample(directory: Path, sample: SampleList) -> SampledVectors:
    """Read the sample of a finished output.

    Raises:
        OutputError: It is not what was written.
    """
    path = directory / SAMPLE_FILE
    if not path.exists() or sha256_of([whole(path)]) != sample.sha256:
        raise OutputError(f"{path} is gone, or has other bytes than were written")
    table = pq.read_table(path)
    vectors = table["embedding"].combine_chunks()
    matrix = vectors.flatten().to_numpy().reshape(len(table), -1)
    return SampledVectors(table["text"].to_pylist(), matrix)
