"""Tests of what `deploy/` promises: images, compose services and systemd units."""

import json
import re
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from embedfarm.contract.broker import SOCKET_SECONDS
from embedfarm.contract.settings import Settings

ROOT: Final = Path(__file__).parent.parent
DEPLOY: Final = ROOT / "deploy"
DOCKERFILE: Final = (DEPLOY / "Dockerfile").read_text()
UNITS: Final = sorted((DEPLOY / "systemd").glob("*.service"))
PROGRAM: Final = "/opt/embedfarm/.venv/bin/embedfarm"
DRAIN_SECONDS: Final = Settings().drain_seconds
COMPOSE_KEYS: Final = {"name", "services", "volumes"}
SERVICE_KEYS: Final = {
    "build",
    "cap_drop",
    "command",
    "depends_on",
    "deploy",
    "environment",
    "healthcheck",
    "image",
    "init",
    "ports",
    "profiles",
    "restart",
    "security_opt",
    "stop_grace_period",
    "volumes",
}
BUILD_KEYS: Final = {"context", "dockerfile", "target", "args"}
HEALTHCHECK_KEYS: Final = {"test", "interval", "timeout", "retries", "start_period"}
DEPLOY_KEYS: Final = {"replicas", "resources"}
DEVICE_KEYS: Final = {"driver", "count", "capabilities"}


def compose() -> dict[str, Any]:
    """The compose file, without its extension fields."""
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return {key: value for key, value in content.items() if not key.startswith("x-")}


SERVICES: Final[dict[str, dict[str, Any]]] = compose()["services"]


def instructions(name: str = "") -> list[tuple[str, str]]:
    """The Dockerfile's instructions as (name, arguments): all of them, or those of one name."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [(line.split()[0], line.partition(" ")[2]) for line in lines]
    return [one for one in found if name in ("", one[0])]


def targets() -> dict[str, str]:
    """The Dockerfile's stages by name, with what each is built from."""
    stages = [arguments.split(" AS ") for _, arguments in instructions("FROM")]
    return {name: base for base, name in stages}


def unit(path: Path) -> RawConfigParser:
    """A systemd unit; a key given twice is an error here."""
    parser = RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign] # keys keep their case
    parser.read_string(path.read_text())
    return parser


def test_compose_has_only_known_keys() -> None:
    """Each key in the compose file is a known one, since a misspelt one would fail only at `up`."""
    assert compose().keys() <= COMPOSE_KEYS
    for service in SERVICES.values():
        assert service.keys() <= SERVICE_KEYS
        assert service.get("build", {}).keys() <= BUILD_KEYS
        assert service.get("healthcheck", {}).keys() <= HEALTHCHECK_KEYS
        assert service.get("deploy", {}).keys() <= DEPLOY_KEYS


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_service_can_run(service: dict[str, Any]) -> None:
    """Each service has image, health check and time to drain; what it builds or mounts exists."""
    assert not re.search(r"(^[^:]+|:latest)$", service["image"]), "an image needs a fixed tag"
    assert "build" in service or "healthcheck" in service, "our image brings its health check"
    assert int(service["stop_grace_period"].removesuffix("s")) >= DRAIN_SECONDS + 5
    assert service.get("depends_on", {}).keys() <= SERVICES.keys()
    mounted = {volume.partition(":")[0] for volume in service["volumes"]}
    assert {name for name in mounted if name.isalpha()} <= compose()["volumes"].keys()
    if build := service.get("build"):
        assert build["target"] in targets()
        assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
        assert service["depends_on"] == {"valkey": {"condition": "service_healthy"}}


def test_valkey_keeps_what_it_acknowledged() -> None:
    """Valkey writes its AOF every second to a volume, evicts nothing, and opens no port."""
    valkey = SERVICES["valkey"]
    command = " ".join(valkey["command"])
    for option in (
        "--appendonly yes",
        "--appendfsync everysec",
        "--maxmemory-policy noeviction",
    ):
        assert option in command
    assert "valkey:/data" in valkey["volumes"]
    assert "ports" not in valkey


def test_roles_are_placed() -> None:
    """A standby scheduler runs, the GPU worker asks for GPUs, and some services are optional."""
    assert SERVICES["scheduler"]["deploy"]["replicas"] == 2
    devices = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert all(device.keys() == DEVICE_KEYS for device in devices)
    assert [device["capabilities"] for device in devices] == [["gpu"]]
    optional = {name: s["profiles"] for name, s in SERVICES.items() if "profiles" in s}
    assert optional == {"serve": ["http"], "worker-gpu": ["gpu"], "embed": ["embed"]}
    assert SERVICES["embed"]["restart"] == "no"


def test_http_and_ingest_share_the_jobs() -> None:
    """Only `serve` and `ingest` have the directory of jobs, and no root of corpora holds it."""
    having = {
        name: service["environment"]
        for name, service in SERVICES.items()
        if "jobs:/jobs" in service["volumes"]
    }
    assert having.keys() == {"serve", "ingest"}
    for environment in having.values():
        assert environment["EMBEDFARM_JOBS_DIRECTORY"] == "/jobs"
        for root in json.loads(environment["EMBEDFARM_INGEST_ROOTS"]):
            assert not Path("/jobs").is_relative_to(root)
    ((made, mode),) = re.findall(r"--owner=embedfarm .*--mode=(\d+) (/jobs)", DOCKERFILE)
    assert (made, mode) == ("0700", "/jobs")


def test_only_http_is_open_and_only_on_loopback() -> None:
    """Only `serve` opens a port, on loopback, and it asks for keys."""
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert ports == {"serve": ["127.0.0.1:8080:8080"]}
    assert "EMBEDFARM_KEYS_FILE" in SERVICES["serve"]["environment"]


def test_dockerfile_has_both_targets_on_fixed_tags() -> None:
    """`cpu` and `gpu` exist, `cpu` is the default, and every base is a stage or a fixed tag."""
    names = list(targets())
    assert {"cpu", "gpu"} <= set(names)
    assert names[-1] == "cpu"
    for base in targets().values():
        assert base in names or re.fullmatch(r"[a-z/]+:\d[\w.-]+", base)


def test_image_runs_unprivileged_and_reports_health() -> None:
    """The last user is not root, and the image asks `embedfarm doctor` how it is."""
    assert [arguments for _, arguments in instructions("USER")] == ["embedfarm"]
    ((_, check),) = instructions("HEALTHCHECK")
    assert check.endswith('CMD ["embedfarm", "doctor", "--json"]')


def test_image_holds_every_package_at_pinned_versions() -> None:
    """All packages of the distribution are copied, and nothing is installed unconstrained."""
    copied = {word for _, arguments in instructions("COPY") for word in arguments.split()[:-1]}
    rooms = {each.name for each in (ROOT / "embedfarm").iterdir() if each.is_symlink()}
    assert {"embedfarm", *rooms} <= copied
    sources = {name for name in copied if not name.startswith(("--", "/"))}
    assert [name for name in sorted(sources) if not (ROOT / name).exists()] == []
    installs = [a for _, a in instructions("RUN") if "pip install" in a]
    assert len(installs) == 2
    assert all("pip install -c constraints.txt " in install for install in installs)


@pytest.mark.system
def test_units_pass_systemd(tmp_path: Path) -> None:
    """`systemd-analyze verify` has no complaint about any unit."""
    analyze = shutil.which("systemd-analyze")
    assert analyze, "systemd-analyze is missing: install the package systemd"
    for path in UNITS:
        # The program is not installed here; any other one passes for it.
        (tmp_path / path.name).write_text(path.read_text().replace(PROGRAM, "/bin/true"))
    copies = [str(tmp_path / path.name) for path in UNITS]
    verdict = subprocess.run(
        [analyze, "verify", "--man=no", "--recursive-errors=no", *copies],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert (verdict.returncode, verdict.stderr) == (0, "")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_restarts_drains_and_is_confined(path: Path) -> None:
    """A unit comes back after any end but a bad configuration, and has time to start and drain.

    A unit is up when it says so, and systemd ends one whose loop hangs.
    """
    service = unit(path)["Service"]
    assert service["Type"] == "notify"
    assert int(service["TimeoutStartSec"]) > Settings().reconnect_seconds_max
    # A loop waits for a silent server for some seconds at a time.
    assert int(service["WatchdogSec"]) >= 4 * SOCKET_SECONDS
    assert service["ExecStart"].startswith(f"{PROGRAM} ")
    assert service["Restart"] == "always"
    assert service["RestartPreventExitStatus"] == "2"
    # systemd gives up after five starts in ten seconds.
    assert int(service["RestartSec"]) > 2
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) >= DRAIN_SECONDS + 5
    assert service["User"] == "embedfarm"
    assert (service["NoNewPrivileges"], service["ProtectSystem"]) == ("yes", "strict")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_example_environment_has_what_units_use(path: Path) -> None:
    """Every variable in a unit's command line is in the example of the environment file."""
    example = (DEPLOY / "systemd" / "embedfarm.env.example").read_text()
    given = set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    service = unit(path)["Service"]
    assert set(re.findall(r"\$\{(\w+)\}", service["ExecStart"])) <= given
    assert service["EnvironmentFile"] == "/etc/embedfarm/embedfarm.env"


def test_worker_unit_is_one_device() -> None:
    """The template's instance names the device, and no hardening hides a GPU from the worker."""
    service = unit(DEPLOY / "systemd" / "embedfarm-worker@.service")["Service"]
    assert service["ExecStart"].endswith("work --devices %i")
    hiding = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"}
    assert not hiding & service.keys()


@pytest.mark.system
@pytest.mark.parametrize("words", [("check", "alerts.yaml"), ("test", "alerts.test.yaml")])
def test_alerts_fire_when_they_should(words: tuple[str, str]) -> None:
    """Prometheus' own tool takes the alerts, and finds that each fires when it should."""
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool comes with Prometheus"
    command = [promtool, words[0], "rules", str(DEPLOY / words[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
