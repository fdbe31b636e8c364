"""The choice of the engine that a job asks for, and of its float32 reference."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Protocol

import msgspec

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JOB_FIELDS, JobSpec, job_choices
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.quick_imports import quick_imports
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.group import current_group

OWN: Final = JOB_FIELDS["engine"].choices
NULL: Final = "null"
ENDPOINT: Final = "endpoint"


class OpenEngine(Protocol):
    """What an entry point of the group `embedfarm.engines` names: a function or a class."""

    def __call__(self, spec: JobSpec, device: str, settings: Settings) -> Engine:
        """Open an engine for a job, loaded and warmed up, as `open_engine` does.

        Raises:
            ModelError: The model is not to be had, or not by this engine.
        """


def open_engine(spec: JobSpec, device: str, settings: Settings) -> Engine:
    """Open the engine that a job asks for, loaded and warmed up.

    Each engine is imported when it is opened: torch takes seconds.

    Args:
        spec: The job.
        device: torch's name of the device that this process is pinned to: "cpu" or "cuda:0".
        settings: Settings, which say where models are kept.

    Raises:
        ModelError: The model or the engine is not to be had.
    """
    name = _asked_for(spec, device, settings)
    if name == ENDPOINT:
        with quick_imports():
            from embedfarm.workers.engines.endpoint import open_endpoint  # noqa: PLC0415

        return open_endpoint(spec, settings)
    if name not in (*OWN, NULL):
        return _find_plugin(name)(spec, device, settings)
    if name == NULL:
        from embedfarm.workers.engines.null import NullEngine  # noqa: PLC0415

        return NullEngine.open(spec)
    if current_group() is not None:
        with quick_imports():
            from embedfarm.workers.engines.tensor_parallel import open_on_group  # noqa: PLC0415

        return open_on_group(spec, device, settings)
    return _open_here(name, spec, device, settings)


def _open_here(name: str, spec: JobSpec, device: str, settings: Settings) -> Engine:
    """Open one of the engines for a single device."""
    if name == "openvino":
        with quick_imports():
            from embedfarm.workers.engines.openvino import open_openvino  # noqa: PLC0415

        return open_openvino(spec, device, settings)
    if name == "auto":
        with quick_imports():
            from embedfarm.workers.engines.choice import open_fastest  # noqa: PLC0415

        return open_fastest(spec, device, settings)
    with quick_imports():
        from embedfarm.workers.engines.sentence_transformer import (  # noqa: PLC0415
            SentenceTransformerEngine,
        )

    engine = SentenceTransformerEngine.open(spec, device, settings.model_cache)
    if engine.asynchronous:
        from embedfarm.workers.engines.unpadded import unpad_if_faster  # noqa: PLC0415

        unpad_if_faster(engine)
    if settings.compile_models and engine.device.type == "cuda" and not engine.padded:
        from embedfarm.workers.engines.compiled import LateCompiling  # noqa: PLC0415

        engine.note_use = LateCompiling(engine).note_use
    return engine


def engine_name(spec: JobSpec, device: str, settings: Settings) -> str:
    """Return the name of the engine that a job is for; "" where engines must be tried first.

    Two jobs for different engines cannot share what is loaded, though all else were the same.

    Args:
        spec: The job.
        device: torch's name of the device.
        settings: Settings, which say where the choices of engines are kept.

    Raises:
        ModelError: The model is not to be had.
    """
    name = _asked_for(spec, device, settings)
    if name != "auto":
        return name
    with quick_imports():
        from embedfarm.workers.engines.choice import chosen_engine  # noqa: PLC0415

    return chosen_engine(spec, settings)


def _asked_for(spec: JobSpec, device: str, settings: Settings) -> str:
    """Return the name of the engine that a job asks for; "auto" for the fastest of several.

    Raises:
        ModelError: The job is not for the model of this worker's server.
    """
    if settings.endpoint_url:
        _check_endpoint(spec, settings)
        return ENDPOINT
    if spec.engine in OWN and model_files.is_null(spec.model):
        return NULL
    if current_group() is not None:
        return _for_group(spec)
    if spec.engine != "auto":
        return spec.engine
    if spec.dtype == "int8":
        return "openvino"
    return "torch" if device != "cpu" or settings.batch_bytes_max else "auto"


def _check_endpoint(spec: JobSpec, settings: Settings) -> None:
    """Refuse a job that is not for the model of this worker's server, by name of what differs."""
    where = f"this worker has {settings.endpoint_model} on a server"
    if spec.model != settings.endpoint_model:
        raise ModelError(f"{where}, and no other model")
    if spec.engine != "auto":
        raise ModelError(f"{where}, and no engine {spec.engine!r}")
    if spec.dtype not in {"auto", settings.endpoint_dtype}:
        raise ModelError(f"{where}, which computes in {settings.endpoint_dtype}")


def _for_group(spec: JobSpec) -> str:
    """Return the name of the engine for a worker of several devices.

    Raises:
        ModelError: Torch cannot do what the job asks for, and nothing else runs on several devices.
    """
    if spec.engine not in {"auto", "torch"} or spec.dtype == "int8":
        asked = "int8" if spec.dtype == "int8" else f"engine {spec.engine!r}"
        raise ModelError(f"{asked} runs on a single device, and this worker is a group of several")
    return "torch"


def look_at(spec: JobSpec, settings: Settings) -> None:
    """Refuse at once what `open_engine` could not open, before a loaded model goes for it.

    Weights are not read, only that their files are whole.

    Raises:
        ModelError: The model or the engine is not to be had, or files of the model are damaged.
    """
    if settings.endpoint_url:
        _check_endpoint(spec, settings)
    if spec.engine not in OWN:
        _find_plugin(spec.engine)
    elif model_files.is_null(spec.model):
        from embedfarm.workers.engines.null import NullEngine  # noqa: PLC0415 # as above

        NullEngine.open(spec)
    else:
        directory = model_files.resolve(spec.model, settings.model_cache)
        for file in model_files.weight_files(directory):
            if file.suffix == ".safetensors":
                _check_weights(file)
        for module in model_files.module_folders(directory).values():
            for file in module.glob("config.json"):
                _check_configuration(file)


def _check_weights(file: Path) -> None:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 # as above

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged: {error}") from error


def _check_configuration(file: Path) -> None:
    try:
        msgspec.json.decode(file.read_bytes(), type=dict)
    except (msgspec.DecodeError, OSError) as error:
        raise ModelError(f"{file} is damaged: {error}") from error


def _find_plugin(name: str) -> OpenEngine:
    """Return what opens an engine that an installed package brings.

    Raises:
        ModelError: None brings it, or the package does not load.
    """
    for each in entry_points(group=JOB_FIELDS["engine"].plugins, name=name):
        try:
            found: OpenEngine = each.load()
        except Exception as error:
            raise ModelError(f"engine {name!r} of {each.value} does not load: {error}") from error
        return found
    raise ModelError(f"no engine {name!r} here; there are {', '.join(job_choices('engine'))}")


def open_reference(engine: Engine, spec: JobSpec, settings: Settings) -> Engine | None:
    """Open the same model in float32 on the CPU with torch; None for the null engine.

    Raises:
        ModelError: The model does not load a second time.
    """
    if model_files.is_null(spec.model):
        return None
    with quick_imports():
        from embedfarm.workers.engines.sentence_transformer import (  # noqa: PLC0415
            SentenceTransformerEngine,
        )

    if isinstance(engine.exact_twin, SentenceTransformerEngine):
        return engine.exact_twin
    plain = msgspec.structs.replace(spec, dtype="float32")
    return SentenceTransformerEngine.open(plain, "cpu", settings.model_cache, measured=False)
