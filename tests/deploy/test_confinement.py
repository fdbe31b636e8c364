"""A farm of the manifests' roles, each as its pod has it, but for the cluster.

The roles have the arguments, the variables, the users and the writable places of
`deploy/kubernetes`; all else is read-only, and they have no capability.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import pytest

from embedfarm.contract.settings import DEFAULT_MODEL
from embedfarm.contract.systemd_notify import ALIVE_FILE
from tests.deploy.kustomize import Document
from tests.deploy.manifests import ROOT, Overlays, containers, variables
from tests.support import free_port, wait_until

PLACES: Final = ("/models", "/jobs", "/data", "/keys")
# Mounts only in its own namespace: what it hides and closes, others still have.
CONFINE: Final = """
set -eu
mount -t tmpfs tmpfs /mnt
for place in models jobs data keys; do
  mkdir /mnt/$place
  # As the cluster does for `fsGroup`.
  chgrp "$GROUP_ID" "$SHARED/$place"
  chmod 2775 "$SHARED/$place"
  mount --bind "$SHARED/$place" /mnt/$place
done
mkdir /mnt/checkout
mount --bind "$CHECKOUT" /mnt/checkout
for place in $READ_ONLY; do mount -o remount,ro,bind /mnt/$place; done
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
if [ ! -e "$CHECKOUT" ]; then # it was there
  mkdir -p "$CHECKOUT"
  mount --bind /mnt/checkout "$CHECKOUT"
fi
while read -r _ place kind _; do
  case $kind in
    proc | sysfs | devpts | mqueue | cgroup* | devtmpfs) continue ;;
  esac
  case $place in
    /tmp | /dev/shm | /mnt | /mnt/* | /dev | /dev/* | /proc/* | /sys/*) continue ;;
  esac
  mount -o remount,ro,bind "$place"
done < /proc/self/mounts
if touch "$CLOSED" 2> /dev/null; then echo "$CLOSED can be written"; exit 3; fi
# Reading all there is, which a checkout in somebody's home takes, is no writing.
reads=-all,+dac_read_search
exec setpriv --reuid "$USER_ID" --regid "$GROUP_ID" --clear-groups --no-new-privs \
  --inh-caps=$reads --ambient-caps=$reads --bounding-set=$reads "$@"
"""


@contextlib.contextmanager
def pod(
    spec: Document, given: dict[str, str], words: list[str], shared: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the container of a pod in a mount namespace of its own, as the pod's user."""
    (container,) = spec["containers"]
    unshare = shutil.which("unshare")
    assert unshare, "unshare is missing: install the package util-linux"
    program = str(Path(sys.executable).parent / "embedfarm")
    closed = [
        each["mountPath"][1:] for each in container["volumeMounts"] if each.get("readOnly", False)
    ]
    environment = {
        "PATH": os.environ["PATH"],
        "SHARED": str(shared),
        "READ_ONLY": " ".join(closed),
        "CHECKOUT": str(ROOT),
        "CLOSED": str(ROOT / "closed"),
        "USER_ID": str(spec["securityContext"]["runAsUser"]),
        "GROUP_ID": str(spec["securityContext"]["fsGroup"]),
        **given,
    }
    command = [unshare, "--mount", "sh", "-c", CONFINE, "sh", program, *words]
    with (
        log.open("wb") as said,
        subprocess.Popen(command, stdout=said, stderr=said, env=environment) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def place(value: str, server_port: int) -> str:
    """Return the value of a variable, with places and the server where the test has them."""
    value = re.sub(rf"(?<!\w)({'|'.join(PLACES)})\b", r"/mnt\1", value)
    return value.replace("valkey:6379", f"127.0.0.1:{server_port}")


def _began(process: subprocess.Popen[bytes], alive: Path) -> bool:
    return alive.exists() or process.poll() is not None


@pytest.mark.system
@pytest.mark.parametrize("model", ["null:16", pytest.param(DEFAULT_MODEL, marks=pytest.mark.slow)])
def test_a_farm_works_confined(
    overlays: Overlays, home: Path, port: int, tmp_path: Path, model: str
) -> None:
    """A job by HTTP is done by pods that can write nowhere else, and each drains at SIGTERM."""
    found, web_port = overlays["cpu"], free_port()
    for name in PLACES:
        (tmp_path / name[1:]).mkdir()
    shutil.copy(home / "base" / "secrets" / "keys", tmp_path / "keys")
    (tmp_path / "keys" / "keys").chmod(0o644)  # as the cluster mounts secrets
    secrets = (home / "base" / "secrets" / "http").read_text().split()
    key = secrets[secrets.index("admin") + 1]
    with contextlib.ExitStack() as stack:
        processes: dict[str, subprocess.Popen[bytes]] = {}
        for _, spec, container in containers({"cpu": found}):
            if (role := container["name"]) != "valkey":
                given = variables(found, container) | {"EMBEDFARM_MODELS": f'["{model}"]'}
                assert given[ALIVE_FILE] == "/tmp/alive"  # noqa: S108 -- in the pod
                given = {name: place(value, port) for name, value in given.items()}
                words = [str(web_port) if word == "8080" else word for word in container["args"]]
                log = tmp_path / f"{role}.log"
                processes[role] = stack.enter_context(pod(spec, given, words, tmp_path, log))
        for role, process in processes.items():
            alive = Path(f"/proc/{process.pid}/root/tmp/alive")
            wait_until(partial(_began, process, alive), 60)
            assert process.poll() is None, (tmp_path / f"{role}.log").read_text()
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert re.search(r"^Uid:\t10001\t", status, re.MULTILINE), role
            assert re.search(r"^CapEff:\t0{15}4$", status, re.MULTILINE), role  # it may read
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{web_port}", headers=headers) as web:
            answer = web.post("/v1/jobs", json={"texts": ["one", "two"], "model": model})
            assert answer.is_success, answer.text
            job = answer.json()["job"]
            wait_until(lambda: web.get(f"/v1/jobs/{job}").json()["state"] == "finished", 60)
            assert len(web.get(f"/v1/jobs/{job}/results").text.splitlines()) == 2
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for role, process in processes.items():
            assert process.wait(45) == 0, (tmp_path / f"{role}.log").read_text()
