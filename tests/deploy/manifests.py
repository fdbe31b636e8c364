"""What the manifests of `deploy/kubernetes` hold, by overlay."""

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.deploy.kustomize import WORKLOADS, Document, by_name

ROOT: Final = Path(__file__).parents[2]
OVERLAYS: Final = ("cpu", "gpu")
Overlays = dict[str, list[Document]]


def copy_with_secrets(folder: Path) -> Path:
    """Copy the manifests, make secrets as the documents say to, and return where they are."""
    deploy = folder / "deploy"
    shutil.copytree(ROOT / "deploy", deploy, ignore=shutil.ignore_patterns("secrets"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [str(deploy / "kubernetes" / "secrets.sh")]
    subprocess.run(command, check=True, env=os.environ | {"PATH": path}, stdout=subprocess.DEVNULL)
    return deploy / "kubernetes"


def every(overlays: Overlays, *kinds: str) -> list[tuple[str, Document]]:
    """All documents of some kinds, or of all, each with the name of its overlay."""
    pairs = [(name, each) for name, found in overlays.items() for each in found]
    return [(name, each) for name, each in pairs if not kinds or each["kind"] in kinds]


def pods(overlays: Overlays) -> Iterator[tuple[str, Document, Document]]:
    """Yield the name, the metadata and the specification of each pod of each overlay."""
    for overlay, each in every(overlays, *WORKLOADS):
        template = each["spec"]["template"]
        yield f"{overlay}/{each['metadata']['name']}", template["metadata"], template["spec"]


def containers(overlays: Overlays) -> Iterator[tuple[str, Document, Document]]:
    """Yield the name, the pod and each container of it."""
    for name, _, pod in pods(overlays):
        assert pod.keys().isdisjoint({"initContainers", "ephemeralContainers"})
        for container in pod["containers"]:
            yield name, pod, container


def given_to_serve(overlays: Overlays) -> dict[str, str]:
    """Return the environment of `serve` in the overlay that scales."""
    found = overlays["gpu"]
    (container,) = [each for *_, each in containers({"gpu": found}) if each["name"] == "serve"]
    return variables(found, container)


def variables(overlay: Sequence[Document], container: Document) -> dict[str, str]:
    """Return the environment of a container, without that of its image."""
    found: dict[str, str] = {}
    names = by_name(list(overlay))
    for source in container["envFrom"]:
        if "configMapRef" in source:
            found |= names["ConfigMap", source["configMapRef"]["name"]]["data"]
        else:
            data = names["Secret", source["secretRef"]["name"]]["data"]
            found |= {key: base64.b64decode(value).decode() for key, value in data.items()}
    return found | {each["name"]: each["value"] for each in container.get("env", ())}
