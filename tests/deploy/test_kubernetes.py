"""The manifests: valid by Kubernetes' own schemas, and right in what schemas do not say."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from kvstore.config import Settings, load
from kvstore.tiers.memory_budget import OVERHEAD_BYTES
from tests.deploy.manifests import (
    FOLDER,
    MLOCK,
    NODE,
    SIDECAR,
    Manifest,
    bytes_of,
    containers,
    daemon_of,
    documents,
    mount_of,
    of_kind,
    pods,
    with_mlock,
)

VERSIONS = ("1.29", "1.33", "1.37")
"""The first with native sidecars, one between, the newest that the schemas are bundled of."""
STATED_BYTES = 512 << 20
"""Of memory beside the arena, as the manifests and sizing.md say."""

SETS = {
    "sidecar": documents(SIDECAR),
    "node": documents(NODE),
    "node with mlock": with_mlock(),
}
each = pytest.mark.parametrize("found", SETS.values(), ids=SETS)


def settings_of(found: list[Manifest], tmp_path: Path) -> Settings:
    """What the daemon makes of the ConfigMap and the container's environment."""
    (daemon,) = (daemon_of(pod) for pod in daemon_pods(found))
    file = tmp_path / "kvstored.toml"
    file.write_text(of_kind(found, "ConfigMap")["data"]["kvstored.toml"])
    environ = {one["name"]: one["value"] for one in daemon.get("env", [])}
    return load(str(file), {**image_environ(), **environ}, {}, uid=10001)


def image_environ() -> dict[str, str]:
    text = (FOLDER.parent / "docker/Dockerfile").read_text()
    return dict(re.findall(r"(KVSTORE_\w+)=(\S+)", text))


def daemon_pods(found: list[Manifest]) -> list[Manifest]:
    return [pod for pod in pods(found) if any(c["name"] == "kvstored" for c in containers(pod))]


# ---------------------------------------------------------------- by the schemas


@each
@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_valid(found: list[Manifest], version: str) -> None:
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_would_notice() -> None:
    wrong = documents(SIDECAR)[1]
    wrong["spec"]["template"]["spec"]["initContainers"][0]["restartPolicys"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_the_kustomizations_name_what_is_there() -> None:
    files = sorted(FOLDER.rglob("kustomization.yaml"))
    assert len(files) == 2
    for file in files:
        for name in yaml.safe_load(file.read_text())["resources"]:
            there = file.parent / name
            # kustomize takes files from below its own folder only, folders from anywhere.
            assert there.is_dir() == name.startswith("../")
            assert there.is_file() or (there / "kustomization.yaml").is_file()
    assert MLOCK in files


# ---------------------------------------------------------------- isolation


@each
def test_no_namespace_of_the_host_is_shared(found: list[Manifest]) -> None:
    for pod in pods(found):
        assert not {"hostIPC", "hostPID", "hostNetwork", "shareProcessNamespace"} & set(pod)
        assert pod["automountServiceAccountToken"] is False


@each
def test_the_daemon_may_do_nothing_but_serve(found: list[Manifest]) -> None:
    (pod,) = daemon_pods(found)
    context = daemon_of(pod)["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["capabilities"]["drop"] == ["ALL"]
    if found is SETS["node with mlock"]:
        # An added capability is effective for user 0 only.
        assert context["capabilities"]["add"] == ["IPC_LOCK"]
        assert (context["runAsUser"], context["runAsNonRoot"]) == (0, False)
    else:
        assert "add" not in context["capabilities"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == context["runAsGroup"] == 10001


@each
def test_the_daemon_and_engines_share_the_sockets_folder_alone(found: list[Manifest]) -> None:
    sockets = "kvstore-sockets"
    for pod in pods(found):
        (volume,) = (one for one in pod["volumes"] if one["name"] == sockets)
        for container in containers(pod):
            read_only = mount_of(container, sockets).get("readOnly", False)
            assert read_only == (container["name"] == "vllm")
        mounted = [{m["name"] for m in c["volumeMounts"]} for c in containers(pod)]
        assert set.intersection(*mounted) == {sockets}
        assert "emptyDir" in volume or volume["hostPath"]["path"].startswith("/run/kvstore")


def test_the_sidecars_engine_finds_the_sockets_and_may_use_them(tmp_path: Path) -> None:
    found = SETS["sidecar"]
    settings = settings_of(found, tmp_path)
    (pod,) = pods(found)
    engine = next(one for one in pod["containers"] if one["name"] == "vllm")
    for container in (daemon_of(pod), engine):
        assert mount_of(container, "kvstore-sockets")["mountPath"] == settings.server.runtime_dir
    assert settings.server.trust_folder_writers, "the kubelet makes an emptyDir with mode 0777"
    assert settings.tenants["default"].mode_bits & 0o060 == 0o060
    assert pod["securityContext"]["fsGroup"] == daemon_of(pod)["securityContext"]["runAsGroup"]


def test_the_nodes_engine_finds_its_tenants_socket_and_may_use_it(tmp_path: Path) -> None:
    found = SETS["node"]
    settings = settings_of(found, tmp_path)
    engines = [pod for pod in pods(found) if pod not in daemon_pods(found)]
    assert engines
    folders = {Path(settings.data_socket(name)).parent: name for name in settings.tenants}
    (daemon_pod,) = daemon_pods(found)
    assert daemon_pod["volumes"][0]["hostPath"]["path"] == settings.server.runtime_dir
    for pod in engines:
        (volume,) = pod["volumes"]
        tenant = folders[Path(volume["hostPath"]["path"])]
        assert settings.tenants[tenant].mode_bits & 0o060 == 0o060
        group = daemon_of(daemon_pod)["securityContext"]["runAsGroup"]
        assert pod["securityContext"]["supplementalGroups"] == [group]


# ---------------------------------------------------------------- times and sizes


@each
def test_memory_is_the_arena_and_the_stated_overhead(found: list[Manifest], tmp_path: Path) -> None:
    (pod,) = daemon_pods(found)
    resources = daemon_of(pod)["resources"]
    settings = settings_of(found, tmp_path)
    assert bytes_of(resources["limits"]["memory"]) == settings.host.capacity_bytes + STATED_BYTES
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    assert "cpu" not in resources["limits"]
    assert STATED_BYTES >= 2 * OVERHEAD_BYTES


@each
def test_the_drain_ends_before_the_pod_is_killed(found: list[Manifest], tmp_path: Path) -> None:
    (pod,) = daemon_pods(found)
    assert (
        settings_of(found, tmp_path).server.drain_grace_s + 15
        <= (pod["terminationGracePeriodSeconds"])
    )


@each
def test_probes_ask_where_the_daemon_listens(found: list[Manifest], tmp_path: Path) -> None:
    (pod,) = daemon_pods(found)
    daemon = daemon_of(pod)
    ports = {one["name"]: one["containerPort"] for one in daemon["ports"]}
    assert settings_of(found, tmp_path).http.address == ("0.0.0.0", ports["kv-metrics"])
    assert daemon["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "kv-metrics"}
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if name in daemon:
            assert ports[daemon[name]["httpGet"]["port"]] == 9472
    owner = next(one for one in found if one["kind"] in ("Deployment", "DaemonSet"))
    notes = owner["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(ports["kv-metrics"])


def test_an_engine_waits_for_no_store() -> None:
    """A sidecar's startup probe would hold the engine's start up, its readiness the pod's."""
    (pod,) = pods(SETS["sidecar"])
    daemon = daemon_of(pod)
    assert daemon in pod["initContainers"]
    assert daemon["restartPolicy"] == "Always"
    assert not {"startupProbe", "readinessProbe"} & set(daemon)


@each
def test_the_network_policy_covers_the_daemon(found: list[Manifest]) -> None:
    owner = next(one for one in found if one["kind"] in ("Deployment", "DaemonSet"))
    policy = of_kind(found, "NetworkPolicy")["spec"]
    wanted = policy["podSelector"]["matchLabels"].items()
    assert wanted <= owner["spec"]["template"]["metadata"]["labels"].items()
    ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert "kv-metrics" in ports
    metrics = next(r for r in policy["ingress"] if r["ports"][0]["port"] == "kv-metrics")
    assert metrics["from"], "metrics are not for everybody"
