"""The demo as it is run, with the model that needs no registry; and that a false claim is an
error."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rich.console import Console

from kvstore_client.demo.evidence import Claim, Transcript
from kvstore_client.demo.report import show_claims

pytestmark = [pytest.mark.process, pytest.mark.torch]

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO_S = 170
READY_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-") as name:
        yield Path(name)


def command(folder: Path) -> tuple[list[str], dict[str, str]]:
    argv = [sys.executable, "-m", "kvstore_client.demo", "--random-model"]
    argv += ["--turns", "2", "--new-tokens", "4", "--model-folder", str(folder / "model")]
    roots = os.pathsep.join(str(ROOT / name) for name in (".", "server", "client"))
    return argv, {**os.environ, "PYTHONPATH": roots, "TMPDIR": str(folder)}


def test_ended_by_a_signal_it_leaves_nothing_behind(folder: Path) -> None:
    argv, environ = command(folder)
    process = subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_S
        while not (ready := list(folder.glob("kvstore-demo-*/ready.json"))):
            assert process.poll() is None
            assert time.monotonic() < deadline
            select.select([], [], [], 0.01)
        daemon_pid = int(json.loads(ready[0].read_text())["pid"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(READY_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert not list(folder.glob("kvstore-demo-*"))
    assert not Path(f"/proc/{daemon_pid}").exists()


@pytest.mark.slow
def test_every_claim_of_the_demo_is_true(folder: Path) -> None:
    argv, environ = command(folder)
    done = subprocess.run(
        argv, env=environ, capture_output=True, text=True, timeout=DEMO_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every claim is true" in done.stdout
    assert "NO " not in done.stdout
    for field in ("identity.weights_revision", "encoding.kv_dtype", "identity.weight_epoch"):
        assert f"refused, naming {field}" in done.stdout


def test_a_false_claim_is_counted_and_shown() -> None:
    written = io.StringIO()
    claims = [Claim("one", True), Claim("two", False, "because"), Claim("three", False)]
    assert show_claims(Console(file=written, width=80), [Transcript([], claims)]) == 2
    assert "NO  two (because)" in written.getvalue()
