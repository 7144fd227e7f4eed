"""The compose file: valid by the specification's schema, and of one piece with what it mounts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.config import load
from kvstore.config.load import parse_size
from tests.deploy.dockerfile import listed, steps

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "deploy/compose"
FILE = FOLDER / "compose.yaml"
OVERHEAD_BYTES = 512 << 20

compose: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
services: dict[str, Any] = compose["services"]
kvstored = services["kvstored"]


def settings() -> Any:
    return load(str(FOLDER / "kvstored.toml"), {}, {})


def mounts(service: str) -> list[tuple[str, str, bool]]:
    """(source, target, read-only)."""
    return [
        (source, target, mode == ["ro"])
        for source, target, *mode in (one.split(":") for one in services[service]["volumes"])
    ]


def check_schema(file: Path) -> subprocess.CompletedProcess[str]:
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


def test_it_is_valid_by_the_specification(tmp_path: Path) -> None:
    found = check_schema(FILE)
    assert found.returncode == 0, found.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(FILE.read_text().replace("read_only: true", "read_only: [true]"))
    assert check_schema(wrong).returncode == 1


@pytest.mark.parametrize("service", services)
def test_everything_mounted_is_there(service: str) -> None:
    for source, target, read_only in mounts(service):
        assert target.startswith("/")
        if source.startswith("."):
            assert (FOLDER / source).exists(), source
            assert read_only, f"{source} is ours"
        else:
            assert source in compose["volumes"]


@pytest.mark.parametrize("service", services)
def test_images_are_pinned_and_ports_are_this_machines(service: str) -> None:
    if service != "engine":
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", services[service]["image"])
        assert services[service]["cap_drop"] == ["ALL"]
        assert services[service]["security_opt"] == ["no-new-privileges:true"]
    for port in services[service].get("ports", []):
        assert port.startswith("127.0.0.1:")
    assert not {"privileged", "pid", "network_mode"} & set(services[service])
    assert services[service].get("ipc", "private") == "private"


def test_the_daemon_is_the_image_of_our_dockerfile() -> None:
    build = kvstored["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    made = steps(ROOT / build["dockerfile"])
    assert kvstored["read_only"] is True
    assert [value for name, value in made if name == "USER"][-1] == kvstored["user"]
    volumes = next(value for name, value in made if name == "VOLUME").split()
    targets = {target for _, target, _ in mounts("kvstored")}
    assert set(volumes) <= targets
    assert "HEALTHCHECK" in {name for name, _ in made}
    assert listed(next(value for name, value in made if name == "CMD")) == kvstored["command"][:1]


def test_its_settings_fit_its_limits() -> None:
    ours = settings()
    limit = parse_size(kvstored["mem_limit"].replace("m", "MiB"))
    assert limit == ours.host.capacity_bytes + OVERHEAD_BYTES
    assert kvstored["memswap_limit"] == kvstored["mem_limit"], "blocks are not for swapping"
    assert ours.server.drain_grace_s + 15 <= float(kvstored["stop_grace_period"].rstrip("s"))
    assert ours.http.address == ("0.0.0.0", int(kvstored["expose"][0]))
    targets = {target for _, target, _ in mounts("kvstored")}
    assert ours.server.runtime_dir in targets
    assert str(Path(ours.disk.path).parent) in targets
    assert kvstored["command"][-1] in targets


def test_prometheus_scrapes_the_daemon_by_our_configuration() -> None:
    (targets,) = yaml.safe_load((FOLDER / "targets.yml").read_text())
    assert targets["targets"] == [f"kvstored:{kvstored['expose'][0]}"]
    places = {target: FOLDER / source for source, target, _ in mounts("prometheus")}
    config_file = services["prometheus"]["command"][0].partition("=")[2]
    config = yaml.safe_load((places["/etc/prometheus"] / Path(config_file).name).read_text())
    for rules in config["rule_files"]:
        assert (places["/etc/prometheus"] / rules).is_file()
    # Ours is mounted over the one that names this machine's own daemon.
    replaced = Path("/etc/prometheus/targets/kvstored.yml")
    assert places[str(replaced)] == FOLDER / "targets.yml"
    assert (places["/etc/prometheus"] / "targets" / replaced.name).is_file()
    assert set(services["prometheus"]["networks"]) <= set(kvstored["networks"])


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = FOLDER / next(s for s, t, _ in mounts("grafana") if t.endswith("provisioning"))
    source = yaml.safe_load(next(provisioning.glob("datasources/*.yml")).read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    provider = yaml.safe_load(next(provisioning.glob("dashboards/*.yml")).read_text())
    folder = provider["providers"][0]["options"]["path"]
    boards = [t for s, t, _ in mounts("grafana") if s.endswith(".json")]
    assert boards
    assert all(str(Path(board).parent) == folder for board in boards)


def test_an_engine_may_use_the_sockets_and_waits_for_no_store() -> None:
    engine = services["engine"]
    assert engine["group_add"] == [kvstored["user"].split(":")[1]]
    assert settings().tenants["default"].mode_bits & 0o060 == 0o060
    assert ("kvstore-sockets", settings().server.runtime_dir, True) in mounts("engine")
    assert "depends_on" not in engine
