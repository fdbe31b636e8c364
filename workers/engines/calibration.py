"""Real text that every machine has, to try engines with."""

import builtins
import inspect
import logging
import os
import threading
import time
from types import ModuleType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.packing import pack

TEXTS_MAX: Final = 256
COPIES: Final = 4  # in a pass, so that they fill a device batch of a GPU
_MODULES: Final[tuple[ModuleType, ...]] = (builtins, inspect, logging, os, threading)


def calibration_texts() -> list[str]:
    """Return docstrings of some modules that are always loaded, of all lengths, longest last."""
    objects = [each for module in _MODULES for each in vars(module).values()]
    objects += [each for kind in (str, dict, list, set, int) for each in vars(kind).values()]
    texts = {text for each in objects if (text := inspect.getdoc(each))}
    ordered = sorted(texts, key=lambda text: (len(text), text))
    return ordered[:: -(-len(ordered) // TEXTS_MAX)]


def calibration_pass(engine: Engine) -> tuple[NDArray[np.float32], float]:
    """Embed the texts, each of them several times.

    Returns:
        The vectors, shape (texts, dimensions), and the seconds that they took on the device.
    """
    batch = engine.tokenise(calibration_texts() * COPIES)
    batches = pack(batch.lengths, engine.batch_tokens, engine.launch_tokens, padded=engine.padded)
    vectors = np.empty((len(batch.lengths), engine.dimensions), np.float32)
    began = time.perf_counter()
    for rows in batches:
        vectors[rows] = engine.forward(batch, rows)
    return vectors, time.perf_counter() - began
