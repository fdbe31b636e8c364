"""A trial of the engines that take a model, to find out how fast each is here."""

import logging
import time
from typing import Final

import numpy as np
from sentence_transformers.base.modules import Transformer

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.calibration import calibration_texts
from embedfarm.workers.engines.engine import Engine, ModelUnavailable
from embedfarm.workers.engines.openvino import open_openvino
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.packing import pack

TRIED_TOKENS: Final = 2048
ROUNDS: Final = 5  # of which the best counts: a machine that has other work is slow at times

log = logging.getLogger(__name__)


def try_engines(spec: JobSpec, device: str, settings: Settings) -> dict[str, float]:
    """Run each engine that takes a model over some real text.

    Returns:
        Tokens per second of "torch" and "openvino"; nothing where only torch takes the model.

    Raises:
        ModelUnavailable: The model is not to be had now.
        ModelError: torch itself does not take the model.
    """
    plain = SentenceTransformerEngine.open(spec, device, settings.model_cache)
    engines: dict[str, Engine] = {"torch": plain}
    if isinstance(plain.model[0], Transformer):
        try:
            engines["openvino"] = open_openvino(spec, device, settings)
        except ModelUnavailable:
            raise  # nothing is found out about it now
        except ModelError as error:
            log.info("OpenVINO does not take %s: %s", spec.model, error)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS if len(engines) > 1 else 0):
        for name, engine in engines.items():
            seconds[name].append(_seconds_per_token(engine))
    return {name: 1 / min(each) for name, each in seconds.items() if each}


def _seconds_per_token(engine: Engine) -> float:
    batch = engine.tokenise(calibration_texts())
    few = np.cumsum(batch.lengths) <= TRIED_TOKENS
    rows = np.flatnonzero(few)
    began = time.perf_counter()
    for places in pack(batch.lengths[rows], engine.batch_tokens, engine.launch_tokens, padded=True):
        engine.forward(batch, rows[places])
    return (time.perf_counter() - began) / float(batch.lengths[rows].sum())
