"""Real text that every machine has, to try engines with."""

import builtins
import inspect
import logging
import os
import threading
from types import ModuleType
from typing import Final

TEXTS_MAX: Final = 256
_MODULES: Final[tuple[ModuleType, ...]] = (builtins, inspect, logging, os, threading)


def calibration_texts() -> list[str]:
    """Return docstrings of some modules that are always loaded, of all lengths, longest last."""
    objects = [each for module in _MODULES for each in vars(module).values()]
    objects += [each for kind in (str, dict, list, set, int) for each in vars(kind).values()]
    texts = {text for each in objects if (text := inspect.getdoc(each))}
    ordered = sorted(texts, key=lambda text: (len(text), text))
    return ordered[:: -(-len(ordered) // TEXTS_MAX)]
