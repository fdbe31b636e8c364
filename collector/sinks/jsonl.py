"""JSON Lines: one file a part, one object a vector; for people and small corpora."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import numpy as np
import pyarrow as pa

from embedfarm.collector.manifest import Failure, Layout, Part, Written
from embedfarm.collector.sinks.arrow_columns import numbers
from embedfarm.collector.sinks.part_files import keep_parts, write_part
from embedfarm.collector.sinks.part_rows import (
    Matrix,
    PartError,
    PartRows,
    Vectors,
    check_layout,
    spread,
)

# As text a component takes about three times its memory: convert so many at a time.
_COMPONENTS_AT_A_TIME: Final = 1 << 20


class _VectorLine(msgspec.Struct):
    """One line of a file: a chunk's index, vector and id."""

    index: int
    embedding: list[float]
    id: str | None = None


class Jsonl:
    """Writes and reads `part-<start>.jsonl`; failed chunks have no line.

    Components are the shortest decimals that give the same float32.
    """

    about: ClassVar[str] = "JSON Lines: text that anything reads"
    files: ClassVar[str] = r"part-\d{12}\.jsonl"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def resume(self, parts: Sequence[Part]) -> None:
        """Check the files of the parts, and remove those of other parts."""
        keep_parts(self._directory, parts, "jsonl")

    def write(self, batch: PartRows) -> Written:
        """Write a part into a file of its own."""
        path = self._directory / f"part-{batch.start:012d}.jsonl"
        return write_part(path, lambda file: file.writelines(_lines(batch.vectors())))

    def replace(self, part: Part, batch: PartRows, original: Path) -> Written:
        """Write the file of a part anew."""
        del part, original
        return self.write(batch)

    def finish(self, count: int, layout: Layout) -> None:
        """Do nothing: every part is final already."""

    def read(self, part: Part, layout: Layout) -> Vectors:
        """Read the rows of a part from its file."""
        try:
            with (self._directory / part.file).open("rb") as file:
                lines = map(msgspec.json.Decoder(_VectorLine).decode, file)
                vectors = _vectors(lines, part.rows, layout)
        except (msgspec.MsgspecError, ValueError) as error:
            raise PartError(f"is not JSON Lines as it was written: {error}") from error
        return check_layout(vectors, part, layout)

    def read_all(self, part: Part, layout: Layout, failures: Sequence[Failure]) -> PartRows:
        """Read all chunks of a part from its file, the failed ones as zeros."""
        return spread(self.read(part, layout), part, failures)


def _lines(vectors: Vectors) -> Iterator[bytes]:
    """Yield one line for each row."""
    heads = map('{{"index":{},'.format, vectors.indices)
    if vectors.ids is not None:
        ids = (msgspec.json.encode(identifier).decode() for identifier in vectors.ids)
        heads = map('{}"id":{},'.format, heads, ids)
    for head, embedding in zip(heads, print_rows(vectors.matrix), strict=True):
        yield f'{head}"embedding":[{embedding}]}}\n'.encode()


def print_rows(matrix: Matrix) -> Iterator[str]:
    """Yield the components of each row, with commas between them."""
    import pyarrow.compute as pc  # noqa: PLC0415 # it takes long to import, and few need it

    dimensions = matrix.shape[1]
    step = max(1, _COMPONENTS_AT_A_TIME // dimensions)
    for first in range(0, len(matrix), step):
        rows = matrix[first : first + step]
        # Arrow prints float32 in its shortest form; it is the only fast printer of it around.
        components = pc.cast(numbers(rows.astype(np.float32, copy=False).reshape(-1)), pa.string())
        bounds = numbers(np.arange(len(rows) + 1, dtype=np.int32) * np.int32(dimensions))
        yield from pc.binary_join(pa.ListArray.from_arrays(bounds, components), ",").to_pylist()


def _vectors(lines: Iterator[_VectorLine], rows: int, layout: Layout) -> Vectors:
    """Return the lines as rows; a line of other dimensions or one too many raises ValueError."""
    indices: list[int] = []
    ids: list[str] = []
    matrix = np.empty((rows, layout.dimensions), dtype=layout.dtype)
    for row, line in zip(matrix, lines, strict=True):
        row[:] = np.array(line.embedding, dtype=np.float32)
        indices.append(line.index)
        if line.id is not None:
            ids.append(line.id)
    return Vectors(np.array(indices, dtype=np.int64), ids if layout.ids else None, matrix)
