"""A model as one graph on OpenVINO: compiled for this CPU, and compared with torch at each start.

Nothing here needs torch: `conversion` makes the graphs.
"""

import functools
import logging
import os
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.model_files import ModelError
from embedfarm.contract.similarity import cosine
from embedfarm.contract.unreadable_records import name_once
from embedfarm.workers.cores import available_cores
from embedfarm.workers.engines.engine import OutOfMemory
from embedfarm.workers.engines.tokens import Tokens

# A farm sends nothing to anybody: without this module, those that report their use do not.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # None: not importable

import openvino  # noqa: E402 # after the line above

VERSION: Final[str] = openvino.__version__
DEVICE: Final = "CPU"
PRECISIONS: Final = {
    "float32": "f32",
    "int8": "f32",
    "bfloat16": "bf16",
}  # of what is not quantised
COSINES_MIN: Final = {"float32": 0.9999, "bfloat16": 0.999, "int8": 0.95}  # of any text with torch
# Activations that share a scale in int8, of one token; fewer are more exact, and slower.
GROUP_SIZE: Final = 64
GRAPH: Final = "graph.xml"
SAMPLE: Final = "sample.npz"
SAMPLE_RUN_TEXTS: Final = 2
SAMPLE_STEP: Final = 4  # at a start, each so many of the texts that were compared at first
Pad = Callable[[Tokens, NDArray[np.int64], NDArray[np.intp]], dict[str, Any]]

log = logging.getLogger(__name__)

NO_MEMORY: Final = ("could not create a ", "not enough memory", "can't allocate memory")


@functools.cache
def core() -> openvino.Core:
    """Return OpenVINO's core, of which there is one for as long as the process lives.

    Each core gives the thread that makes it another stack for signals, and takes that away when it
    goes. Two that do not go in the order in which they came leave a stack that is gone, and the
    next signal that has a handler, Ctrl-C for example, ends the process by a segmentation fault.
    """
    return openvino.Core()


def resolve_dtype(dtype: str) -> str:
    """Resolve "auto" to bfloat16 where the processor computes in it, else to float32.

    Raises:
        ModelError: OpenVINO does not compute in this type.
    """
    capabilities = core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    if dtype == "auto":
        return "bfloat16" if "BF16" in capabilities else "float32"
    if dtype not in PRECISIONS:
        raise ModelError(f"OpenVINO does not compute in {dtype} on a CPU")
    return dtype


def convert(module: Any, example: Sequence[Any]) -> openvino.Model:  # noqa: ANN401 # a module of torch
    """Convert a module of torch to a graph, by its run over an example of its inputs."""
    return openvino.convert_model(module, example_input=tuple(example))


def write(model: openvino.Model, directory: Path) -> None:
    """Write a graph into a directory that is made for it, with its weights as they are.

    Raises:
        OSError: It cannot be written, for which OpenVINO raises what it raises for all else.
    """
    try:
        openvino.save_model(model, directory / GRAPH, compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def thread_count() -> int:
    """Return the threads that a graph runs on: those that the supervisor gave, else all cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(available_cores()))


@dataclass(frozen=True)
class TorchSample:
    """Texts that a graph is compared on, and what torch makes of them in float32.

    Attributes:
        tokens: Tokens of the texts.
        lengths: Tokens of each text, shape (texts,).
        vectors: Output of torch, shape (texts, dimensions).
    """

    tokens: Tokens
    lengths: NDArray[np.int64]
    vectors: NDArray[np.float32]

    def write(self, directory: Path) -> None:
        """Write the sample beside a graph."""
        columns: dict[str, Any] = {f"column {k}": v for k, v in self.tokens.columns.items()}
        np.savez(directory / SAMPLE, lengths=self.lengths, vectors=self.vectors, **columns)

    @classmethod
    def read(cls, directory: Path) -> "TorchSample":
        """Read the sample of a graph.

        Raises:
            OSError: There is none.
            ValueError: It is damaged.
        """
        try:
            with (directory / SAMPLE).open("rb") as file, np.load(file, allow_pickle=False) as data:
                names = [name for name in data.files if name.startswith("column ")]
                columns = {name.removeprefix("column "): data[name] for name in names}
                lengths, vectors = data["lengths"], data["vectors"]
        except (EOFError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{directory / SAMPLE} is damaged: {error}") from error
        return cls(Tokens(columns, np.cumsum(lengths)), lengths, vectors)


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that is ready to run, one batch at a time.

    Attributes:
        inputs: Names of the features that it takes, in its order.
    """

    inputs: Sequence[str]
    request: openvino.InferRequest

    @classmethod
    def open(cls, directory: Path, inputs: Sequence[str], dtype: str) -> "CompiledGraph":
        """Compile the graph in a directory, as `compile` does.

        Raises:
            RuntimeError: OpenVINO cannot read or compile it.
        """
        return cls.compile(core().read_model(directory / GRAPH), inputs, dtype)

    @classmethod
    def compile(cls, model: openvino.Model, inputs: Sequence[str], dtype: str) -> "CompiledGraph":
        """Compile a graph.

        Args:
            model: The graph.
            inputs: Names of the features that it takes.
            dtype: Key of `PRECISIONS`.

        Raises:
            RuntimeError: OpenVINO cannot compile it.
        """
        compiled = core().compile_model(
            model,
            DEVICE,
            {
                "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
                "INFERENCE_NUM_THREADS": thread_count(),
                "NUM_STREAMS": 1,  # a worker a device is the farm's way to have several
                "ENABLE_CPU_PINNING": False,  # all workers of a host would pin to the same cores
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP_SIZE if dtype == "int8" else 0,
            },
        )
        return cls(inputs, compiled.create_infer_request())

    def run(self, features: Mapping[str, Any]) -> NDArray[np.float32]:
        """Embed a padded batch, to vectors of shape (rows, dimensions).

        Raises:
            OutOfMemory: The batch does not fit in memory.
        """
        try:
            self.request.infer([features[name] for name in self.inputs], share_inputs=True)
        except MemoryError as error:
            raise OutOfMemory("the host's memory is full") from error
        except RuntimeError as error:
            if any(words in str(error) for words in NO_MEMORY):
                raise OutOfMemory(str(error)) from error
            raise
        return np.array(self.request.get_output_tensor(0).data, dtype=np.float32)

    def compare(self, sample: TorchSample, pad: Pad, step: int = 1) -> NDArray[np.float64]:
        """Return the cosine with torch of every `step`-th text of a sample, shape (texts / step,).

        One that is not a number stands for a vector that has no direction. Neighbours have about
        the same length: run by themselves they have little padding.
        """
        rows = np.arange(0, len(sample.lengths), step)
        runs = np.array_split(rows, max(1, len(rows) // SAMPLE_RUN_TEXTS))
        ours = [self.run(pad(sample.tokens, sample.lengths[run], run)) for run in runs]
        return cosine(np.concatenate(ours), sample.vectors[rows])


def check_cosines(cosines: NDArray[np.float64], dtype: str) -> None:
    """Refuse a graph whose vectors are not torch's.

    Raises:
        ModelError: The message says how far they are off.
    """
    least = float(cosines.min())
    if not least >= COSINES_MIN[dtype]:  # nor is it where it is NaN
        raise ModelError(f"OpenVINO in {dtype} is off: cosine {least:.4f} with torch at worst")


def open_kept(
    directory: Path,
    inputs: Sequence[str],
    dtype: str,
    pad: Pad,
    sample: TorchSample | None = None,
) -> CompiledGraph | None:
    """Compile a graph that was kept, if its vectors are torch's; else throw it away.

    Args:
        directory: Directory of its files.
        inputs: Names of the features that it takes.
        dtype: Key of `PRECISIONS`.
        pad: Makes a device batch of some texts.
        sample: What torch makes of some texts now; None for what it made of them at first.
    """
    try:
        graph, first = CompiledGraph.open(directory, inputs, dtype), TorchSample.read(directory)
        compared, step = (first, SAMPLE_STEP) if sample is None else (sample, 1)
        check_cosines(graph.compare(compared, pad, step), dtype)
    except (OSError, RuntimeError, ValueError) as error:
        log.warning("the graph in %s is of no use, making it anew: %s", directory, error)
        _discard(directory)
        return None
    return graph


def _discard(directory: Path) -> None:
    """Throw a graph away, as another worker may do at the same moment; one may have to stay."""
    try:
        with TemporaryDirectory(dir=directory.parent) as place, suppress(FileNotFoundError):
            directory.rename(Path(place) / "graph")
    except OSError as error:
        name_once(str(directory), f"it cannot be removed: {error.strerror}")
