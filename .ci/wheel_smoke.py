"""Run by .ci/wheel with the interpreter of the environment that holds nothing but the wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {"kvstore", "kvstore_client", "kvstore_server"}
DISTRIBUTION = "tiered-kvstore"
BIN = Path(sys.executable).parent
READY_DEADLINE_S = 20.0
STOP_DEADLINE_S = 20.0


def check_contents(wheel: Path) -> None:
    """Three typed packages and the metadata, the generated code and the licence among them."""
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert roots == PACKAGES, f"top level of the wheel: {sorted(roots)}"
    wanted = [f"{package}/py.typed" for package in PACKAGES]
    wanted += ["kvstore/wire/v1/store_pb2.py", "kvstore/wire/v1/store_pb2_grpc.pyi"]
    missing = [name for name in wanted if name not in names]
    assert not missing, f"not in the wheel: {missing}"
    assert any(name.endswith("/licenses/LICENSE") for name in names), "no licence in the wheel"


def check_environment() -> None:
    """The packages come from here, and torch is not needed."""
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        origin = found.origin if found is not None else None
        assert origin is not None, f"{package} is not installed"
        assert Path(origin).is_relative_to(sys.prefix), f"{package} is {origin}"
    assert importlib.util.find_spec("torch") is None, "torch came along"


def check_versions() -> None:
    """Both commands run and tell the distribution's version."""
    version = importlib.metadata.version(DISTRIBUTION)
    for command in ("kvstored", "kvstore"):
        run = subprocess.run(
            [str(BIN / command), "--version"], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, f"{command} --version: {run.returncode}\n{run.stderr}"
        assert version in run.stdout, f"{command} --version says {run.stdout!r}, not {version}"


def check_daemon(folder: Path) -> None:
    """A daemon gets ready, answers the standard health check, and drains on SIGTERM."""
    log = folder / "kvstored.log"
    ready_fd, write_fd = os.pipe()
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            [
                str(BIN / "kvstored"),
                "serve",
                f"--server.runtime_dir={folder}/run",
                "--http.listen=127.0.0.1:0",
                "--host.capacity_bytes=64MiB",
                "--host.mlock=off",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(write_fd,),
            env={**os.environ, "KVSTORE_READY_FD": str(write_fd)},
        )
    os.close(write_fd)
    try:
        readable, _, _ = select.select([ready_fd], [], [], READY_DEADLINE_S)
        record = os.read(ready_fd, 65536) if readable else b""
        assert record, f"not ready:\n{log.read_text()}"
        check_health(json.loads(record)["data_sockets"]["default"])
        daemon.send_signal(signal.SIGTERM)
        code = daemon.wait(STOP_DEADLINE_S)
        assert code == 0, f"ended with {code}:\n{log.read_text()}"
    finally:
        os.close(ready_fd)
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()


def check_health(data_socket: str) -> None:
    """The daemon says that it serves."""
    import grpc
    from grpc_health.v1 import health_pb2

    with grpc.insecure_channel(f"unix:{data_socket}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        reply = check(health_pb2.HealthCheckRequest(), timeout=5.0)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING, reply


def main() -> None:
    """Each check in turn; the first that fails ends the run."""
    check_contents(Path(sys.argv[1]))
    check_environment()
    check_versions()
    with tempfile.TemporaryDirectory() as folder:
        check_daemon(Path(folder))
    print(f"{Path(sys.argv[1]).name}: whole, installs alone, serves and drains")


if __name__ == "__main__":
    main()
