"""Choice of the engine that embeds a model fastest here: tried once, and remembered."""

import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.quick_imports import quick_imports
from embedfarm.contract.settings import Settings
from embedfarm.workers.cores import cpu_name
from embedfarm.workers.engines.cache_files import leave_out
from embedfarm.workers.engines.engine import TRYING, Engine
from embedfarm.workers.engines.graph import VERSION, resolve_dtype, thread_count
from embedfarm.workers.engines.kept_choices import (
    Choice,
    choices_directory,
    keep_choice,
    read_choice,
)
from embedfarm.workers.engines.openvino import open_openvino

GAIN_MIN: Final = 1.05  # what another engine must gain to take torch's place: less may be noise

log = logging.getLogger(__name__)


def open_fastest(spec: JobSpec, device: str, settings: Settings) -> Engine:
    """Open the faster of torch and OpenVINO for a job on a CPU, in the precision it asks for.

    The first worker of a host tries them for some seconds while others wait for what it finds. That
    holds for `KEPT_SECONDS`.

    Raises:
        ModelError: The model is not to be had, or does not work.
    """
    path = _path(spec, settings)
    with _lock(path.with_suffix(".lock")):
        choice = read_choice(path)
        if choice is None:
            TRYING.set()
            try:
                choice = _choose(spec, device, settings)
            finally:
                TRYING.clear()
            keep_choice(path, choice)
    speeds = ", ".join(f"{name} {v:,.0f}" for name, v in choice.tokens_per_second.items())
    log.info("engine %s for %s, of those tried (tokens/s): %s", choice.engine, spec.model, speeds)
    if choice.engine == "openvino":
        return open_openvino(spec, device, settings)
    with quick_imports():
        from embedfarm.workers.engines.sentence_transformer import (  # noqa: PLC0415 # of torch
            SentenceTransformerEngine,
        )

    return SentenceTransformerEngine.open(spec, device, settings.model_cache)


def chosen_engine(spec: JobSpec, settings: Settings) -> str:
    """Return the name of the engine that was found to be the fastest here, "" if none was yet.

    Raises:
        ModelError: The model is not to be had.
    """
    choice = read_choice(_path(spec, settings))
    return "" if choice is None else choice.engine


def _choose(spec: JobSpec, device: str, settings: Settings) -> Choice:
    """Try the engines, and choose one."""
    with quick_imports():
        from embedfarm.workers.engines.trial import try_engines  # noqa: PLC0415 # it imports torch

    speeds = try_engines(spec, device, settings)
    gain = speeds.get("openvino", 0.0) / speeds.get("torch", 1.0)
    engine = "openvino" if gain >= GAIN_MIN else "torch"
    return Choice(engine, speeds, spec.model, spec.dtype, time.time())


def _path(spec: JobSpec, settings: Settings) -> Path:
    """Return where the choice for a model on such a processor is kept."""
    directory = model_files.resolve(spec.model, settings.model_cache)
    dtype = resolve_dtype("auto") if spec.dtype == "auto" else spec.dtype
    fingerprint = model_files.fingerprint(spec.model, directory, spec, dtype)
    identity = {name: fingerprint[name] for name in ("weights", "configuration", "dtype")} | {
        "processor": cpu_name(),
        "threads": str(thread_count()),
        "torch": version("torch"),
        "openvino": VERSION,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return choices_directory(settings) / f"{digest[:32]}.json"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Lock out all others on this host during the body; a process that dies lets go.

    Where no file can be locked, all find out for themselves what one could tell the others.
    """
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        except OSError as error:
            leave_out(path, error)
        yield
