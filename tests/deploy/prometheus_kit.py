"""A real Prometheus and a real daemon, each in a network namespace of its own with a veth between
them: nothing is scraped over loopback.

Prometheus is Debian's, from the PATH or from build/prometheus, where `.ci/prometheus` puts it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.daemon import Daemon, make_daemon
from tests.deploy.queries import ROOT

UNPACKED = ROOT / "build/prometheus/usr/bin"
RULES = ROOT / "deploy/prometheus"
REQUIRED = "MUST_HAVE_PROMETHEUS"
"""Set where these tests must not be skipped."""
# From the block that is set apart for tests of networks; nobody else sees it, within namespaces.
DAEMON_ADDRESS, PROMETHEUS_ADDRESS = "198.18.0.1", "198.18.0.2"
DAEMON_PORT = 9472
API = "http://127.0.0.1:9090"
SCRAPE_S = 1
END_S = 20.0
_numbers = itertools.count()


def tool(name: str) -> str:
    """Path of `prometheus` or `promtool`; skips, or fails where it has to be there."""
    path = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if path is None:
        lacking(f"no {name}: apt-get install prometheus, or .ci/prometheus")
    return path


def lacking(what: str) -> NoReturn:
    """Skips, unless the machine promised to have it."""
    if os.environ.get(REQUIRED):
        pytest.fail(what)
    pytest.skip(what)


def namespaces_or_skip() -> None:
    """Whether network namespaces can be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        lacking("network namespaces need root and iproute2")
    name = f"kvs{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode:
        lacking(f"no network namespaces here: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", name], check=True)


class Lane:
    """Two network namespaces joined by a veth pair: the daemon's and Prometheus'."""

    def __init__(self) -> None:
        stem = f"kvs{os.getpid()}-{next(_numbers)}"
        self.daemon, self.prometheus = f"{stem}d", f"{stem}p"

    def __enter__(self) -> Lane:
        for name in (self.daemon, self.prometheus):
            _ip("netns", "add", name)
        peer = ("peer", "name", "veth0", "netns", self.prometheus)
        _ip("link", "add", "veth0", "netns", self.daemon, "type", "veth", *peer)
        for name, address in (
            (self.daemon, DAEMON_ADDRESS),
            (self.prometheus, PROMETHEUS_ADDRESS),
        ):
            _ip("-n", name, "addr", "add", f"{address}/30", "dev", "veth0")
            for device in ("lo", "veth0"):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.daemon, self.prometheus):
            _ip("netns", "del", name)

    def run(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command beside Prometheus."""
        return subprocess.run(
            ["ip", "netns", "exec", self.prometheus, *command],
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=ROOT,
        )

    def queries(self, *flags: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs `tests.deploy.queries` there."""
        command = (sys.executable, "-m", "tests.deploy.queries", "--url", API)
        return self.run(*command, "--scrape-s", str(SCRAPE_S), *flags, timeout_s=timeout_s)

    def metrics(self) -> str:
        """The daemon's /metrics, as it is seen from beyond the veth."""
        code = (
            "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
        )
        url = f"http://{DAEMON_ADDRESS}:{DAEMON_PORT}/metrics"
        got = self.run(sys.executable, "-c", code, url)
        assert got.returncode == 0, got.stderr
        return got.stdout


def daemon_in(lane: Lane, folder: Path, **settings: Any) -> Daemon:
    """A daemon with a disk tier in the lane; not started yet."""
    given: dict[str, Any] = {
        "host__capacity_bytes": "24MiB",
        "disk__path": str(folder / "disk"),
        "disk__capacity_bytes": "96MiB",
        "disk__endurance_bytes_per_day": "1GiB",
        "limits__sessions_max": 6,
        "http__listen": f"{DAEMON_ADDRESS}:{DAEMON_PORT}",
        **settings,
    }
    return make_daemon(folder, argv_prefix=("ip", "netns", "exec", lane.daemon), **given)


@contextlib.contextmanager
def prometheus_in(lane: Lane, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Prometheus with the repository's own configuration, but for the targets, and faster."""
    config = folder / "prometheus"
    shutil.copytree(RULES, config)
    text = (config / "prometheus.yml").read_text(encoding="utf-8")
    for name, slow in (
        ("scrape_interval", 15),
        ("evaluation_interval", 15),
        ("scrape_timeout", 10),
    ):
        assert f"{name}: {slow}s" in text
        text = text.replace(f"{name}: {slow}s", f"{name}: {SCRAPE_S}s")
    (config / "prometheus.yml").write_text(text, encoding="utf-8")
    target = f"- targets:\n    - {DAEMON_ADDRESS}:{DAEMON_PORT}\n"
    (config / "targets/kvstored.yml").write_text(target, encoding="utf-8")
    command = [
        *("ip", "netns", "exec", lane.prometheus, tool("prometheus")),
        f"--config.file={config}/prometheus.yml",
        f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address={API.removeprefix('http://')}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
