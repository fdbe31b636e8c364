"""The choice of the engine that a job asks for, and of its float32 reference."""

import msgspec

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import Engine


def open_engine(spec: JobSpec, device: str, settings: Settings) -> Engine:
    """Open the engine that a job asks for, loaded and warmed up.

    Args:
        spec: The job.
        device: torch's name of the device that this process is pinned to: "cpu" or "cuda:0".
        settings: Settings, which say where models are kept.

    Raises:
        ModelError: The model is not to be had.
    """
    if model_files.is_null(spec.model):
        from embedfarm.workers.engines.null import NullEngine  # noqa: PLC0415 # one engine, one import

        return NullEngine.open(spec)
    from embedfarm.workers.engines.sentence_transformer import (  # noqa: PLC0415 # it imports torch: seconds
        SentenceTransformerEngine,
    )

    if spec.engine == "openvino" or (spec.engine, spec.dtype) == ("auto", "int8"):
        from embedfarm.workers.engines.openvino import open_openvino  # noqa: PLC0415 # the same

        return open_openvino(spec, device, settings)
    if spec.engine == "auto" and device == "cpu" and not settings.batch_bytes_max:
        from embedfarm.workers.engines.choice import open_fastest  # noqa: PLC0415 # the same

        return open_fastest(spec, device, settings)
    engine = SentenceTransformerEngine.open(spec, device, settings.model_cache)
    if engine.asynchronous:
        from embedfarm.workers.engines.unpadded import unpad_if_faster  # noqa: PLC0415 # the same

        unpad_if_faster(engine)
    return engine


def open_reference(engine: Engine, spec: JobSpec, settings: Settings) -> Engine | None:
    """Open the same model in float32 on the CPU, with the same tokens; None for the null engine.

    Raises:
        ModelError: The model does not load a second time.
    """
    if model_files.is_null(spec.model):
        return None
    from embedfarm.workers.engines.sentence_transformer import (  # noqa: PLC0415 # it imports torch: seconds
        SentenceTransformerEngine,
    )

    if type(engine) is SentenceTransformerEngine and engine.exact:
        return engine
    if isinstance(engine, SentenceTransformerEngine) and engine.exact_twin is not None:
        return engine.exact_twin
    plain = msgspec.structs.replace(spec, dtype="float32")
    return SentenceTransformerEngine.open(plain, "cpu", settings.model_cache, measured=False)
