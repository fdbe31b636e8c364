"""A SentenceTransformer on OpenVINO, on a CPU: its own modules, converted to one graph.

A model that this host has converted before starts without torch and sentence-transformers, which
take seconds to import; what was found out then is kept beside the graph (`converted_model`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.quick_imports import quick_imports
from embedfarm.contract.records import TokenisationSettings
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.converted_model import (
    Prepared,
    cache_directory,
    from_kept,
    kept_path,
    read_kept,
)
from embedfarm.workers.engines.engine import Chunk, Finish, ModelUnavailable, Tokenised
from embedfarm.workers.engines.graph import CompiledGraph, open_kept, resolve_dtype
from embedfarm.workers.engines.unchanged_files import unchanged

BATCH_TOKENS: Final = 2048  # padded, of a device batch, as on torch (benchmarks/batch_shapes.py)
# What a launch takes in tokens, less than on torch: 16 to 24 by benchmarks/batch_shapes.py, between
# which the time of a corpus is the same to 0.2 %, and the padding least with 16.
LAUNCH_TOKENS: Final = 16
# A graph in float32 that is kept beside another; to compile it again takes each job half a second.
TWIN_BYTES_MAX: Final = 256 << 20


@dataclass
class OpenVinoEngine:
    """A model's graph on the cores of this process; opened by `open_openvino`.

    Attributes:
        dtype: Type that the graph computes in.
        prepared: What is known of the model for the job.
        graphs: The compiled graph by dtype, and with it that of the exact twin; engines of other
            jobs have the same ones.
    """

    spec: JobSpec
    settings: Settings
    dtype: str
    prepared: Prepared
    graphs: dict[str, CompiledGraph]

    name: ClassVar[str] = "openvino"
    padded: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = False
    batch_tokens: ClassVar[int] = BATCH_TOKENS
    launch_tokens: ClassVar[int] = LAUNCH_TOKENS

    @property
    def fingerprint(self) -> dict[str, str]:
        """Properties that must be equal for two vectors to be comparable."""
        return self.prepared.fingerprint

    @property
    def dimensions(self) -> int:
        """Components of a vector."""
        full = self.prepared.dimensions
        return min(self.spec.dimensions or full, full)

    @property
    def normalised(self) -> bool:
        """Whether all vectors have length 1."""
        whole = self.dimensions == self.prepared.dimensions
        return self.spec.normalize or (self.prepared.unit and whole)

    @property
    def peak_flops_per_second(self) -> float:
        """Operations per second of the processor at best; 0 in int8, or where it is not known."""
        return self.prepared.arithmetic.peak_per_second

    @property
    def tokenisation(self) -> TokenisationSettings | None:
        """Settings by which producers make token ids; None where they must send texts."""
        return self.prepared.tokenizer.tokenisation

    @property
    def exact_twin(self) -> "OpenVinoEngine":
        """Engine of this model in float32; a large one is compiled anew each time.

        Raises:
            ModelError: It does not run in float32, or its files have changed since it was opened.
        """
        if self.dtype == "float32":
            return self
        exact = msgspec.structs.replace(self.spec, dtype="float32")
        if "float32" in self.graphs:
            prepared = _prepare(exact, "float32", self.settings)
            twin = OpenVinoEngine(exact, self.settings, "float32", prepared, self.graphs)
        else:
            twin = _open(exact, "float32", self.settings)
        if twin.fingerprint != self.fingerprint | {"dtype": "float32"}:
            raise ModelUnavailable(f"the files of {self.spec.model} have changed")
        files = twin.prepared.graph.glob("*")  # none where the graph could not be kept
        if 0 < sum(file.stat().st_size for file in files) <= TWIN_BYTES_MAX:
            self.graphs["float32"] = twin.graphs["float32"]
        return twin

    def for_job(self, spec: JobSpec) -> "OpenVinoEngine | None":
        """Return the engine of another job on the same graph; None where it needs another.

        Raises:
            ModelError: The model cannot do what the job asks for.
        """
        if spec.model != self.spec.model or resolve_dtype(spec.dtype) != self.dtype:
            return None
        prepared = _prepare(spec, self.dtype, self.settings)
        if prepared.graph != self.prepared.graph:
            return None
        return OpenVinoEngine(spec, self.settings, self.dtype, prepared, self.graphs)

    def flops(self, lengths: NDArray[np.int64]) -> float:
        """Return the operations for texts of these lengths, by counts made at the conversion."""
        return self.prepared.arithmetic.flops(lengths)

    def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
        """Tokenise texts, cut to the model's limit; ids that came for texts are tokens already.

        Raises:
            ValueError: Ids are not the model's, or `tokenisation` is None and a chunk is no text.
        """
        return self.prepared.tokenizer.tokenise(chunks)

    def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
        """Embed some rows at once; what is returned has their vectors already.

        Raises:
            OutOfMemory: The rows do not fit in memory together.
        """
        vectors = self.forward(batch, rows)
        return lambda: vectors

    def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Embed some rows, to vectors of shape (len(rows), dimensions).

        Raises:
            OutOfMemory: The rows do not fit in memory together.
        """
        features = self.prepared.tokenizer.pad(batch.features, batch.lengths[rows], rows)
        vectors = self.graphs[self.dtype].run(features)[:, : self.dimensions]
        if self.spec.normalize:
            norms = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(norms, np.float32(1e-12))
        return np.ascontiguousarray(vectors)


def open_openvino(spec: JobSpec, device: str, settings: Settings) -> OpenVinoEngine:
    """Open a model on OpenVINO, by what is kept of it, or converted and compared with torch.

    Args:
        spec: The job.
        device: torch's name of the device.
        settings: Settings, which say where models and graphs are kept.

    Raises:
        ModelError: The model is not to be had, does not convert, or loses too much by it.
    """
    if device != "cpu":
        raise ModelError("OpenVINO embeds on CPUs only")
    if settings.batch_bytes_max:
        # Measured: it goes on without memory that it does not get, and its vectors are wrong.
        raise ModelError("OpenVINO does not notice a memory limit; unset batch_bytes_max")
    return _open(spec, resolve_dtype(spec.dtype), settings)


def _open(spec: JobSpec, dtype: str, settings: Settings) -> OpenVinoEngine:
    """Open a job's engine by what is kept of its model, else with torch."""
    prepared = _prepare_from_kept(spec, dtype, settings)
    graph = None
    if prepared is not None:
        graph = open_kept(prepared.graph, prepared.inputs, dtype, prepared.tokenizer.pad)
    if prepared is None or graph is None:
        prepared, graph = _prepare_with_torch(spec, dtype, settings)
    return OpenVinoEngine(spec, settings, dtype, prepared, {dtype: graph})


def _prepare(spec: JobSpec, dtype: str, settings: Settings) -> Prepared:
    """Prepare a job by what is kept of its model, else with torch."""
    kept = _prepare_from_kept(spec, dtype, settings)
    return kept or _prepare_with_torch(spec, dtype, settings)[0]


def _prepare_from_kept(spec: JobSpec, dtype: str, settings: Settings) -> Prepared | None:
    """Prepare a job by what is kept of its model; None where that is not enough."""
    directory = model_files.resolve(spec.model, settings.model_cache)
    with unchanged(spec, directory, dtype) as fingerprint:
        kept = read_kept(kept_path(fingerprint, settings))
        if kept is None:
            return None
        return from_kept(kept, spec, fingerprint, directory, cache_directory(settings))


def _prepare_with_torch(
    spec: JobSpec, dtype: str, settings: Settings
) -> tuple[Prepared, CompiledGraph]:
    """Prepare a job with torch, which takes seconds to import."""
    with quick_imports():
        from embedfarm.workers.engines.conversion import prepare_with_torch  # noqa: PLC0415 # above

    return prepare_with_torch(spec, dtype, settings)
