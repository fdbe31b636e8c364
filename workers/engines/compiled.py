"""Layers that torch compiles while a GPU's worker goes on with them as they are.

`torch.compile` makes a few kernels of what lies between a layer's matrix products. It takes some
twenty seconds, which a small job never gets back. So a model is first used for as long as that,
and compiled beside the work that goes on: whoever waits until the price has been paid once pays at
most twice what one would who knew the future ("ski rental"). Then both forms embed what comes in
turns, and the faster one stays.
"""

import logging
import statistics
import threading
import time
from collections.abc import Callable
from copy import copy, deepcopy
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np
import torch
from sentence_transformers.base.modules import Transformer

from embedfarm.contract.model_files import ModelError
from embedfarm.contract.similarity import cosine
from embedfarm.workers.engines.calibration import calibration_pass
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.packing import STARTED_MAX

USED_SECONDS: Final = 20.0  # what compiling takes on an H100, see docs/gpu.md
COSINE_MIN: Final = 0.999  # of any text, compiled and not, in the model's own precision
ALONE: Final = "a text by itself"
TURNS: Final = 6  # an even number: three of each form
TURN_BATCHES: Final = 8
# Compiled forms of one function of a library; layers of all models may have it in common.
FORMS_MAX: Final = 64

Compiler = Callable[[torch.fx.GraphModule, Any], Callable[..., Any]]
Module = TypeVar("Module", bound=torch.nn.Module)
log = logging.getLogger(__name__)


class SideBySide:
    """Two forms of one transformer, which embed what comes in turns until the faster one stays.

    How fast a form is shows only in real work: one may start device batches so slowly that the
    device waits, which batches that are waited for one by one do not tell.

    Attributes:
        ended: Whether the faster one has been chosen.

    Args:
        name: Name of the model.
        use: Has the model embed in its plain form from now on (0), or in its compiled one (1).
    """

    def __init__(self, name: str, use: Callable[[int], None]) -> None:
        self.ended = False
        self._name, self._use = name, use
        self._speeds: tuple[list[float], list[float]] = ([], [])
        self._turn = self._batches = self._tokens = 0
        self._seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Count a device batch that has ended.

        Args:
            tokens: Tokens that were embedded.
            seconds: Time that it took beyond the end of the batch before it.
        """
        self._batches += 1
        if self._batches <= STARTED_MAX:  # begun before the turn changed
            return
        self._tokens += tokens
        self._seconds += seconds
        if self._batches < STARTED_MAX + TURN_BATCHES:
            return
        self._speeds[self._turn % 2].append(self._tokens / self._seconds)
        self._turn, self._batches, self._tokens, self._seconds = self._turn + 1, 0, 0, 0.0
        self._use(self._turn % 2)
        if self._turn == TURNS:
            plain, compiled = map(statistics.median, self._speeds)
            log.info("compiled layers of %s: %.2f times as fast", self._name, compiled / plain)
            self._use(int(compiled > plain))
            self.ended = True


class LateCompiling:
    """Compiles the layers of a model once that has been used for `USED_SECONDS`.

    Attributes:
        engine: The engine whose modules are compiled, for all jobs that share them.
        backend: What makes code of a graph, as for `torch.compile`.
    """

    def __init__(
        self, engine: SentenceTransformerEngine, backend: str | Compiler = "inductor"
    ) -> None:
        self.engine, self.backend = engine, backend
        self._used_seconds = 0.0
        self._used_until = 0.0
        self._compiling: threading.Thread | None = None
        self._trial: SideBySide | None = None

    def note_use(self, tokens: int, began: float, ended: float) -> None:
        """Count a device batch; those that overlap count once.

        Args:
            tokens: Tokens that were embedded.
            began: Time when the batch was started, in seconds.
            ended: Time when its vectors had come, in seconds.
        """
        seconds = ended - max(began, self._used_until)
        self._used_seconds += seconds
        self._used_until = ended
        if self._trial is not None and not self._trial.ended:
            self._trial.note(tokens, seconds)
        elif self._compiling is None and self._used_seconds >= USED_SECONDS:
            self._compiling = threading.Thread(target=self._compile, daemon=True)
            self._compiling.start()

    def _compile(self) -> None:
        """Compile the layers, and have them tried if they give the same vectors."""
        name, began = self.engine.spec.model, time.perf_counter()
        try:
            compiled = compile_layers(self.engine, self.backend)
            vectors = calibration_pass(compiled)[0]
            compiled.forward(compiled.tokenise([ALONE]), np.arange(1))  # perhaps a form of its own
            least = float(cosine(vectors, calibration_pass(self.engine)[0]).min())
        except Exception as error:  # noqa: BLE001 # a compiler may raise anything; layers stay
            log.info("layers of %s are not compiled: %s", name, " ".join(str(error).split())[:300])
            return
        took = time.perf_counter() - began
        log.info("layers of %s compiled in %.0f s: cosine %.5f at least", name, took, least)
        if least >= COSINE_MIN:
            module = self.engine.model[0]
            forms = (module.model, compiled.model[0].model)
            self._trial = SideBySide(name, lambda form: setattr(module, "model", forms[form]))


def compile_layers(
    engine: SentenceTransformerEngine, backend: str | Compiler = "inductor"
) -> SentenceTransformerEngine:
    """Return an engine with the same weights whose layers are compiled when they are first run.

    Args:
        engine: The engine, which stays as it is.
        backend: What makes code of a graph, as for `torch.compile`.

    Raises:
        ModelError: The model is padded, or has no list of layers.
    """
    first = engine.model[0]
    if engine.padded or not isinstance(first, Transformer):
        raise ModelError("texts are padded, to shapes of many kinds")
    weights = chain(first.model.parameters(), first.model.buffers())
    transformer = deepcopy(first.model, {id(each): each for each in weights})
    lists = [each for each in transformer.modules() if isinstance(each, torch.nn.ModuleList)]
    if not lists:
        raise ModelError("it has no list of layers")
    torch._dynamo.config.recompile_limit = FORMS_MAX  # noqa: SLF001 # no public name
    for layer in max(lists, key=_elements):
        layer.compile(dynamic=True, backend=backend)
    compiled = copy(engine)
    compiled.note_use = None
    compiled.model = _replace(engine.model, "0", _replace(first, "model", transformer))
    return compiled


def _elements(module: torch.nn.Module) -> int:
    """Return the number of a module's weights."""
    return sum(each.numel() for each in module.parameters())


def _replace(module: Module, name: str, child: torch.nn.Module) -> Module:
    """Return a module that shares all but one of its modules with another."""
    other = copy(module)
    other._modules = module._modules | {name: child}  # noqa: SLF001 # setattr would change both
    return other
