"""A SentenceTransformer on OpenVINO: its own modules, converted to one graph, on a CPU.

Tokenising, padding and packing are those of the torch engine; only the arithmetic is OpenVINO's.
In "int8" weights are quantised when a graph is made and activations when it runs,
which costs some accuracy: how much is measured against torch before it is used, and said.
"""

import functools
import hashlib
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self, cast

import msgspec
import numpy as np
import torch
from sentence_transformers.base.modules import Transformer

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.workers.devices import cpu_name
from embedfarm.workers.engines.arithmetic import known_peak
from embedfarm.workers.engines.calibration import calibration_texts
from embedfarm.workers.engines.sentence_transformer import WARM_UP, SentenceTransformerEngine

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
# Options of a job that decide what goes into a graph, and what becomes of what comes out.
NOT_IN_GRAPH: Final = frozenset(
    {"prompt", "prompt_name", "max_length", "long", "normalize", "dimensions"}
)
GRAPH_VERSION: Final = "4"  # changes with how graphs are made
# What a launch takes in tokens, less than on torch: 16 to 24 by benchmarks/batch_shapes.py, between
# which the time of a corpus is the same to 0.2 %, and the padding least with 16.
LAUNCH_TOKENS: Final = 16

# Weights of torch that are kept beside a graph; to load them again takes each job half a second.
TWIN_BYTES_MAX: Final = 256 << 20

log = logging.getLogger(__name__)


class OpenVinoEngine(SentenceTransformerEngine):
    """The torch engine with another back end; opened by `open_openvino`."""

    request: openvino.InferRequest
    inputs: Sequence[str]
    constants: Mapping[str, Any]
    name = "openvino"

    def for_job(self, spec: JobSpec) -> Self | None:
        """Return the engine of another job on the same graph; None where it needs another."""
        other = super().for_job(spec)
        if other is None or _Graph(list(other.model), _example(other)).constants != self.constants:
            return None
        if self.exact_twin is not None:
            exact = msgspec.structs.replace(spec, dtype=self.exact_twin.spec.dtype)
            other.exact_twin = self.exact_twin.for_job(exact)
        return other

    def sentence_embeddings(self, features: dict[str, Any]) -> torch.Tensor:
        """Run the graph in place of the modules, and return its embeddings."""
        columns = [features[name].numpy() for name in self.inputs]
        self.request.infer(columns, share_inputs=True)
        return torch.from_numpy(self.request.get_output_tensor(0).data.copy())


class _Graph(torch.nn.Module):
    """All modules of a model in order, as one function of the tensors among its features.

    Attributes:
        inputs: Names of the tensors.
        constants: Other features that change the function: a prompt's length only where the pooling
            leaves the prompt out.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], features: dict[str, Any]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(modules)
        self.inputs = [name for name in features if torch.is_tensor(features[name])]
        keeps_prompt = all(getattr(module, "include_prompt", True) for module in modules)
        without = {*self.inputs, *(["prompt_length"] if keeps_prompt else [])}
        self.constants = {k: v for k, v in features.items() if k not in without}

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the texts, shape (n, dimensions)."""
        features = dict(zip(self.inputs, columns, strict=True)) | self.constants
        for part in self.parts:
            features = part(features)
        return torch.as_tensor(features["sentence_embedding"])


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


def open_openvino(spec: JobSpec, device: str, settings: Settings) -> OpenVinoEngine:
    """Open a model on OpenVINO, from the cache, or converted and compared with torch.

    Raises:
        ModelError: The model is not to be had, does not convert, or loses too much by it.
    """
    if device != "cpu":
        raise ModelError("OpenVINO embeds on CPUs only")
    if settings.batch_bytes_max:
        # Measured: it goes on without memory that it does not get, and its vectors are wrong.
        raise ModelError("OpenVINO does not notice a memory limit; unset batch_bytes_max")
    dtype = resolve_dtype(spec.dtype)
    plain = SentenceTransformerEngine.open(
        msgspec.structs.replace(spec, dtype="float32"), device, settings.model_cache
    )
    if not isinstance(plain.model[0], Transformer):
        raise ModelError("OpenVINO takes transformers, and this model begins with another module")
    fingerprint = plain.fingerprint | {"dtype": dtype}
    engine = OpenVinoEngine(plain.model, spec, plain.device, fingerprint, plain.directory)
    engine.has_routes = plain.has_routes
    engine.launch_tokens = LAUNCH_TOKENS
    engine.arithmetic = replace(plain.arithmetic, peak_per_second=_peak(plain, dtype))
    path = _cache_path(settings.engine_cache.expanduser(), engine)
    try:
        if not path.exists():
            _make_graph(plain, engine, path, dtype)
        _load(engine, path, dtype)
        if _bytes(plain.model) <= TWIN_BYTES_MAX:
            engine.exact_twin = plain  # each job's vectors are compared with its own
        else:
            engine.model.to("meta")  # torch's weights have done their work; the tokenizer stays
    except RuntimeError as error:  # OpenVINO's errors are all of this kind
        raise ModelError(f"{spec.model} does not run on OpenVINO: {error}") from error
    return engine


def _bytes(model: torch.nn.Module) -> int:
    """Return the size of a model's weights in bytes."""
    return sum(weight.nbytes for weight in model.parameters())


def _peak(plain: SentenceTransformerEngine, dtype: str) -> float:
    """Return the processor's best in operations per second, as torch reaches it; 0 for int8."""
    if dtype == "int8":
        return 0.0
    if dtype == "float32":
        return plain.arithmetic.peak_per_second
    return known_peak(plain.device, getattr(torch, dtype))


def _make_graph(
    plain: SentenceTransformerEngine, engine: OpenVinoEngine, path: Path, dtype: str
) -> None:
    """Put a graph at `path` whose vectors are torch's; of several workers at once one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / "graph"
        openvino.save_model(_convert(engine, dtype), made / "graph.xml", compress_to_fp16=False)
        _load(engine, made, dtype)
        _compare(plain, engine, dtype)
        try:
            made.rename(path)
        except OSError:
            if not path.exists():
                raise


def _example(engine: OpenVinoEngine) -> dict[str, Any]:
    """Return the features of a small batch."""
    return engine.features(engine.tokenise(WARM_UP), np.arange(len(WARM_UP)))


def _load(engine: OpenVinoEngine, path: Path, dtype: str) -> None:
    """Give the engine its compiled graph."""
    graph = _Graph(list(engine.model), _example(engine))
    engine.inputs, engine.constants = graph.inputs, graph.constants
    compiled = core().compile_model(
        core().read_model(path / "graph.xml"),
        DEVICE,
        {
            "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,  # a worker a device is the farm's way to have several
            "ENABLE_CPU_PINNING": False,  # all workers of a host would pin to the same cores
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP_SIZE if dtype == "int8" else 0,
        },
    )
    engine.request = compiled.create_infer_request()


def _convert(engine: OpenVinoEngine, dtype: str) -> openvino.Model:
    """Convert a model to its graph, quantised where that is asked for."""
    example = _example(engine)
    graph = _Graph(list(engine.model), example)
    transformer = cast("Any", engine.model[0]).auto_model
    near = "sliding_attention" in getattr(transformer.config, "layer_types", ())
    if near or engine.model.tokenizer.padding_side == "left":
        # Padding that is before a text, or too far behind one for a layer that sees only what is
        # near, sees nothing at all, of which fused attention makes NaN.
        transformer.set_attn_implementation("eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of every shape it sees, and of its own end
        columns = tuple(example[name] for name in graph.inputs)
        model = openvino.convert_model(graph.eval(), example_input=columns)
    return _quantise(model) if dtype == "int8" else model


def _quantise(model: openvino.Model) -> openvino.Model:
    """Quantise weights to eight bits by channel, symmetric; activations follow in each run.

    Embeddings are looked up and not multiplied, so they gain nothing by it. Symmetric weights lose
    no more than others and are faster, because nothing has to be added for a zero point.
    """
    with redirect_stdout(sys.stderr):  # where it logs, and draws a progress bar
        import nncf  # noqa: PLC0415 # seconds, which only this needs

        ignored = nncf.IgnoredScope(types=["Gather"], validate=False)
        return nncf.compress_weights(
            model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=ignored
        )


def _cache_path(cache: Path, engine: OpenVinoEngine) -> Path:
    """Name a graph's directory by all that changes what it computes, or if it may be trusted."""
    without = NOT_IN_GRAPH if engine.has_routes else NOT_IN_GRAPH | {"task"}
    kept = {name: value for name, value in engine.fingerprint.items() if name not in without}
    identity = kept | {
        "constants": repr(sorted(_Graph(list(engine.model), _example(engine)).constants.items())),
        "openvino": VERSION,
        "graph": GRAPH_VERSION,
        "processor": cpu_name(),  # it was compared with torch on this one
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache / "openvino" / digest[:32]


def _compare(plain: SentenceTransformerEngine, engine: OpenVinoEngine, dtype: str) -> None:
    """Refuse a graph whose vectors are not torch's, and log what it loses."""
    texts = calibration_texts()[::8]
    batch, rows = plain.tokenise(texts), np.arange(len(texts))
    ours, theirs = engine.forward(batch, rows), plain.forward(batch, rows)
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosines = (ours * theirs).sum(axis=1) / norms
    least, mean = float(cosines.min()), float(cosines.mean())
    log.info(
        "OpenVINO in %s against torch: cosine %.5f on average, %.5f at least", dtype, mean, least
    )
    if not least >= COSINES_MIN[dtype]:  # nor is it where it is NaN
        raise ModelError(f"OpenVINO in {dtype} is off: cosine {least:.4f} with torch at worst")
