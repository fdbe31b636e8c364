"""Any sentence-transformers model on torch, with our packing instead of `encode`'s fixed batches.

The vectors are those of `SentenceTransformer.encode`: its own preprocessing makes the tokens
(prompts, templates and truncation included) and its own modules make the vectors. Only what is
batched with what is ours.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize
from transformers.utils.logging import disable_progress_bar

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.records import TokenisationSettings
from embedfarm.workers.engines.arithmetic import Arithmetic
from embedfarm.workers.engines.device_errors import device_errors
from embedfarm.workers.engines.device_module import device_module
from embedfarm.workers.engines.engine import (
    Chunk,
    DeviceFailed,
    Engine,
    Finish,
    ModelUnavailable,
    NoRoom,
    OutOfMemory,
    Tokenised,
    only_texts,
)
from embedfarm.workers.engines.measurement import count_flops, known_peak
from embedfarm.workers.engines.model_tokenizer import ModelTokenizer
from embedfarm.workers.engines.tokenizer import Tokenizer
from embedfarm.workers.engines.tokens import Tokens, lay_end_to_end
from embedfarm.workers.engines.unchanged_files import unchanged

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN: Final = 4
# Padded tokens per device batch before memory is learned, and the tokens that take as long as a
# launch by itself: on a CPU from benchmarks/batch_shapes.py, on a GPU set from launch latency.
BATCH_TOKENS: Final = {"cpu": 2048, "gpu": 65536}
# On a GPU a device batch has as many tokens as keep it busy for some 20 ms at 500 TFLOP/s: a small
# model is bound by launches and wants many, a large one is as fast with few.
BATCH_FLOPS: Final = 1e13
GPU_BATCH_TOKENS: Final = (16_384, 131_072)  # see docs/gpu.md
LAUNCH_TOKENS: Final = {"cpu": 64, "gpu": 2048}
COUNTED: Final = ("word " * 60, "word " * 120)  # two lengths, to tell tokens from pairs of tokens
WARM_UP: Final = ("warm up", "a text that is a little longer than the other one " * 4)


def resolve_dtype(dtype: str, device: str) -> str:
    """Resolve "auto" on a device: to half precision only where the hardware computes in it."""
    if dtype == "int8":
        raise model_files.ModelError("torch does not compute in int8 here; OpenVINO does, on CPUs")
    if dtype != "auto":
        return dtype
    if device.startswith("mps"):
        return "float16"
    if device != "cpu":
        wide = device_module(device).is_bf16_supported(including_emulation=False)
        return "bfloat16" if wide else "float16"
    fast = torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001 # torch offers no public question
    return "bfloat16" if fast else "float32"


@dataclass
class SentenceTransformerEngine:
    """A SentenceTransformer on one device; the transformer in its dtype, the rest in float32.

    Attributes:
        directory: Directory of the model's files.
        has_routes: Whether the model has other modules for another task.
        full_dimensions: Components that its vectors have before any are cut off.
        unit: Whether the model's last module gives all vectors length 1.
        first_position: Position of a text's first token without padding; None with padding.
        preprocessing: The model's own preprocessing.
        turn: Held by the engine of these modules whose texts the model's own tokenizer cuts now.
        tokenizer: What makes tokens: `preprocessing`, or tokenizer.json where that does the same.
        note_use: Told of each device batch of a GPU: its tokens, when it began and when it ended.
    """

    model: SentenceTransformer
    spec: JobSpec
    device: torch.device
    fingerprint: dict[str, str]
    directory: Path
    has_routes: bool = field(init=False, default=False)
    full_dimensions: int = field(init=False)
    unit: bool = field(init=False)
    dimensions: int = field(init=False)
    preprocessing: ModelTokenizer = field(init=False)
    turn: threading.Lock = field(init=False, default_factory=threading.Lock)
    tokenizer: Tokenizer = field(init=False)
    normalised: bool = field(init=False)
    first_position: int | None = field(init=False, default=None)
    batch_tokens: int = field(init=False)
    launch_tokens: int = field(init=False)
    arithmetic: Arithmetic = field(init=False, default=Arithmetic())
    note_use: Callable[[int, float, float], None] | None = field(init=False, default=None)

    name: str = field(init=False, default="torch")

    def __post_init__(self) -> None:
        full = self.model.get_embedding_dimension()
        if full is None:
            full = self.model.encode([WARM_UP[0]]).shape[1]
        self.full_dimensions = full
        where = "gpu" if self.asynchronous else "cpu"
        self.batch_tokens, self.launch_tokens = BATCH_TOKENS[where], LAUNCH_TOKENS[where]
        self._adapt()

    def _adapt(self) -> None:
        """Make all ready that depends on the job, and not on the weights."""
        full = self.full_dimensions
        self.dimensions = min(self.spec.dimensions or full, full)
        self.unit = isinstance(list(self.model)[-1], Normalize)
        self.normalised = self.spec.normalize or (self.unit and self.dimensions == full)
        self.tokenizer = self.preprocessing = ModelTokenizer(self.spec, self.model, self.turn)
        if isinstance(self.model[0], Transformer):
            self.preprocessing.check()
            self.tokenizer = self.preprocessing.find_encoder(self.directory) or self.tokenizer
        elif self.spec.max_length:
            raise model_files.ModelError("it takes whole texts, and keeps no maximum length")

    @classmethod
    def open(
        cls, spec: JobSpec, device: str, cache: Path | None, *, measured: bool = True
    ) -> "SentenceTransformerEngine":
        """Load the model and run it once, so that the first device batch pays for nothing else.

        Args:
            spec: The job.
            device: torch's name of the device.
            cache: Where models are kept.
            measured: Whether to count operations and take the device's peak, which takes time.

        Raises:
            ModelUnavailable: There is no memory for it now, or its files are being changed.
            ModelError: The model is not to be had, or does not work.
        """
        disable_progress_bar()
        directory = model_files.resolve(spec.model, cache)
        dtype = resolve_dtype(spec.dtype, device)
        try:
            with device_errors():
                with unchanged(spec, directory, dtype) as fingerprint:
                    engine = cls._load(spec, device, fingerprint, directory)
                if measured:
                    engine.arithmetic = engine.measure()
                    if engine.asynchronous:
                        engine.batch_tokens = gpu_batch_tokens(engine.arithmetic)
        except (DeviceFailed, ModelUnavailable):
            raise
        except OutOfMemory as error:
            raise NoRoom(f"{directory}: {error}") from error
        except Exception as error:  # a model's files may make anything happen
            raise model_files.ModelError(f"{directory} does not load: {error}") from error
        return engine

    @classmethod
    def _load(
        cls, spec: JobSpec, device: str, fingerprint: dict[str, str], directory: Path
    ) -> "SentenceTransformerEngine":
        """Load the model and run it once; anything may be raised."""
        loaded = cls._load_files(directory, device, fingerprint["dtype"], spec.task)
        model = follow_routes(loaded, spec.task)
        model.eval()
        for module in list(model)[1:]:
            module.float()
        if not isinstance(model[0], Transformer):
            fingerprint = fingerprint | {"dtype": "float32"}
        engine = cls(model, spec, torch.device(device), fingerprint, directory)
        engine.has_routes = model is not loaded
        engine.forward(engine.tokenise(WARM_UP), np.arange(len(WARM_UP)))
        return engine

    @classmethod
    def _load_files(
        cls,
        directory: Path,
        device: str,
        dtype: str,
        task: str,  # noqa: ARG003 # a group's other ranks need it
    ) -> SentenceTransformer:
        """Load the modules of a model, those of all tasks."""
        return load_files(directory, device, dtype, {})

    def for_job(self, spec: JobSpec) -> Self | None:
        """Return the engine of another job on these modules; None where it needs others.

        Raises:
            ModelError: The model cannot do what the job asks for.
        """
        dtypes = {resolve_dtype(each.dtype, str(self.device)) for each in (spec, self.spec)}
        if spec.model != self.spec.model or len(dtypes) > 1:
            return None
        if self.has_routes and spec.task != self.spec.task:
            return None
        other = copy(self)
        other.spec = spec
        other.fingerprint = self.fingerprint | model_files.job_components(spec)
        other._adapt()  # noqa: SLF001 # it is one of us
        return other

    @property
    def keeps_prompt(self) -> bool:
        """Whether the tokens of a prompt are pooled with those of the text behind it."""
        return all(getattr(module, "include_prompt", True) for module in self.model)

    @property
    def padded(self) -> bool:
        """Whether texts are padded: they are unless the model's attention was replaced."""
        return self.first_position is None

    @property
    def asynchronous(self) -> bool:
        """Whether the device works by itself, as a GPU does."""
        return self.device.type != "cpu"

    @property
    def apart(self) -> bool:
        """Whether the device has a memory of its own, to which one copies from pinned memory."""
        return self.device.type not in {"cpu", "mps"}

    def park(self) -> None:
        """Move the weights to the host's memory; the engine embeds nothing until `unpark`.

        Raises:
            OutOfMemory: They do not fit there.
            DeviceFailed: CUDA is in a state that only a new process gets out of.
        """
        with device_errors():
            self.model.to("cpu")

    def unpark(self) -> None:
        """Move the weights back to the device.

        Raises:
            OutOfMemory: They do not fit now; the engine is of no use any more.
            DeviceFailed: CUDA is in a state that only a new process gets out of.
        """
        with device_errors():
            self.model.to(self.device)

    @property
    def exact_twin(self) -> Engine | None:
        """The engine itself where it computes in float32 on the CPU: nothing is more exact here."""
        return (
            self if self.device.type == "cpu" and self.fingerprint["dtype"] == "float32" else None
        )

    @property
    def peak_flops_per_second(self) -> float:
        """Operations per second of the device at best, measured when the model was loaded."""
        return self.arithmetic.peak_per_second

    @property
    def tokenisation(self) -> TokenisationSettings | None:
        """Settings for token ids that were found when the model was loaded, if any."""
        return self.tokenizer.tokenisation

    def flops(self, lengths: NDArray[np.int64]) -> float:
        """Return the operations for texts of these lengths, by counts made at loading."""
        return self.arithmetic.flops(lengths)

    def measure(self) -> Arithmetic:
        """Count the model's operations, and take the device's peak in the type it computes in."""
        if not isinstance(self.model[0], Transformer):
            return Arithmetic()  # word vectors are looked up, not computed
        texts = self.preprocessing.truncate(COUNTED)
        peak = known_peak(self.device, getattr(torch, self.fingerprint["dtype"]))
        try:
            counted = count_flops(
                lambda row: self.sentence_embeddings(self.features(texts, np.asarray([row]))),
                texts.lengths.tolist(),
            )
        except Exception as error:  # noqa: BLE001 # a model may raise anything; it still embeds
            log.warning("the operations of this model cannot be counted: %s", error)
            return Arithmetic(peak_per_second=peak)
        return Arithmetic(*counted, peak)

    def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
        """Tokenise the chunks, where the model has a tokenizer of its own.

        A model whose first module is not a transformer (static or averaged word vectors) keeps the
        texts; its own preprocessing runs with the forward pass, and lengths are estimates.
        """
        if isinstance(self.model[0], Transformer):
            return self.tokenizer.tokenise(chunks)
        texts = only_texts(chunks)
        guesses = [1 + len(text) // CHARACTERS_PER_TOKEN for text in texts]
        return Tokenised(np.asarray(guesses, dtype=np.int64), texts)

    def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
        """Begin to embed `rows`; on a GPU it returns while the device still works.

        Raises:
            OutOfMemory: The rows do not fit on the device together.
            DeviceFailed: CUDA is in a state that only a new process gets out of.
        """
        began = time.perf_counter()
        with device_errors(), torch.inference_mode():
            vectors = self._embed(self.features(batch, rows))
            if self.device.type == "cpu":
                return vectors.numpy
            host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=self.apart)
            host.copy_(vectors, non_blocking=True)
            copied = device_module(str(self.device)).Event()
            copied.record()

        def finish() -> NDArray[np.float32]:
            with device_errors():
                copied.synchronize()
            if self.note_use is not None:
                self.note_use(int(batch.lengths[rows].sum()), began, time.perf_counter())
            return host.numpy()

        return finish

    def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Embed `rows`, to vectors in float32 of shape (len(rows), dimensions).

        Raises:
            OutOfMemory: The rows do not fit on the device together.
            DeviceFailed: CUDA is in a state that only a new process gets out of.
        """
        return self.start(batch, rows)()

    def features(self, batch: Tokenised, rows: NDArray[np.intp]) -> dict[str, Any]:
        """Put one batch on the device, as the first module wants it."""
        if isinstance(batch.features, Tokens):
            tokens, lengths = batch.features, batch.lengths[rows]
            if self.first_position is None:
                features = self.tokenizer.pad(tokens, lengths, rows)
            else:
                features = lay_end_to_end(tokens, lengths, rows, self.first_position)
        else:
            texts = [batch.features[row] for row in rows]
            features = self.model.preprocess(texts, prompt=self.preprocessing.prompt or None)
        made = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in features.items()
        }
        return {
            name: self._to_device(value) if isinstance(value, torch.Tensor) else value
            for name, value in made.items()
        }

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Copy values to a GPU asynchronously, from pinned memory."""
        if self.device.type == "cpu":
            return values
        return (values.pin_memory() if self.apart else values).to(self.device, non_blocking=True)

    def sentence_embeddings(self, features: dict[str, Any]) -> torch.Tensor:
        """Run the model's modules in order, all after the transformer in float32."""
        for module in self.model:
            features = module(features)
            for name in ("token_embeddings", "sentence_embedding"):
                if name in features:
                    features[name] = features[name].float()
        return torch.as_tensor(features["sentence_embedding"])

    def _embed(self, features: dict[str, Any]) -> torch.Tensor:
        """Make vectors as the job wants them, on the device."""
        vectors = self.sentence_embeddings(features)[:, : self.dimensions]
        if self.spec.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors.float().contiguous()


def gpu_batch_tokens(arithmetic: Arithmetic) -> int:
    """Return the tokens of a device batch on a GPU, before memory is learned."""
    if not arithmetic.per_token:
        return BATCH_TOKENS["gpu"]
    least, most = GPU_BATCH_TOKENS
    return max(least, min(most, int(BATCH_FLOPS / arithmetic.per_token)))


def load_files(
    directory: Path, device: str, dtype: str, options: dict[str, Any]
) -> SentenceTransformer:
    """Load a model's files to a device as sentence-transformers does.

    Args:
        directory: Directory of the files.
        device: torch's name of the device.
        dtype: Type that the transformer computes in.
        options: More options of transformers for loading.
    """
    if device.startswith("cuda"):
        # cuDNN's attention makes a plan for each shape that it has not seen: 75 ms and more on
        # an H100, and nearly each device batch has a shape of its own.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    return SentenceTransformer(
        str(directory),
        device=None if "device_map" in options else device,
        local_files_only=True,
        model_kwargs={"dtype": dtype} | options,
        # A decoder keeps the keys and values of all tokens for a next one, which never comes.
        # sentence-transformers before 6.2 lets it.
        config_kwargs={"use_cache": False},
    )


def follow_routes(model: SentenceTransformer, task: str) -> SentenceTransformer:
    """Return the model with the task's modules in place of routers: a job has one task."""
    if not any(isinstance(module, Router) for module in model):
        return model
    return SentenceTransformer(
        modules=list(chain.from_iterable(_modules_for(task, module) for module in model)),
        device=str(model.device),
        prompts=cast("dict[str, str]", model.prompts),  # as it has them itself
        default_prompt_name=model.default_prompt_name,
        truncate_dim=model.truncate_dim,
    )


def _modules_for(task: str, module: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """Return the modules that a text of a task goes through."""
    if not isinstance(module, Router):
        return [module]
    route = module._resolve_route(task or None, "text")  # noqa: SLF001 # no public question
    return list(module.sub_modules[str(route)].children())
