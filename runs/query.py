"""A query as a vector of the model that an output was made with."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.manifest import Manifest
from embedfarm.contract.canaries import cosine_min, likeness
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.runs.request import spec_of
from embedfarm.workers.canary_keeper import embed_texts
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.opening import open_engine


def query_spec(manifest: Manifest, settings: Settings) -> JobSpec:
    """Return the spec by which a query is embedded for a search in an output, in float32.

    It is embedded on OpenVINO if the output was: this host then has its graph, and needs no torch.
    """
    said = manifest.settings
    engines = [str(account.get("engine", "")) for account in manifest.accounts.values()]
    converted = any(engine.startswith("openvino") for engine in engines)
    return JobSpec(
        model=manifest.model,
        dtype="float32",
        engine="openvino" if converted and not settings.batch_bytes_max else "auto",
        task="query" if said.get("task") else "",
        max_length=said["max_length"],
        dimensions=said["dimensions"],
        normalize=said["normalize"],
    )


def embed_query(manifest: Manifest, text: str, settings: Settings) -> NDArray[np.float32]:
    """Return the vector of a query, shape (dimensions,), made in this process.

    Raises:
        ModelError: The model is not to be had, or makes other vectors than those of the output.
    """
    engine = open_engine(query_spec(manifest, settings), "cpu", settings)
    _compare_canaries(manifest, engine)
    return np.asarray(engine.forward(engine.tokenise([text]), np.arange(1))[0])


def _compare_canaries(manifest: Manifest, engine: Engine) -> None:
    """Refuse a model that makes other vectors than those of an output.

    Raises:
        ModelError: It does.
    """
    known = manifest.canaries
    if known is None:
        return
    spec = msgspec.structs.replace(spec_of(manifest), model=manifest.model, dtype="float32")
    engine_of_job = engine.for_job(spec)
    if engine_of_job is None:
        return
    made = embed_texts(engine_of_job, known.texts)
    least = likeness(known.matrix(), made).least if made.shape[1] == known.dimensions else 0.0
    if least < cosine_min(manifest.fingerprint.get("dtype", ""), "float32"):
        raise ModelError(
            f"{manifest.model} makes other vectors here than those of the output (least cosine "
            f"{least:.4f}): `embedfarm check` says what is another one's"
        )
