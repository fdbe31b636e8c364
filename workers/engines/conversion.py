"""Conversion of a SentenceTransformer to a graph for OpenVINO, with torch, and what it costs.

In "int8" weights are quantised when a graph is made and activations when it runs, which costs some
accuracy: how much is measured against torch before it is used, and said.
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
import torch
from sentence_transformers.base.modules import Transformer

from embedfarm.contract.durable_files import sync
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.arithmetic import Arithmetic
from embedfarm.workers.engines.cache_files import leave_out
from embedfarm.workers.engines.calibration import calibration_texts
from embedfarm.workers.engines.converted_model import (
    TOKENIZERS_MAX,
    ConvertedModel,
    KeptTokenizer,
    Prepared,
    cache_directory,
    digest,
    files_identity,
    kept_path,
    peak_name,
    read_kept,
    write_kept,
)
from embedfarm.workers.engines.encoder_tokenizer import EncoderTokenizer
from embedfarm.workers.engines.graph import (
    SAMPLE_STEP,
    VERSION,
    CompiledGraph,
    TorchSample,
    check_cosines,
    convert,
    open_kept,
    write,
)
from embedfarm.workers.engines.measurement import known_peak
from embedfarm.workers.engines.model_tokenizer import ModelTokenizer
from embedfarm.workers.engines.sentence_transformer import WARM_UP, SentenceTransformerEngine

GRAPH_VERSION: Final = "5"  # changes with how graphs are made
PROMPTS_MAX: Final = 16  # of a model that are tried, which takes a moment each
COMPARED_STEP: Final = 8  # of the calibration texts, each so many is compared with torch

log = logging.getLogger(__name__)


class _Graph(torch.nn.Module):
    """All modules of a model in order, as one function of the tensors among its features.

    Attributes:
        inputs: Names of the tensors.
        constants: Other features that change the function: a prompt's length only where the pooling
            leaves the prompt out.
    """

    def __init__(self, engine: SentenceTransformerEngine) -> None:
        super().__init__()
        self.example = engine.features(engine.tokenise(WARM_UP), np.arange(len(WARM_UP)))
        self.parts = torch.nn.ModuleList(list(engine.model))
        self.inputs = [name for name, value in self.example.items() if torch.is_tensor(value)]
        self.without = {*self.inputs, *(["prompt_length"] if engine.keeps_prompt else [])}
        self.constants = self.constants_of(self.example)

    def constants_of(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of some features that change the function, beside the tensors."""
        return {name: value for name, value in features.items() if name not in self.without}

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the texts, shape (n, dimensions)."""
        features = dict(zip(self.inputs, columns, strict=True)) | self.constants
        for part in self.parts:
            features = part(features)
        return torch.as_tensor(features["sentence_embedding"])


def prepare_with_torch(
    spec: JobSpec, dtype: str, settings: Settings
) -> tuple[Prepared, CompiledGraph]:
    """Open a model with torch, make its graph if there is none, and keep what is found out.

    Args:
        spec: The job.
        dtype: Type that the graph computes in, not "auto".
        settings: Settings, which say where models and graphs are kept.

    Raises:
        ModelError: The model is not to be had, does not convert, or loses too much by it.
    """
    plain = msgspec.structs.replace(spec, dtype="float32")
    engine = SentenceTransformerEngine.open(plain, "cpu", settings.model_cache)
    if not isinstance(engine.model[0], Transformer):
        raise ModelError("OpenVINO takes transformers, and this model begins with another module")
    fingerprint = engine.fingerprint | {"dtype": dtype}
    try:
        graph = _Graph(engine)
        path, compiled = _find_graph(engine, graph, fingerprint, settings)
    except RuntimeError as error:  # OpenVINO's errors are all of this kind
        raise ModelError(f"{spec.model} does not run on OpenVINO: {error}") from error
    peak = 0.0 if dtype == "int8" else known_peak(engine.device, getattr(torch, dtype))
    counted = engine.arithmetic
    if isinstance(engine.tokenizer, EncoderTokenizer) and not engine.has_routes:
        place = kept_path(fingerprint, settings)
        write_kept(
            place, _describe(engine, graph, path, read_kept(place), {peak_name(dtype): peak})
        )
    engine.model.to("meta")  # torch's weights have done their work; a tokenizer may stay
    prepared = Prepared(
        fingerprint,
        engine.tokenizer,
        path,
        tuple(graph.inputs),
        engine.full_dimensions,
        engine.unit,
        Arithmetic(counted.per_token, counted.per_token_squared, peak),
    )
    return prepared, compiled


def _describe(
    engine: SentenceTransformerEngine,
    graph: _Graph,
    path: Path,
    before: ConvertedModel | None,
    peaks: dict[str, float],
) -> ConvertedModel:
    """Describe a model that was opened, with all that was known of it before."""
    model, found = engine.model, engine.preprocessing
    kept = {(each.prompt, each.limit): each for each in (before.tokenizers if before else [])}
    for each in _tokenizers(engine, graph, path):
        kept[each.prompt, each.limit] = each
    return ConvertedModel(
        inputs=graph.inputs,
        dimensions=engine.full_dimensions,
        unit=engine.unit,
        limit=found.own_limit,
        prompts=found.prompts,
        default_prompt=model.default_prompt_name or "",
        padding=found.padding,
        flops=(engine.arithmetic.per_token, engine.arithmetic.per_token_squared),
        peaks=(before.peaks if before else {}) | peaks,
        tokenizers=list(kept.values())[-TOKENIZERS_MAX:],
    )


def _tokenizers(
    engine: SentenceTransformerEngine, graph: _Graph, path: Path
) -> Sequence[KeptTokenizer]:
    """Try tokenizer.json with the job's prompt and limit, and with those that the model has itself.

    Only prompts are kept for which the graph is the same.
    """
    model, names = engine.model, list(engine.model.prompts)[:PROMPTS_MAX]
    plain = msgspec.structs.replace(engine.spec, prompt="", prompt_name="", task="", max_length=0)
    own = [plain, *(msgspec.structs.replace(plain, prompt_name=name) for name in names)]
    found = [
        ModelTokenizer(spec, model).find_encoder(engine.directory) for spec in (engine.spec, *own)
    ]
    kept = []
    for each in filter(None, found):
        if graph.constants_of(each.constants) == graph.constants:
            prompt = each.encoder.tokenisation.prompt
            kept.append(KeptTokenizer(prompt, each.limit, dict(each.frame), path.name))
    return kept


def _find_graph(
    engine: SentenceTransformerEngine,
    graph: _Graph,
    fingerprint: Mapping[str, str],
    settings: Settings,
) -> tuple[Path, CompiledGraph]:
    """Return the directory of a graph whose vectors are torch's, made if there is none.

    One that cannot be kept there is used all the same.
    """
    dtype = fingerprint["dtype"]
    identity = files_identity(fingerprint) | {
        "task": engine.spec.task if engine.has_routes else "",
        "constants": repr(sorted(graph.constants.items())),
        "openvino": VERSION,
        "graph": GRAPH_VERSION,
    }
    path = cache_directory(settings) / digest(identity)
    kept = None
    if path.exists():  # made by a model of these digests, but perhaps not by this one
        now = _sample(engine, COMPARED_STEP * SAMPLE_STEP)
        kept = open_kept(path, graph.inputs, dtype, engine.preprocessing.pad, now)
    if kept is not None:
        return path, kept
    model, sample = _convert(engine, graph, dtype), _sample(engine, COMPARED_STEP)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = Path(directory) / "graph"
            write(model, made)
            sample.write(made)
            compiled = CompiledGraph.open(made, graph.inputs, dtype)
            _check(compiled, sample, engine, dtype)
            _keep(made, path)
    except OSError as error:
        leave_out(path, error)
        compiled = CompiledGraph.compile(model, graph.inputs, dtype)
        _check(compiled, sample, engine, dtype)
    return path, compiled


def _keep(made: Path, path: Path) -> None:
    """Keep the directory of a graph, of which a loss of power leaves all, or nothing."""
    for file in made.iterdir():
        with file.open("rb") as written:
            sync(written)
    try:
        made.rename(path)
    except OSError:
        if not path.exists():  # of several workers at once one wins
            raise


def _sample(engine: SentenceTransformerEngine, step: int) -> TorchSample:
    """Embed every so many texts with torch, one by one, so that no padding has a part in it."""
    batch = engine.preprocessing.truncate(calibration_texts()[::step])
    with torch.inference_mode():
        made = [
            engine.sentence_embeddings(engine.features(batch, np.asarray([row])))
            for row in range(len(batch.lengths))
        ]
    return TorchSample(batch.features, batch.lengths, torch.cat(made).numpy())


def _check(
    compiled: CompiledGraph, sample: TorchSample, engine: SentenceTransformerEngine, dtype: str
) -> None:
    """Refuse a graph whose vectors are not torch's, and log what it loses.

    Raises:
        ModelError: The graph loses too much.
    """
    cosines = compiled.compare(sample, engine.preprocessing.pad)
    log.info(
        "OpenVINO in %s against torch: cosine %.5f on average, %.5f at least",
        *(dtype, cosines.mean(), cosines.min()),
    )
    check_cosines(cosines, dtype)


def _convert(engine: SentenceTransformerEngine, graph: _Graph, dtype: str) -> Any:  # noqa: ANN401 # a graph
    """Convert a model to its graph, quantised where that is asked for."""
    transformer = cast("Any", engine.model[0]).auto_model
    near = "sliding_attention" in getattr(transformer.config, "layer_types", ())
    attention = transformer.config._attn_implementation  # noqa: SLF001 # no public question
    if near or engine.model.tokenizer.padding_side == "left":
        # Padding that is before a text, or too far behind one for a layer that sees only what is
        # near, sees nothing at all, of which fused attention makes NaN.
        transformer.set_attn_implementation("eager")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing warns of every shape, and of its own end
            model = convert(graph.eval(), [graph.example[name] for name in graph.inputs])
    finally:
        transformer.set_attn_implementation(attention)
    return _quantise(model) if dtype == "int8" else model


def _quantise(model: Any) -> Any:  # noqa: ANN401 # a graph
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
