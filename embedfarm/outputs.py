"""`embedfarm.open`: the vectors of a finished output, from Python."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from embedfarm.collector import verify as verification
from embedfarm.collector.column_rows import unify_dictionaries
from embedfarm.collector.manifest import Failure, Manifest, read_failures, read_manifest
from embedfarm.collector.search import Hit, iter_columns, iter_vectors, search
from embedfarm.collector.sinks import Vectors
from embedfarm.collector.store_export import ExportReport, Others
from embedfarm.collector.verify import OutputProblem
from embedfarm.contract.settings import Settings
from embedfarm.runs.dataset_copy import copy_with_vectors
from embedfarm.runs.query import embed_query
from embedfarm.runs.request import read_again
from embedfarm.runs.store_feed import exporting, find_destination

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

    from embedfarm.runs.check import CheckReport


class Embeddings:
    """The vectors of a finished output, in the order of its corpus.

    Nothing is read before it is asked for. An output in a temporary directory is removed by
    `close`, at the end of a `with` block, or with this object.

    Attributes:
        path: Directory of the output.
        manifest: What the output says of itself: model, fingerprint, settings, parts, accounts.
        exported: What the vector store got that was filled beside it; None where there was none.
    """

    def __init__(
        self,
        path: Path,
        temporary: "TemporaryDirectory[str] | None" = None,
        exported: ExportReport | None = None,
    ) -> None:
        self.path, self.exported = path, exported
        self.manifest: Manifest = read_manifest(path)
        self._temporary = temporary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the output if it is in a temporary directory."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def __repr__(self) -> str:
        failed = f", {self.manifest.failed:,} of them failed" if self.manifest.failed else ""
        return f"<{len(self):,} embeddings of {self.manifest.model} in {self.path}{failed}>"

    def __len__(self) -> int:
        """Return the number of chunks, those that failed included."""
        return self.manifest.count

    def __array__(
        self,
        dtype: DTypeLike | None = None,
        copy: bool | None = None,  # noqa: FBT001 # NumPy's protocol
    ) -> NDArray[Any]:
        """Return `matrix` to NumPy, so that `np.asarray(embeddings)` is the vectors."""
        return np.array(self.matrix, dtype) if copy else np.asarray(self.matrix, dtype)

    @property
    def dimensions(self) -> int:
        """Components of a vector; for sign bits the bytes, of eight bits each."""
        return self.manifest.dimensions

    @cached_property
    def failures(self) -> list[Failure]:
        """The chunks that have no vector, in order, each with its reason."""
        return list(read_failures(self.path))

    @cached_property
    def ids(self) -> list[str | None] | None:
        """The id of each chunk, or None if the corpus has no ids."""
        if not self.manifest.ids:
            return None
        ids: list[str | None] = [None] * len(self)
        for vectors in iter_vectors(self.path):
            for index, name in zip(vectors.indices.tolist(), vectors.ids or (), strict=True):
                ids[index] = name
        for failure in self.failures:
            ids[failure.index] = failure.id
        return ids

    @cached_property
    def matrix(self) -> NDArray[Any]:
        """The vectors, shape (chunks, dimensions), in the type in which they are stored.

        Of the format npy it is a memory map; of others it is read into memory. The rows of failed
        chunks are NaN, or zero where the type has no NaN.
        """
        manifest = self.manifest
        if manifest.format == "npy" and manifest.parts:
            found: NDArray[Any] = np.load(self.path / manifest.parts[0].file, mmap_mode="r")
            return found
        dtype = np.dtype(manifest.dtype)
        nothing = np.nan if dtype.kind == "f" else 0
        matrix: NDArray[Any] = np.full((len(self), manifest.dimensions), nothing, dtype)
        for vectors in iter_vectors(self.path):
            matrix[vectors.indices] = vectors.matrix
        return matrix

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the vectors part by part, with columns `index`, `id` (if given) and `embedding`.

        Columns of the corpus that the output has stand before the last. Failed chunks have no row.
        Memory holds one part, which comes in pieces if one dictionary has no room for its values.
        """
        for vectors, kept in zip(iter_vectors(self.path), iter_columns(self.path), strict=True):
            for rows, columns in _pieces(vectors, kept):
                yield record_batch(rows, columns)

    def copy_corpus(self, out: str | Path, column: str = "embedding") -> None:
        """Write a copy of the corpus, of Parquet or Arrow, with the vectors as one more column.

        A row that has no vector has a null there; all else is as the corpus has it. An interrupted
        copy goes on with the same call.

        Args:
            out: Directory of the copy.
            column: Name of the column.

        Raises:
            CorpusError: The corpus is neither, has such a column, or is not where it was.
            OutputError: `out` holds something else; SourceChanged: the corpus has other rows now.
            OSError: The disk refuses.
        """
        copy_with_vectors(self.path, Path(out), column, Settings())

    def search(self, query: str | NDArray[np.float32], count: int = 5) -> list[Hit]:
        """Return the chunks nearest to a query, by exact cosine over all vectors, best first.

        Args:
            query: A text, which this output's model embeds in this process, or a vector of shape
                (dimensions,).
            count: Number of chunks; fewer come back when there are fewer vectors.

        Raises:
            ModelError: The model is not to be had.
            ValueError: The vector is not one of this output's space.
        """
        if isinstance(query, str):
            query = embed_query(self.manifest, query, Settings())
        return search(self.path, query, count)

    def check(
        self,
        model: str = "",
        *,
        dtype: str = "",
        device: str = "cpu",
        endpoint: str = "",
    ) -> "CheckReport":
        """Find out whether a model still makes the vectors of this output.

        Args:
            model: Directory or name of the model, loaded in this process; "" for the output's.
                With `endpoint` the name by which the server knows it.
            dtype: Type to compute in; "" for the output's.
            device: torch's name of the device.
            endpoint: URL of a server that embeds, before its `/embeddings`; "" for none.

        Returns:
            The verdict, with cosines of -1 to 1 and shares of 0 to 1; its `agrees` says whether the
            vectors are this model's.

        Raises:
            ModelError: The model is not to be had.
            OutputError: The sample of the output is damaged.
        """
        from embedfarm.runs import check  # noqa: PLC0415 # what opens models takes a while

        settings = Settings()
        if endpoint:
            candidate = check.served_candidate(self.manifest, settings, endpoint, model)
        else:
            candidate = check.local_candidate(self.manifest, settings, model, dtype, device)
        return check.check(self.path, self.manifest, candidate)

    def verify(self, against: Sequence[str | Path] = ()) -> list[OutputProblem]:
        """Return all problems of the output; none when it is as it was when it was finished.

        Args:
            against: The corpus that it was made from, to be compared with it row by row.
        """
        source = None
        if against:
            source = read_again(self.manifest.settings, list(map(str, against)), Settings())
        return verification.verify(self.path, source)

    def export_to(self, url: str, others: Others = "refuse") -> ExportReport:
        """Bring a vector store up to this output; a call that was cut off goes on.

        Args:
            url: URL of the collection, such as `"qdrant://localhost:6333#documents"`.
            others: What becomes of rows in the collection that this output does not have.

        Raises:
            StoreError: The store refuses, or stays away for `store_seconds_max`.
        """
        settings = Settings()
        to = find_destination(url, others, settings)
        with exporting(self.path, to, settings, Event()) as export:
            return export.finish(read_manifest(self.path))


def open_output(path: str | Path) -> Embeddings:
    """Open a finished output of `embed` or of `embedfarm embed`.

    Raises:
        OutputError: There is no finished output.
    """
    return Embeddings(Path(path))


def record_batch(vectors: Vectors, kept: pa.Table | None = None) -> pa.RecordBatch:
    """Return rows as Arrow has them, with columns `index`, `id` (if given) and `embedding`.

    Columns of the corpus, if there are any, stand before the last, and have one dictionary each.
    """
    columns = {"index": pa.array(vectors.indices)}
    if vectors.ids is not None:
        columns["id"] = pa.array(vectors.ids)
    if kept is not None:
        whole = kept.combine_chunks()
        columns |= {name: _one(whole.column(name)) for name in whole.column_names}
    values = pa.array(vectors.matrix.reshape(-1))
    columns["embedding"] = pa.FixedSizeListArray.from_arrays(values, vectors.matrix.shape[1])
    return pa.record_batch(columns)


def _pieces(vectors: Vectors, kept: pa.Table | None) -> Iterator[tuple[Vectors, pa.Table | None]]:
    """Yield rows with their columns of the corpus, of which each has one dictionary in a piece."""
    if kept is None:
        yield vectors, None
        return
    first = 0
    for piece in unify_dictionaries(kept):
        rows = slice(first, first := first + piece.num_rows)
        ids = None if vectors.ids is None else vectors.ids[rows]
        yield Vectors(vectors.indices[rows], ids, vectors.matrix[rows]), piece


def _one(column: pa.ChunkedArray) -> pa.Array:
    """Return a column of one chunk, or of none, as an array."""
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)
