"""A query as a vector of the model that an output was made with."""

import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.manifest import Manifest
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.opening import open_engine


def query_spec(manifest: Manifest) -> JobSpec:
    """Return the spec by which a query is embedded for a search in an output, in float32."""
    said = manifest.settings
    return JobSpec(
        model=manifest.model,
        dtype="float32",
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
    engine = open_engine(query_spec(manifest), "cpu", settings)
    return np.asarray(engine.forward(engine.tokenise([text]), np.arange(1))[0])
