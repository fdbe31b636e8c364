"""Renders kustomizations as kustomize does, as far as `deploy/kubernetes` uses it.

No registry that the gate uses has kustomize. What this does not know, it refuses. That it renders
as kustomize 5.5 does, `test_render_is_that_of_kustomize` tells where kubectl is.
"""

import base64
import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

Document = dict[str, Any]
MERGE_KEYS: Final = {
    "containers": "name",
    "env": "name",
    "envFrom": None,
    "args": None,
    "command": None,
    "tolerations": None,
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Key by which Kubernetes merges the entries of a list; None where a patch replaces the list."""
WORKLOADS: Final = ("Deployment", "StatefulSet")
SELECTING: Final = (*WORKLOADS, "PodDisruptionBudget")
CLUSTERED: Final = ("Namespace",)
LETTERS: Final = str.maketrans("013ae", "ghkmt")  # of a hash, so that no word comes of it
NAMING: Final = {"configMapRef": "ConfigMap", "secretRef": "Secret"}


class Unsupported(ValueError):
    """Raised for what kustomize may know, and this does not."""


def render(folder: Path) -> list[Document]:
    """Return the documents of a kustomization, as `kubectl kustomize FOLDER` prints them.

    Raises:
        FileNotFoundError: A file is missing that the kustomization names.
        Unsupported: The kustomization uses something that this does not know.
    """
    documents = _accumulate(folder, [])
    names = {}
    for each in documents:
        if each.pop("generated", False):
            name = each["metadata"]["name"]
            names[each["kind"], name] = each["metadata"]["name"] = f"{name}-{_hash(each)}"
    for each in documents:
        _rename(each, names)
    return documents


def _accumulate(folder: Path, found: list[Document]) -> list[Document]:
    """Return what was found so far, changed and enlarged by the kustomization in a folder."""
    wanted = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    del wanted["apiVersion"]
    is_component = wanted.pop("kind") == "Component"
    documents = found if is_component else []
    for name in wanted.pop("resources", ()):
        path = folder / name
        documents += _accumulate(path, []) if path.is_dir() else load(path)
    for name in wanted.pop("components", ()):
        documents = _accumulate(folder / name, documents)
    for kind, generate in (("ConfigMap", _config_map), ("Secret", _secret)):
        for each in wanted.pop(f"{kind[0].lower()}{kind[1:]}Generator", ()):
            body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": each.pop("name")}}
            documents.append(body | generate(folder, each) | {"generated": True})
    for name, transform in TRANSFORMERS.items():
        if (value := wanted.pop(name, None)) is not None:
            transform(documents, value, folder)
    if wanted:
        raise Unsupported(f"{folder}: {sorted(wanted)}")
    return documents


def load(path: Path) -> list[Document]:
    """Read the documents of a file; two keys of one name, which YAML forbids, are an error."""
    return list(yaml.load_all(path.read_text(encoding="utf-8"), OnceLoader))


class OnceLoader(yaml.SafeLoader):
    """YAML loader that refuses a key that a mapping has already."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 -- PyYAML's
        """Construct a mapping, of which each key must be another one."""
        keys = [self.construct_object(key) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.constructor.ConstructorError("a key twice", node.start_mark, str(keys))
        return super().construct_mapping(node, deep)


def _config_map(_folder: Path, wanted: Document) -> Document:
    data = dict(each.split("=", 1) for each in wanted.pop("literals"))
    if wanted:
        raise Unsupported(str(wanted))
    return {"data": data}


def _secret(folder: Path, wanted: Document) -> Document:
    data = {}
    for name in wanted.pop("envs", ()):
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            data[key] = value.encode()
    for name in wanted.pop("files", ()):
        data[Path(name).name] = (folder / name).read_bytes()
    if wanted:
        raise Unsupported(str(wanted))
    return {"type": "Opaque", "data": {key: _encode(value) for key, value in data.items()}}


def _encode(value: bytes) -> str:
    """Return base64 in lines of 70 characters, as kustomize has it and its hashes count it."""
    text = base64.b64encode(value).decode()
    lines = [text[start : start + 70] for start in range(0, len(text), 70)]
    return "".join(f"{line}\n" for line in lines) if len(text) >= 70 else text


def _hash(document: Document) -> str:
    """Return what kustomize appends to a name, so that what uses it starts again with new data."""
    facts: Document = {"name": ""}  # as kustomize looks it up, it finds none
    facts |= {key: document[key] for key in ("kind", "type", "data") if key in document}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    if set(text) & set("<>&"):
        raise Unsupported("a character that Go writes in another way")
    return hashlib.sha256(text.encode()).hexdigest()[:10].translate(LETTERS)


def _rename(node: object, names: Mapping[tuple[str, str], str]) -> None:
    """Let references follow what has another name now."""
    if isinstance(node, list):
        for each in node:
            _rename(each, names)
    if isinstance(node, dict):
        for key, value in node.items():
            if key in NAMING:
                value["name"] = names.get((NAMING[key], value["name"]), value["name"])
            elif key == "secretName":
                node[key] = names.get(("Secret", value), value)
            else:
                _rename(value, names)


def _patch(documents: list[Document], patches: list[Document], folder: Path) -> None:
    for each in patches:
        (patch,) = load(folder / each["path"])
        target = each.get("target")
        matching = [one for one in documents if _is_target(one, patch, target)]
        if not matching:
            raise Unsupported(f"{folder}: {each['path']} patches nothing")
        for one in matching:
            wanted = {key: value for key, value in patch.items() if key != "metadata"}
            one.update(merge(one, wanted))


def _is_target(document: Document, patch: Document, target: Document | None) -> bool:
    if target is None:
        names = (document["metadata"]["name"], patch["metadata"]["name"])
        return document["kind"] == patch["kind"] and len(set(names)) == 1
    if target.keys() != {"kind", "labelSelector"}:
        raise Unsupported(str(target))
    label, _, value = target["labelSelector"].partition("=")
    labels = document["metadata"].get("labels", {})
    return bool(document["kind"] == target["kind"] and labels.get(label) == value)


def merge(base: Any, patch: Any, key: str = "") -> Any:  # noqa: ANN401 -- whatever YAML has
    """Return a part of a document with a strategic merge patch applied."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for name, value in patch.items():
            if name.startswith("$") or value is None:
                raise Unsupported(f"{name}: {value}")
            merged[name] = merge(base[name], value, name) if name in base else value
        return merged
    if isinstance(base, list) and isinstance(patch, list):
        if (by := MERGE_KEYS[key]) is None:
            return patch
        own = {each[by]: each for each in base}
        changed = {each[by]: each for each in patch}
        first = [merge(own.get(name, {}), each) for name, each in changed.items()]
        return first + [each for name, each in own.items() if name not in changed]
    return patch


def _namespace(documents: list[Document], name: str, _folder: Path) -> None:
    for each in documents:
        each["metadata"]["name" if each["kind"] in CLUSTERED else "namespace"] = name


def _suffix(documents: list[Document], suffix: str, _folder: Path) -> None:
    for each in documents:
        each["metadata"]["name"] += suffix


def _label(documents: list[Document], wanted: list[Document], _folder: Path) -> None:
    for each in wanted:
        pairs = each.pop("pairs")
        selects = each.pop("includeSelectors", False)
        if each.keys() - {"includeTemplates"}:
            raise Unsupported(str(each))
        for one in documents:
            one["metadata"].setdefault("labels", {}).update(pairs)
            if one["kind"] in WORKLOADS and (selects or each.get("includeTemplates")):
                one["spec"]["template"]["metadata"]["labels"].update(pairs)
            if selects and one["kind"] in SELECTING:
                one["spec"]["selector"]["matchLabels"].update(pairs)
            elif selects and one["kind"] != "ScaledObject":
                raise Unsupported(f"a selector of {one['kind']}")


def _replicate(documents: list[Document], wanted: list[Document], _folder: Path) -> None:
    for each in wanted:
        for one in documents:
            if one["kind"] in WORKLOADS and one["metadata"]["name"] == each["name"]:
                one["spec"]["replicas"] = each["count"]


def _image(documents: list[Document], wanted: list[Document], _folder: Path) -> None:
    images = {each["name"]: f"{each['newName']}:{each['newTag']}" for each in wanted}
    for container in containers(documents):
        name = container["image"].rpartition(":")[0]
        container["image"] = images.get(name, container["image"])


def containers(documents: list[Document]) -> Iterator[Document]:
    """Yield all containers."""
    for each in documents:
        if each["kind"] in WORKLOADS:
            yield from each["spec"]["template"]["spec"]["containers"]


Transformer = Callable[[list[Document], Any, Path], None]
TRANSFORMERS: Final[dict[str, Transformer]] = {
    "patches": _patch,
    "namespace": _namespace,
    "nameSuffix": _suffix,
    "labels": _label,
    "replicas": _replicate,
    "images": _image,
}
"""Transformers by their names in a kustomization, in the order in which kustomize applies them."""


def by_name(documents: list[Document]) -> dict[tuple[str, str], Document]:
    """Return documents by kind and name; two of one name are an error."""
    found = {(each["kind"], each["metadata"]["name"]): copy.deepcopy(each) for each in documents}
    assert len(found) == len(documents), "two documents of one name"
    return found
