"""Models on the devices of a group: each layer over all of them, or some layers on each.

Tensor parallel is by the plan that transformers has for an architecture: each rank holds a part of
each matrix, and twice in each layer the ranks add up what they have. An architecture without a plan
has its layers spread over GPUs, which then work one after the other, all from the first rank: that
gives a model the memory of all, and no more speed than one has.
"""

import json
import logging
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig
from transformers.distributed.configuration_utils import DistributedConfig

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError, resolve
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.arithmetic import Arithmetic
from embedfarm.workers.engines.device_errors import device_errors
from embedfarm.workers.engines.engine import DeviceFailed, Engine, Finish, OutOfMemory, Tokenised
from embedfarm.workers.engines.group import Group, current_group
from embedfarm.workers.engines.sentence_transformer import (
    SentenceTransformerEngine,
    follow_routes,
    load_files,
)

HEADS: Final = ("num_attention_heads", "num_key_value_heads")
SUMS_PER_LAYER: Final = 2  # of what all ranks have: after the attention, and after the rest

log = logging.getLogger(__name__)


def open_on_group(spec: JobSpec, device: str, settings: Settings) -> Engine:
    """Open a model on all devices of this worker's group, and log what that costs.

    Raises:
        NoRoom: There is no memory for it now.
        ModelError: The model is not to be had, does not work, or cannot be spread.
    """
    directory, size = resolve(spec.model, settings.model_cache), _group().size
    reason = find_obstacle(directory, size)
    if not reason:
        return GroupEngine.open(spec, device, settings.model_cache)
    if device == "cpu":
        raise ModelError(
            f"{reason}, and on CPUs layers are not spread: it needs a worker of one device"
        )
    log.info(
        "%s: %s. Its layers are spread over %d devices, which work one after the other: they "
        "have the memory of all and the speed of one",
        *(directory, reason, size),
    )
    return LayeredEngine.open(spec, device, settings.model_cache)


def find_obstacle(directory: Path, size: int) -> str:
    """Return why so many ranks cannot share each layer of a model; "" if they can.

    Args:
        directory: Directory of the model's files.
        size: Number of ranks.
    """
    folders = [file.parent for file in sorted(directory.rglob("config.json")) if _is_model(file)]
    for folder in folders:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if not config.base_model_tp_plan:
            return f"transformers has no plan to share layers of {config.model_type}"
        for name in HEADS:
            heads = getattr(config, name, size)
            if heads % size:
                return f"its {heads} {name.removeprefix('num_').replace('_', ' ')} are not {size}"
    return "" if folders else "it is no transformer"


def sharding(size: int) -> dict[str, Any]:
    """Return the options for loading by which each of `size` ranks holds a part of each layer."""
    return {"distributed_config": DistributedConfig(tp_size=size)}


class GroupEngine(SentenceTransformerEngine):
    """A SentenceTransformer whose transformer all ranks of the group compute together.

    This is the first rank, which has the vectors and does all else by itself.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = f"torch, tensor parallel on {_group().size}"

    @classmethod
    def _load_files(
        cls, directory: Path, device: str, dtype: str, task: str
    ) -> SentenceTransformer:
        """Load the modules of a model, and the other ranks' parts of the transformer."""
        group = _group()
        options = sharding(group.size)
        number, loaded = group.load(
            *(str(directory), dtype, task),
            lambda: load_files(directory, device, dtype, options),
        )
        transformer = follow_routes(loaded, task)[0]
        group.keep(transformer, number)
        _log_cost(directory, transformer.config, group.size)
        return loaded

    def measure(self) -> Arithmetic:
        """Count the operations of all ranks, which have equal parts, and their peak."""
        part, size = super().measure(), _group().size
        return Arithmetic(*(size * each for each in astuple(part)))

    def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
        """Begin to embed `rows`; what fails after that fails in all ranks.

        Raises:
            OutOfMemory: The rows do not fit on the devices together.
            DeviceFailed: The ranks are in step no longer.
        """
        finish = super().start(batch, rows)

        def finish_in_step() -> NDArray[np.float32]:
            try:
                return finish()
            except (DeviceFailed, OutOfMemory):
                raise
            except Exception as error:
                raise DeviceFailed(str(error)) from error

        return finish_in_step

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Leave values on the host, from where all ranks take them."""
        return values

    def sentence_embeddings(self, features: dict[str, Any]) -> torch.Tensor:
        """Run the model's modules in order, the first one on all ranks."""
        move = super()._to_device
        tensors = {n: value for n, value in features.items() if isinstance(value, torch.Tensor)}
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        moved = {name: move(tensor) for name, tensor in tensors.items()}
        with _group().forward(self.model[0], features | arrays), device_errors():
            return super().sentence_embeddings(features | moved)


class LayeredEngine(SentenceTransformerEngine):
    """A SentenceTransformer whose layers lie on several devices that this process sees."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = f"torch, layers on {_group().size}"

    @classmethod
    def _load_files(
        cls,
        directory: Path,
        device: str,
        dtype: str,
        task: str,  # noqa: ARG003 # as in the class above it
    ) -> SentenceTransformer:
        """Load the modules of a model, its layers spread over all devices."""
        return load_files(directory, device, dtype, {"device_map": "auto"})


def _group() -> Group:
    """Return the group whose first rank this process is.

    Raises:
        ModelError: It is none.
    """
    group = current_group()
    if group is None:
        raise ModelError("this worker has a single device")
    return group


def _is_model(file: Path) -> bool:
    """Tell whether a configuration is that of a transformer, and not of a module beside it."""
    return "model_type" in json.loads(file.read_text(encoding="utf-8"))


def _log_cost(directory: Path, config: Any, size: int) -> None:  # noqa: ANN401 # any architecture's
    """Log what it costs that ranks share each layer: what they exchange for a token."""
    text = config.get_text_config()
    sums = SUMS_PER_LAYER * text.num_hidden_layers + 1  # the embedding of the token is one, too
    log.info(
        "%s: tensor parallel on %d devices, which add up %d vectors of %d components a token",
        *(directory, size, sums, text.hidden_size),
    )
