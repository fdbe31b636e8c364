"""Runs policies of another linter on the manifests of Kubernetes: `make policies`."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import yaml

from tests.deploy.kustomize import render
from tests.deploy.manifests import OVERLAYS, copy_with_secrets

LINTER: Final = Path("build/checkov/bin/checkov")
LEFT_OUT: Final = {
    "CKV_K8S_9": "a pod that nobody sends requests is ready once its startup probe is content",
    "CKV_K8S_11": "a limit of processor time would slow work where nobody else needs the core",
    "CKV_K8S_15": "tags are fixed, so that an image that is there is the one that is meant",
    "CKV_K8S_35": "the server's URL is read from the environment, which nobody else sees",
    "CKV_K8S_43": "images have no digest before somebody builds them",
}


def main() -> int:
    """Render each overlay and have checkov look at it; return 1 if it has a complaint."""
    with tempfile.TemporaryDirectory() as folder:
        home = copy_with_secrets(Path(folder))
        for name in OVERLAYS:
            text = yaml.safe_dump_all(render(home / "overlays" / name))
            (Path(folder) / f"{name}.yaml").write_text(text, encoding="utf-8")
        files = [word for name in OVERLAYS for word in ("--file", f"{folder}/{name}.yaml")]
        left_out = ["--skip-check", ",".join(LEFT_OUT)]
        command = [str(LINTER), *files, *left_out, "--framework", "kubernetes", "--compact"]
        done = subprocess.run([*command, "--quiet", "--skip-download"], check=False)
    for check, reason in LEFT_OUT.items():
        print(f"{check} is left out: {reason}")  # noqa: T201 -- a command
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
