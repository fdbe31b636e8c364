"""A query as a vector of the model that an output was made with."""

import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.manifest import Manifest
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
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
        ModelError: The model is not to be had.
    """
    engine = open_engine(query_spec(manifest, settings), "cpu", settings)
    return np.asarray(engine.forward(engine.tokenise([text]), np.arange(1))[0])
