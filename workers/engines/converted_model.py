"""What opening a model with torch finds out for OpenVINO, kept: later starts need no torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.contract.token_ids import TokenEncoder
from embedfarm.workers.cores import cpu_name
from embedfarm.workers.engines.arithmetic import Arithmetic
from embedfarm.workers.engines.cache_files import keep
from embedfarm.workers.engines.encoder_tokenizer import EncoderTokenizer
from embedfarm.workers.engines.graph import thread_count
from embedfarm.workers.engines.tokenizer import Tokenizer, find_prompt
from embedfarm.workers.engines.tokens import Padding

VERSION: Final = "2"  # changes with what is kept, and how it is found out
LIBRARIES: Final = ("openvino", "sentence-transformers", "tokenizers", "torch", "transformers")
# What of a job's fingerprint decides what goes into a graph, and what becomes of what comes out. Of
# the dtype only int8 makes another graph, and a task only that of a model with routes.
NOT_IN_GRAPH: Final = frozenset(
    {"prompt", "prompt_name", "max_length", "long", "normalize", "dimensions", "dtype", "task"}
)
TOKENIZERS_MAX: Final = 64  # of a model, the oldest of which is forgotten


class KeptTokenizer(msgspec.Struct, frozen=True):
    """A prompt and a limit with which tokenizer.json was seen to do what the model itself does.

    Attributes:
        prompt: Text put before every chunk.
        limit: Tokens that a text may have.
        frame: What all tokens have in each feature of the model beside the ids.
        graph: Name of the graph for texts with this prompt.
    """

    prompt: str
    limit: int
    frame: dict[str, int]
    graph: str


class ConvertedModel(msgspec.Struct, frozen=True):
    """A model that was converted to a graph, and what its tokenizer does.

    Attributes:
        inputs: Names of the features that the graph takes, in its order.
        dimensions: Components of a vector, before any are cut off.
        unit: Whether all vectors have length 1.
        limit: Tokens that a text may have if the job says nothing.
        prompts: The model's prompts by name.
        default_prompt: Name of the prompt that it has by default, "" without one.
        padding: How the texts of a device batch are padded.
        flops: Operations per token, and per pair of tokens of a text.
        peaks: Operations per second of this processor, by dtype and threads, as `peak_name` has it.
        tokenizers: Tokenizers that were tried, the latest one last.
    """

    inputs: list[str]
    dimensions: int
    unit: bool
    limit: int
    prompts: dict[str, str]
    default_prompt: str
    padding: Padding
    flops: tuple[float, float]
    peaks: dict[str, float]
    tokenizers: list[KeptTokenizer]


@dataclass(frozen=True)
class Prepared:
    """What an engine on OpenVINO needs to know of a model for a job.

    Attributes:
        fingerprint: Fingerprint of the vectors.
        tokenizer: Makes the tokens.
        graph: Directory of the graph.
        inputs: Names of the features that the graph takes, in its order.
        dimensions: Components of a vector, before any are cut off.
        unit: Whether all vectors have length 1.
        arithmetic: Operations of the model, and the processor's peak; 0 where it is not known.
    """

    fingerprint: dict[str, str]
    tokenizer: Tokenizer
    graph: Path
    inputs: tuple[str, ...]
    dimensions: int
    unit: bool
    arithmetic: Arithmetic


def kept_path(fingerprint: Mapping[str, str], settings: Settings) -> Path:
    """Return where a model that was converted for a job is described.

    Args:
        fingerprint: Fingerprint of the job's vectors.
        settings: Settings, which say where graphs are kept.
    """
    identity = files_identity(fingerprint) | {"kept": VERSION, **_versions()}
    return cache_directory(settings) / f"{digest(identity)}.json"


def cache_directory(settings: Settings) -> Path:
    """Return the directory of all graphs, and of the descriptions of their models."""
    return settings.engine_cache.expanduser() / "openvino"


def files_identity(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return what decides a graph, whatever the job asks for beside its dtype."""
    kept = {name: value for name, value in fingerprint.items() if name not in NOT_IN_GRAPH}
    return kept | {"quantised": str(fingerprint["dtype"] == "int8"), "processor": cpu_name()}


def digest(identity: Mapping[str, str]) -> str:
    """Return a short name for what is identified by some texts."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def peak_name(dtype: str) -> str:
    """Return the name under which a processor's peak is kept."""
    return f"{dtype} on {thread_count()} threads"


def read_kept(path: Path) -> ConvertedModel | None:
    """Return what is known of a model; None where nothing is, or it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ConvertedModel)
    except (OSError, msgspec.DecodeError):
        return None


def write_kept(path: Path, model: ConvertedModel) -> None:
    """Keep what is known of a model, if it can be written."""
    keep(path, msgspec.json.encode(model))


def from_kept(
    kept: ConvertedModel, spec: JobSpec, fingerprint: dict[str, str], directory: Path, graphs: Path
) -> Prepared | None:
    """Prepare a job without torch; None where it asks for what was not tried with the model.

    Args:
        kept: What is known of the model.
        spec: The job.
        fingerprint: Fingerprint of its vectors.
        directory: Directory of the model's files.
        graphs: Directory of all graphs.

    Raises:
        ModelError: The model cannot do what the job asks for.
    """
    prompt = find_prompt(spec, kept.prompts, kept.default_prompt)
    limit = min(spec.max_length or kept.limit, kept.limit)
    tried = (each for each in kept.tokenizers if (each.prompt, each.limit) == (prompt, limit))
    found = next(tried, None)
    if found is None or not (graphs / found.graph).is_dir():
        return None
    encoder = TokenEncoder.describe(directory, prompt, limit)
    tokenizer = EncoderTokenizer(spec, encoder, found.frame, kept.padding)
    tokenizer.check()
    return Prepared(
        fingerprint,
        tokenizer,
        graphs / found.graph,
        tuple(kept.inputs),
        kept.dimensions,
        kept.unit,
        Arithmetic(*kept.flops, kept.peaks.get(peak_name(fingerprint["dtype"]), 0.0)),
    )


@cache
def _versions() -> dict[str, str]:
    """Return the versions of the libraries that had a part in what is kept."""
    return {name: version(name) for name in LIBRARIES}
