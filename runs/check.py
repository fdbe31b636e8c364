"""Whether a model still makes the vectors of an output, and what is another model's if not."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.dequantisation import restore
from embedfarm.collector.manifest import Manifest
from embedfarm.collector.sample_list import read_sample
from embedfarm.contract import model_files
from embedfarm.contract.canaries import Likeness, cosine_min, likeness
from embedfarm.contract.job_spec import JOB_FIELDS, JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.contract.similarity import cosine
from embedfarm.runs.request import spec_of
from embedfarm.workers.canary_keeper import embed_texts
from embedfarm.workers.engines.endpoint_client import TEXTS_MAX, EndpointClient, RequestRefused
from embedfarm.workers.engines.engine import DeviceAway
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.engines.tokenizer import find_prompt
from embedfarm.workers.quantisation import quantise

Verdict: TypeAlias = Literal[
    "same", "precision", "weights", "tokenizer", "configuration", "device", "close", "related",
    "other", "unknown",
]  # fmt: skip
VERDICTS: Final[Mapping[Verdict, str]] = {
    "same": "this model makes the vectors of this output",
    "precision": "the same model in another precision",
    "weights": "other weights, though they make nearly the same vectors",
    "tokenizer": "another tokenizer: the same texts become other tokens",
    "configuration": "another configuration: prompts, pooling, limits or the like",
    "device": "the same files make other vectors here: a device, an engine or a library computes "
    "in another way",
    "close": "nearly the same vectors: a coarser precision, or slightly other weights",
    "related": "other vectors of a like model: another prompt, tokenizer, pooling or fine-tuning",
    "other": "another model",
    "unknown": "nothing can be compared",
}
"""Each verdict, and what it says of a model, in half a sentence."""

NEIGHBOURS: Final = 10
CLOSE_MIN: Final = cosine_min("int8")
RELATED_MIN: Final = 0.3  # mean cosine; that of two models without anything in common is near 0
BITS_COSINE_MIN: Final = 0.9  # of stored bits or steps, of which a vector near an edge flips some
LIMIT_TOKENS: Final = 256  # that any model takes

Embed: TypeAlias = Callable[[Sequence[str]], NDArray[np.float32]]


@dataclass(frozen=True)
class CheckReport:
    """What was found out about a model and an output.

    Attributes:
        verdict: One of `VERDICTS`.
        reason: What it rests on, in a sentence.
        differing: Components in which the fingerprints differ; empty where they do not, or one of
            them is not known, as that of a server.
        canaries: Fixed texts that were compared.
        least: Least cosine of a canary's two vectors; None where none was compared.
        mean: Mean cosine of these.
        sample: Texts of the corpus that were compared.
        sample_least: Least cosine of their two vectors, as the output stores them.
        recall: Share of the ten nearest neighbours within the sample that stay the same.
    """

    verdict: Verdict
    reason: str
    differing: list[str] = field(default_factory=list)
    canaries: int = 0
    least: float | None = None
    mean: float | None = None
    sample: int = 0
    sample_least: float | None = None
    recall: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether the model makes the vectors of the output."""
        return self.verdict == "same"


@dataclass(frozen=True)
class Candidate:
    """A model that is compared with an output.

    Attributes:
        embed: Embeds texts as the job did; a vector is zero where there is none.
        spec: The job, as it would be done by this model.
        fingerprint: Fingerprint by component; empty where it is not known.
        bytes_max: Longest text that may be compared, in bytes of UTF-8.
    """

    embed: Embed
    spec: JobSpec
    fingerprint: Mapping[str, str]
    bytes_max: int


def local_candidate(
    manifest: Manifest, settings: Settings, model: str = "", dtype: str = "", device: str = "cpu"
) -> Candidate:
    """Load a model to be compared, in this process.

    Args:
        manifest: The output's.
        settings: Settings, which say where models are kept.
        model: Directory or name of the model; "" for the output's.
        dtype: Type to compute in; "" for the output's.
        device: torch's name of the device.

    Raises:
        ModelError: The model is not to be had.
    """
    spec = spec_of(manifest)
    made_in = manifest.fingerprint.get("dtype", "auto")
    known = made_in if made_in in JOB_FIELDS["dtype"].choices else "auto"
    spec = msgspec.structs.replace(spec, model=model or spec.model, dtype=dtype or known)
    engine = open_engine(spec, device, settings)
    return Candidate(
        lambda texts: embed_texts(engine, texts), spec, engine.fingerprint, np.iinfo(np.int64).max
    )


def served_candidate(
    manifest: Manifest, settings: Settings, url: str, model: str = ""
) -> Candidate:
    """Find a model on a server to be compared; the prompt of the job is put before each text.

    What a server cuts off is not known, so that long texts are left out.

    Args:
        manifest: The output's.
        settings: Settings, which have the key of the server.
        url: What stands before `/embeddings`.
        model: Name by which the server knows the model; "" for the output's.

    Raises:
        ModelError: The server is away, or has no such model, or does not embed.
    """
    spec = spec_of(manifest)
    key = settings.endpoint_key.get_secret_value()
    client = EndpointClient(url, settings.endpoint_requests_max, settings.hang_seconds / 2, key)
    client.model = client.find_model(model or settings.endpoint_served_model or spec.model)
    prompt = _prompt_of(spec, settings)

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        prompted = [prompt + text for text in texts]
        pieces = [prompted[at : at + TEXTS_MAX] for at in range(0, len(prompted), TEXTS_MAX)]
        try:
            made = np.concatenate([client.embed(piece) for piece in pieces])
        except (DeviceAway, RequestRefused) as error:
            raise model_files.ModelError(f"{client.shown} does not embed: {error}") from error
        made = made[:, : spec.dimensions or None]
        return _unit(made) if spec.normalize or spec.dimensions else made

    limit = spec.max_length or LIMIT_TOKENS
    return Candidate(embed, spec, {}, max(0, limit - len(prompt.encode())))


def check(directory: Path, manifest: Manifest, candidate: Candidate) -> CheckReport:
    """Compare a model with the one that made an output.

    Raises:
        OutputError: The sample of the output is damaged.
    """
    ours, theirs = manifest.fingerprint, candidate.fingerprint
    differing, files = list[str](), bool(ours and theirs)
    if files:
        differing = model_files.differences(ours, theirs)
    known = manifest.canaries
    kept = [] if known is None else _short(known.texts, candidate)
    if known is None or not kept:
        return CheckReport("unknown", _why_unknown(manifest, differing), differing)
    made = candidate.embed([known.texts[at] for at in kept])
    if made.shape[1] != known.dimensions:
        reason = f"its vectors have {made.shape[1]:,} dimensions, those here {known.dimensions:,}"
        return CheckReport("other", reason, differing, canaries=len(kept))
    found = likeness(known.matrix()[kept], made)
    numbers: dict[str, Any] = {
        "differing": differing, "canaries": len(kept), "least": found.least, "mean": found.mean,
    }  # fmt: skip
    numbers |= _compare_sample(directory, manifest, candidate)
    least = cosine_min(
        manifest.fingerprint.get("dtype", ""), candidate.fingerprint.get("dtype", "")
    )
    alike = found.least >= least and found.lengths
    verdict = _judge(differing, found, alike=alike, files=files)
    reason = f"the least cosine of {len(kept)} fixed texts is {found.least:.5f}"
    if verdict in {"same", "precision"} and numbers.get("sample_least") is not None:
        bits = manifest.settings["vector_dtype"] not in {"float32", "float16"}
        if numbers["sample_least"] < (BITS_COSINE_MIN if bits else least):
            verdict = "device"
            reason += ", but texts of the corpus have other vectors in the output"
    elif found.least >= least and not found.lengths:
        reason += ", and the vectors are not as long"
    return CheckReport(verdict, reason, **numbers)


def _judge(differing: Sequence[str], found: Likeness, *, alike: bool, files: bool) -> Verdict:
    """Name what differs.

    Args:
        differing: Components in which the fingerprints differ.
        found: How alike the canaries are.
        alike: Whether they are as alike as those of one model.
        files: Whether both fingerprints are known; else the vectors alone decide.
    """
    if not files:
        return "same" if alike else _judge_vectors(found)
    if "weights" in differing:
        return "weights" if found.least >= CLOSE_MIN else "other"
    if "tokenizer" in differing:
        return "tokenizer"
    if set(differing) - {"dtype"}:
        return "configuration"
    if not alike:
        return "device"
    return "precision" if differing else "same"


def _judge_vectors(found: Likeness) -> Verdict:
    if found.least >= CLOSE_MIN:
        return "close"
    return "related" if found.mean >= RELATED_MIN else "other"


def _compare_sample(directory: Path, manifest: Manifest, candidate: Candidate) -> dict[str, Any]:
    """Compare the vectors of texts of the corpus, as the output stores them."""
    if manifest.sample is None:
        return {}
    sample = read_sample(directory, manifest.sample)
    kept = _short(sample.texts, candidate)
    if not kept:
        return {}
    made = candidate.embed([sample.texts[at] for at in kept])
    spec, ranges = candidate.spec, manifest.settings.get("ranges") or []
    width = manifest.settings.get("lsh_bits") or made.shape[1]
    stored = restore(sample.matrix[kept], width, ranges)
    again = restore(quantise(made, spec), width, ranges)
    cosines = np.nan_to_num(cosine(stored, again))
    return {
        "sample": len(kept),
        "sample_least": float(cosines.min()),
        "recall": recall_of_neighbours(stored, again),
    }


def recall_of_neighbours(one: NDArray[np.float32], other: NDArray[np.float32]) -> float | None:
    """Return the share of nearest neighbours that are the same in two embeddings of some texts.

    The ten nearest of each text among the others count, or half of the others where these are
    fewer; None for fewer than three texts.

    Args:
        one: Vectors, shape (texts, dimensions).
        other: Vectors of the same texts.
    """
    count = min(NEIGHBOURS, (len(one) - 1) // 2)
    if not count:
        return None
    near = []
    for matrix in (one, other):
        scores = _unit(matrix) @ _unit(matrix).T
        np.fill_diagonal(scores, -np.inf)
        near.append(np.argsort(-scores, axis=1, kind="stable")[:, :count])
    same = sum(len(np.intersect1d(*pair)) for pair in zip(*near, strict=True))
    return same / (count * len(one))


def _short(texts: Sequence[str], candidate: Candidate) -> list[int]:
    """List the places of the texts that are not too long to be compared."""
    return [at for at, text in enumerate(texts) if len(text.encode()) <= candidate.bytes_max]


def _unit(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    return np.asarray(matrix / np.where(norms > 0, norms, 1), np.float32)


def _why_unknown(manifest: Manifest, differing: Sequence[str]) -> str:
    """Say why no vectors are compared, and what the files tell."""
    if manifest.canaries is not None:
        return "its canaries are longer than what the job keeps of a text"
    files = f"; of the model's files {', '.join(differing)} differ" if differing else ""
    return f"it has no canaries: an earlier version made it, or a worker without any{files}"


def _prompt_of(spec: JobSpec, settings: Settings) -> str:
    """Return what a job puts before each text; that of a model is read from its files, if here.

    Raises:
        ModelError: The job names a prompt of the model, which its files do not tell.
    """
    directory = model_files.find_local(spec.model, settings.model_cache)
    path = None if directory is None else directory / "config_sentence_transformers.json"
    if path is None or not path.exists():
        if not spec.prompt and (spec.prompt_name or spec.task):
            raise model_files.ModelError(f"the files of {spec.model}, which has prompts, are away")
        return spec.prompt
    said = json.loads(path.read_text(encoding="utf-8"))
    prompts = {name: prompt or "" for name, prompt in (said.get("prompts") or {}).items()}
    return find_prompt(spec, prompts, said.get("default_prompt_name") or "")


if set(get_args(Verdict)) != VERDICTS.keys():
    raise TypeError("each verdict has a sentence")
