"""What the manifests say about users, groups and folders, tried with the real daemon.

A container is a process in namespaces of its own, with the user of the manifest and the folder as a
kubelet makes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import _python_path
from tests.deploy.manifests import (
    NODE,
    SIDECAR,
    Manifest,
    daemon_of,
    documents,
    of_kind,
    pods,
    with_mlock,
)
from tests.e2e.stage import Child, until
from tests.e2e.test_must_hold_containers import end_container, why_no_namespaces

pytestmark = [pytest.mark.process, pytest.mark.root]

UNSHARE = ("unshare", "--mount", "--pid", "--ipc", "--fork")
ENGINE, STRANGER = 64_001, 64_002
SMALL = {"host.capacity_bytes": "32MiB", "http.listen": ""}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A volume, not below pytest's own folders, which others may not pass."""
    if why := why_no_namespaces():
        pytest.skip(why)
    made = Path(tempfile.mkdtemp(prefix="kvstore-pods-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def contained(shared: Path, uid: int, gid: int, *more: object) -> tuple[str, ...]:
    """What to put before a command, so that it runs in a container as this user."""
    python = (sys.executable, "-m", "tests.deploy.as_container")
    who = ("--uid", str(uid), "--gid", str(gid), "--shared", str(shared))
    return (*UNSHARE, *python, *who, *map(str, more), "--")


def environ() -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
    return {**ours, "PYTHONPATH": _python_path(ours)}


def serve(folder: Path, config: str, prefix: tuple[str, ...], **settings: Any) -> list[str]:
    """The daemon's command line with a ConfigMap's settings, small, and on our folder."""
    file = folder / "kvstored.toml"
    file.write_text(config)
    file.chmod(0o644)
    given = {"server.runtime_dir": str(folder / "sockets"), **SMALL, **settings}
    flags = [f"--{name}={value}" for name, value in given.items()]
    ready = f"--ready-file={folder}/sockets/ready"
    return [
        *prefix,
        sys.executable,
        "-m",
        "kvstore_server",
        "serve",
        "--config",
        str(file),
        ready,
        *flags,
    ]


@contextmanager
def running(folder: Path, command: list[str]) -> Iterator[None]:
    """Until its ready file is there."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ()
        )

    def ready() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {log.read_text()}")
        return (folder / "sockets/ready").exists()

    try:
        until("the daemon is ready", ready, 30)
        yield
    finally:
        if process.poll() is None:
            end_container(process.pid)
        process.wait(20)


def refused(command: list[str]) -> str:
    """What a daemon says that does not start."""
    done = subprocess.run(
        command, env=environ(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def fresh_volume(folder: Path, mode: int, gid: int) -> Path:
    volume = folder / "sockets"
    volume.mkdir()
    os.chown(volume, 0, gid)
    volume.chmod(mode)
    return volume


# ---------------------------------------------------------------- the sidecar


def sidecar() -> tuple[str, int, int, int]:
    """(settings, the daemon's user, its group, the pod's fsGroup)."""
    found = documents(SIDECAR)
    (pod,) = pods(found)
    context = daemon_of(pod)["securityContext"]
    config = of_kind(found, "ConfigMap")["data"]["kvstored.toml"]
    fs_group = pod["securityContext"]["fsGroup"]
    return config, context["runAsUser"], context["runAsGroup"], fs_group


def test_an_engine_of_another_user_comes_in_by_the_pods_group_and_nobody_else(
    folder: Path,
) -> None:
    config, uid, gid, fs_group = sidecar()
    volume = fresh_volume(folder, 0o2777, fs_group)  # an emptyDir with an fsGroup
    in_group = ("--groups", fs_group)
    daemon = contained(folder, uid, gid, *in_group)
    with running(folder, serve(folder, config, daemon)):
        socket = volume / "data.sock"
        assert (socket.stat().st_uid, socket.stat().st_gid) == (uid, fs_group)
        engine = contained(volume, ENGINE, ENGINE, "--groups", fs_group, "--read-only")
        for verb in ("put", "get"):
            with Child("sdk_roundtrip", socket, verb, 5, prefix=engine) as child:
                said = child.hear(60)
                assert said["kind"] == "shm"
                assert said.get("stored", said.get("right")) == 16
        # The engine cannot put a socket of its own in the place of the daemon's.
        moved = subprocess.run(
            [*engine, "mv", socket, f"{socket}.x"], capture_output=True, text=True, check=False
        )
        assert "Read-only file system" in moved.stderr
        stranger = contained(volume, STRANGER, STRANGER)
        with Child("sdk_roundtrip", socket, "put", 5, prefix=stranger) as child:
            said = child.hear(60)
            assert (said["stored"], said["reason"]) == (0, "UNAVAILABLE")


def test_without_the_setting_the_daemon_refuses_such_a_folder(folder: Path) -> None:
    config, uid, gid, fs_group = sidecar()
    fresh_volume(folder, 0o2777, fs_group)
    daemon = contained(folder, uid, gid, "--groups", fs_group)
    told = refused(serve(folder, config, daemon, **{"server.trust_folder_writers": "false"}))
    assert "server.trust_folder_writers" in told


def test_blocks_cannot_lie_in_such_a_folder_even_with_the_setting(folder: Path) -> None:
    """As troubleshooting.md says: an emptyDir is no place for the disk tier or the ledger."""
    config, uid, gid, fs_group = sidecar()
    volume = fresh_volume(folder, 0o2777, fs_group)
    daemon = contained(folder, uid, gid, "--groups", fs_group)
    for setting in ("disk.path", "state.path"):
        told = refused(serve(folder, config, daemon, **{setting: str(volume / "data")}))
        assert setting in told
        assert "everybody may" in told


# ---------------------------------------------------------------- one a node


def prepare(pod: Manifest, volume: Path) -> None:
    """Runs the init container, as root with its few capabilities."""
    (init,) = pod["initContainers"]
    caps = [name.lower() for name in init["securityContext"]["capabilities"]["add"]]
    given = [f"{one['name']}={one['value']}" for one in init["env"]]
    group = ("--groups", pod["securityContext"]["fsGroup"])
    prefix = contained(volume, 0, 0, *group, "--at", "/run/kvstore", "--caps", *caps)
    done = subprocess.run(
        [*prefix, "env", *given, *init["command"]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before", ["nothing", "an engine", "an earlier daemon"])
def test_the_nodes_daemon_gets_its_folder_whoever_was_first(folder: Path, before: str) -> None:
    found = documents(NODE)
    pod = next(pods(found))
    context = daemon_of(pod)["securityContext"]
    uid, gid = context["runAsUser"], context["runAsGroup"]
    volume = fresh_volume(folder, 0o755, 0)  # the kubelet's DirectoryOrCreate
    if before != "nothing":
        (volume / "chat").mkdir(mode=0o755)
    if before == "an earlier daemon":
        for path in (volume / "chat", volume):
            os.chown(path, uid, gid)
            path.chmod(0o711)
    prepare(pod, volume)
    group = ("--groups", pod["securityContext"]["fsGroup"])
    config = of_kind(found, "ConfigMap")["data"]["kvstored.toml"]
    with running(folder, serve(folder, config, contained(folder, uid, gid, *group))):
        socket = volume / "chat/data.sock"
        engine = contained(socket.parent, ENGINE, ENGINE, *group, "--read-only")
        with Child("sdk_roundtrip", socket, "put", 5, prefix=engine) as child:
            assert child.hear(60)["stored"] == 16
        # It sees its own tenant's folder alone; the operator's socket is not in it.
        assert sorted(os.listdir(volume / "chat")) == [
            "data.sock",
            "data.sock.fd",
            "data.sock.lock",
        ]
        stranger = contained(volume, STRANGER, STRANGER)
        with Child("sdk_roundtrip", socket, "put", 5, prefix=stranger) as child:
            assert child.hear(60)["stored"] == 0


def test_only_the_variant_can_lock_memory_beyond_the_limit(folder: Path) -> None:
    """As Kubernetes does it: an added capability is in the bounding set, and never ambient."""
    variant = next(pods(with_mlock()))
    daemon = daemon_of(variant)
    uid, gid = daemon["securityContext"]["runAsUser"], daemon["securityContext"]["runAsGroup"]
    caps = [name.lower() for name in daemon["securityContext"]["capabilities"]["add"]]
    (required,) = (one["value"] for one in daemon["env"] if one["name"] == "KVSTORE_HOST__MLOCK")
    config = of_kind(documents(NODE), "ConfigMap")["data"]["kvstored.toml"]
    volume = fresh_volume(folder, 0o755, 0)
    limit = ("prlimit", "--memlock=65536")
    groups = ("--groups", 10_001, "--caps", *caps)
    prepare(next(pods(documents(NODE))), volume)
    plain = (*limit, *contained(folder, 10_001, 10_001, *groups))
    assert "host.mlock" in refused(serve(folder, config, plain, **{"host.mlock": required}))
    prepare(variant, volume)  # also where the plain form was before
    locked = (*limit, *contained(folder, uid, gid, *groups))
    with running(folder, serve(folder, config, locked, **{"host.mlock": required})):
        assert (volume / "chat/data.sock").exists()
