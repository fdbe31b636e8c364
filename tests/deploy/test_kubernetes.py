"""Tests of `deploy/kubernetes`: it renders, is valid, and is confined as it promises.

No cluster is here: what the API server would refuse is found by its own schemas, and by policies of
ours; the users, the server's options and the probes' files are tried on real processes.
"""

import copy
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import redis
import yaml
from typer.main import get_command

from embedfarm.cli.app import Verbs, app
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.processes import KILL_SECONDS
from embedfarm.contract.settings import PREFIX, Settings
from embedfarm.contract.systemd_notify import ALIVE_FILE, TOUCH_SECONDS
from embedfarm.web.auth.keys import read_keys
from tests.deploy.kustomize import (
    CLUSTERED,
    WORKLOADS,
    Document,
    Unsupported,
    by_name,
    load,
    render,
)
from tests.deploy.manifests import (
    OVERLAYS,
    Overlays,
    containers,
    every,
    given_to_serve,
    pods,
    variables,
)
from tests.support import LiveServer
from tests.web.conftest import client_of
from tests.workers.support import block_of, create_job

VERSIONS: Final = ("1.30", "1.37")  # the oldest with `preStop: sleep`, and the newest there is
SCALED_OBJECTS: Final = Path(__file__).parent / "keda-2.20.2-scaledobjects.yaml"
# pkg/scalers/prometheus_scaler.go of KEDA 2.20.2: the schema takes any names here.
PROMETHEUS: Final = {
    "serverAddress", "query", "queryParameters", "threshold", "activationThreshold", "namespace",
    "customHeaders", "ignoreNullValues", "unsafeSsl", "awsRegion", "timeout", "identityOwner",
}  # fmt: skip
OTHER_VARIABLES: Final = {"HOME", "HF_HOME", "VALKEYCLI_AUTH", "REDISCLI_AUTH", ALIVE_FILE}
USERS: Final = {"scheduler": "scheduler", "serve": "web", "ingest": "ingest", "worker": "worker"}


@pytest.fixture(scope="module")
def schemas() -> Iterator[None]:
    """Keep schemas in memory, since each is some megabytes and read for each document."""
    with pytest.MonkeyPatch.context() as patch:
        kept = functools.cache(kubernetes_validate.utils.schema_contents)
        patch.setattr(kubernetes_validate.utils, "schema_contents", kept)
        yield


@functools.cache
def scaled_object() -> jsonschema.Draft202012Validator:
    """Return what tells whether a ScaledObject is one: KEDA's schema, without unknown fields."""
    ((version,),) = [each["spec"]["versions"] for each in load(SCALED_OBJECTS)]

    def close(node: Any) -> Any:  # noqa: ANN401 -- whatever a schema has
        if isinstance(node, dict):
            node = {key: close(value) for key, value in node.items()}
            if "properties" in node and "x-kubernetes-preserve-unknown-fields" not in node:
                node.setdefault("additionalProperties", False)
        return node

    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"]["x-kubernetes-preserve-unknown-fields"] = True
    return jsonschema.Draft202012Validator(close(schema))


def check(document: Document) -> None:
    """Hold a document against the schemas of its kind.

    Raises:
        jsonschema.ValidationError: A field is unknown, missing, or of another type.
    """
    if document["kind"] == "ScaledObject":
        scaled_object().validate(document)
        for trigger in document["spec"]["triggers"]:
            assert trigger["type"] == "prometheus"
            assert trigger["metadata"].keys() <= PROMETHEUS
    else:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


def test_all_documents_are_valid(overlays: Overlays, schemas: None) -> None:
    """Kubernetes' strict schemas take every document, and KEDA's every ScaledObject."""
    del schemas
    distinct = {json.dumps(each, sort_keys=True): each for _, each in every(overlays)}
    for each in distinct.values():
        check(each)
    kinds = {each["kind"] for each in distinct.values()}
    assert kinds >= {*WORKLOADS, "ScaledObject", "NetworkPolicy", "PodDisruptionBudget", "Secret"}


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec.template.spec.containers.0.readinesProbe", {}),
        ("Deployment", "spec.template.spec.terminationGracePeriodSeconds", "45"),
        ("NetworkPolicy", "spec.podSelectors", {}),
        ("PodDisruptionBudget", "spec.minimumAvailable", 1),
        ("ScaledObject", "spec.minReplicas", 1),
        ("ScaledObject", "spec.advanced.horizontalPodAutoscalerConfig.behaviour", {}),
        ("ScaledObject", "spec.triggers.0.metadata.threshold", 1),
    ],
)
def test_defects_are_found(
    overlays: Overlays, schemas: None, kind: str, path: str, value: object
) -> None:
    """Schemas refuse a field that is misspelt, and a value of another type."""
    del schemas
    document = copy.deepcopy(next(each for _, each in every(overlays, kind)))
    *steps, last = path.split(".")
    place: Any = document
    for step in steps:
        place = place[int(step)] if step.isdecimal() else place[step]
    place[last] = value
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        check(document)


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_render_is_that_of_kustomize(home: Path, overlays: Overlays, overlay: str) -> None:
    """Kustomize itself, which kubectl carries, prints the same documents."""
    kubectl = shutil.which("kubectl")
    assert kubectl, "kubectl is missing: its release 1.32 carries kustomize 5.5"
    command = [kubectl, "kustomize", str(home / "overlays" / overlay)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert by_name(overlays[overlay]) == by_name(list(yaml.safe_load_all(printed)))


def test_what_the_render_does_not_know_it_refuses(tmp_path: Path) -> None:
    """A feature of kustomize that the render lacks is an error, and so is a key given twice."""
    kustomization = tmp_path / "kustomization.yaml"
    kustomization.write_text("{apiVersion: v1, kind: Kustomization, namePrefix: x}")
    with pytest.raises(Unsupported, match="namePrefix"):
        render(tmp_path)
    kustomization.write_text("{apiVersion: v1, kind: Kustomization, resources: [a.yaml]}")
    (tmp_path / "a.yaml").write_text("{kind: Secret, kind: Secret}")
    with pytest.raises(yaml.constructor.ConstructorError, match="twice"):
        render(tmp_path)


def test_containers_are_confined(overlays: Overlays) -> None:
    """Containers are not root, write to no image, have no capability, and say what they take."""
    for name, pod, container in containers(overlays):
        whole = pod["securityContext"]
        assert whole["runAsNonRoot"], name
        assert whole["runAsUser"] > 0, name
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not pod["automountServiceAccountToken"], name
        assert not pod["enableServiceLinks"], name
        assert pod.keys().isdisjoint({"hostNetwork", "hostPID", "hostIPC"}), name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        asked, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert asked.keys() == {"cpu", "memory", "ephemeral-storage"}, name
        assert {"memory", "ephemeral-storage"} <= limits.keys(), name
        tag = container["image"].rpartition(":")[2]
        assert any(letter.isdecimal() for letter in tag), "an image needs a fixed tag"


def test_every_container_is_probed(overlays: Overlays) -> None:
    """Each container has probes, which find out in time, and only what answers is asked by HTTP."""
    for name, pod, container in containers(overlays):
        startup, liveness = container["startupProbe"], container["livenessProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 180, name
        for probe in (startup, liveness, container.get("readinessProbe", liveness)):
            assert probe is not None, name
            (how,) = probe.keys() & {"exec", "httpGet", "tcpSocket"}
            ports = {port["name"] for port in container.get("ports", ())}
            assert how == "exec" or probe[how]["port"] in ports, name
            assert how != "httpGet" or probe[how]["path"] == "/livez", name
        assert ("readinessProbe" in container) == ("ports" in container), name
        mounts = {each["mountPath"] for each in container["volumeMounts"]}
        if "alive" in str(liveness):
            assert {"/tmp"} <= mounts, name  # noqa: S108 -- the pod's own
            assert pod["shareProcessNamespace"], name


def test_the_probe_goes_by_the_age_of_the_file(overlays: Overlays, tmp_path: Path) -> None:
    """The command of the probes fails without a file and with an old one."""
    commands = {
        tuple(container[kind]["exec"]["command"])
        for _, _, container in containers(overlays)
        for kind in ("startupProbe", "livenessProbe")
        if "alive" in str(container[kind])
    }
    ((*shell, script),) = commands
    (file,) = {
        variables(overlays[name.partition("/")[0]], each)[ALIVE_FILE]
        for name, _, each in containers(overlays)
        if each["name"] != "valkey"
    }
    alive = tmp_path / "alive"
    probe = [*shell, script.replace(file, str(alive))]
    assert str(alive) in probe[-1]

    def status() -> int:
        return subprocess.run(probe, check=False, stderr=subprocess.DEVNULL).returncode

    assert status() == 1
    alive.touch()
    assert status() == 0
    there = alive.stat().st_mtime
    os.utime(alive, (there, there - 61))
    assert status() == 1
    assert TOUCH_SECONDS < 60


def test_variables_are_settings(overlays: Overlays) -> None:
    """Every variable is one that the farm reads, and its value is one that it takes."""
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | OTHER_VARIABLES
    for name, _, container in containers(overlays):
        given = variables(overlays[name.partition("/")[0]], container)
        assert given.keys() <= known, name
        with pytest.MonkeyPatch.context() as patch:
            for key, value in given.items():
                patch.setenv(key, value)
            assert Settings().redis_url == given.get("EMBEDFARM_REDIS_URL", ""), name


def test_commands_are_those_of_the_program(overlays: Overlays) -> None:
    """Every role is a verb, and its words are options that the verb takes."""
    group = get_command(app)
    assert isinstance(group, Verbs)
    seen = set()
    for _, _, container in containers(overlays):
        if not container["image"].startswith("valkey/"):
            verb, *words = container["args"]
            command = group.get_command(None, verb)
            assert command is not None, verb
            command.make_context(verb, list(words))
            seen.add(verb)
    assert seen == {"schedule", "serve", "ingest", "work"}


def test_there_is_time_to_drain(overlays: Overlays) -> None:
    """A pod has time for what comes before its drain, the drain, and a kill of what is left."""
    for name, pod, container in containers(overlays):
        given = variables(overlays[name.partition("/")[0]], container)
        drain = float(given.get("EMBEDFARM_DRAIN_SECONDS", 0))
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        needed = drain + before.get("seconds", 0) + KILL_SECONDS
        assert pod["terminationGracePeriodSeconds"] > needed, name
        if container["name"] == "worker":
            assert drain > Settings().micro_batch_seconds_max, name


def test_volumes_are_declared(overlays: Overlays) -> None:
    """Every mounted volume is one of the pod's, and none is without a secret or a claim."""
    for name, pod, container in containers(overlays):
        names = by_name(overlays[name.partition("/")[0]])
        volumes = {each["name"]: each for each in pod["volumes"]}
        claims = names["StatefulSet", "valkey"]["spec"]["volumeClaimTemplates"]
        own = {each["metadata"]["name"] for each in claims if container["name"] == "valkey"}
        mounts = {each["name"] for each in container["volumeMounts"]}
        assert mounts == volumes.keys() | own, name
        secrets = [each["secret"]["secretName"] for each in volumes.values() if "secret" in each]
        assert {("Secret", each) for each in secrets} <= names.keys(), name
        kind = "persistentVolumeClaim"
        wanted = [each[kind]["claimName"] for each in volumes.values() if kind in each]
        assert {("PersistentVolumeClaim", each) for each in wanted} <= names.keys(), name


def test_selectors_select(overlays: Overlays) -> None:
    """Each selector has pods; those of workloads and budgets have their own and no others."""
    for name, found in overlays.items():
        labels = {key: meta["labels"] for key, meta, _ in pods({name: found})}
        for each in found:
            assert each["kind"] in CLUSTERED or each["metadata"]["namespace"] == "embedfarm"
            spec = each.get("spec", {})
            selector = spec.get("selector", spec.get("podSelector"))
            if selector is not None and each["kind"] != "PersistentVolumeClaim":
                wanted = selector if each["kind"] == "Service" else selector.get("matchLabels", {})
                chosen = [key for key, own in labels.items() if wanted.items() <= own.items()]
                if each["kind"] == "NetworkPolicy":
                    assert chosen, each["metadata"]
                elif each["kind"] == "Service":
                    assert len(chosen) == 1, each["metadata"]
                else:
                    assert chosen == [f"{name}/{each['metadata']['name']}"]


def test_scaling_has_its_target(overlays: Overlays) -> None:
    """KEDA scales what nobody else scales, by workers, and a pod has one for each GPU."""
    scaled = every(overlays, "ScaledObject")
    assert {each["metadata"]["name"] for _, each in scaled} == {"worker-l4", "worker-h100"}
    for overlay, each in scaled:
        target = by_name(overlays[overlay])["Deployment", each["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"]
        (container,) = target["spec"]["template"]["spec"]["containers"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        trigger = each["spec"]["triggers"][0]["metadata"]
        assert trigger["threshold"] == gpus
        # The farm advises as many workers of the kind as KEDA may start, and by the same name.
        kind = variables(overlays[overlay], container)["EMBEDFARM_DEVICE_KIND"]
        assert f'{{kind="{kind}"}}' in trigger["query"]
        most = json.loads(given_to_serve(overlays)["EMBEDFARM_ADVICE_WORKERS_MAX"])
        assert most[kind] == each["spec"]["maxReplicaCount"] * int(gpus)
        # An empty answer would otherwise count as 0 and end all workers.
        known = [one["metadata"]["ignoreNullValues"] for one in each["spec"]["triggers"]]
        assert set(known) == {"false"}


def test_a_farm_of_none_asks_for_its_first_worker(
    overlays: Overlays, server: LiveServer, client: redis.Redis
) -> None:
    """While no kind was ever seen, work still makes the farm advise one that KEDA starts."""
    create_job(FarmClient(client), [block_of(0, 5)], "first", model="null:4")
    most = json.loads(given_to_serve(overlays)["EMBEDFARM_ADVICE_WORKERS_MAX"])
    with client_of(server, advice_workers_max=most) as web:
        found = re.findall(
            r"^embedfarm_workers_advised{(.*)} (.*)$", web.get("/metrics").text, re.MULTILINE
        )
    advised = {re.findall(r'kind="([^"]*)"', labels)[0]: float(value) for labels, value in found}
    assert sum(advised.get(kind, 0) for kind in most) == 1, found


def test_each_role_has_its_own_user(overlays: Overlays) -> None:
    """A container has the password of its role alone, and the server is where its URL says."""
    for name, _, container in containers(overlays):
        found = overlays[name.partition("/")[0]]
        if (role := container["name"]) != "valkey":
            secrets = [each for each in container["envFrom"] if "secretRef" in each]
            assert len(secrets) == 1, name
            url = urlsplit(variables(found, container)["EMBEDFARM_REDIS_URL"])
            assert url.username == USERS[role], name
            service = by_name(found)["Service", str(url.hostname)]
            assert url.port in [port["port"] for port in service["spec"]["ports"]], name


def test_the_server_takes_its_options_and_users(overlays: Overlays, home: Path, port: int) -> None:
    """A real server takes the options of the StatefulSet, and lets in each role by its URL."""
    found = overlays["cpu"]
    for name, _, each in containers({"cpu": found}):
        if each["name"] != "valkey":
            url = urlsplit(variables(found, each)["EMBEDFARM_REDIS_URL"])
            with redis.Redis(port=port, username=url.username, password=url.password) as client:
                assert client.ping(), name
    assert read_keys(home / "base" / "secrets" / "keys")


@pytest.mark.system
def test_the_server_is_probed(valkey: tuple[Document, dict[str, str]], port: int) -> None:
    """The probe of the server has the user and the password that the server asks for."""
    container, given = valkey
    assert container["startupProbe"]["exec"] == container["readinessProbe"]["exec"]
    program, *words = container["startupProbe"]["exec"]["command"]
    client = shutil.which(program) or shutil.which("redis-cli")
    assert client, "redis-cli is missing: install the package redis-tools"
    command = [client, "-p", str(port), *words]
    assert subprocess.run(command, check=True, capture_output=True, env=given).stdout == b"PONG\n"
    assert subprocess.run(command, check=False, capture_output=True, env={}).returncode != 0


def test_schemas_are_those_of_the_package() -> None:
    """The package of schemas has the versions that are promised."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    there = {each.name for each in folder.iterdir()}
    assert {f"v{version}.0-local-strict" for version in VERSIONS} <= there
