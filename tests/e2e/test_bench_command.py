"""`kvstore bench` against a real daemon: what it says, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon, _python_path, start_daemon
from tests.e2e.stage import ROOT, assert_quiet, until
from tests.rawclient import RawAdmin
from tests.tls_kit import Pki

pytestmark = pytest.mark.process

RUN_S = 60.0
HIT_TOKENS = "kvstore_hit_tokens_total{"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all: what a bench leaves behind, the next one would find."""
    with start_daemon(tmp_path_factory.mktemp("bench"), host__capacity_bytes="16MiB") as daemon:
        yield daemon


def hit_tokens(daemon: Daemon) -> float:
    with RawAdmin(daemon.admin_socket) as admin:
        counters = admin.stats().counters
    return sum(value for name, value in counters.items() if name.startswith(HIT_TOKENS))


def start(daemon: Daemon, *arguments: object) -> subprocess.Popen[str]:
    folder = Path(daemon.admin_socket).parent
    command = [sys.executable, "-m", "kvstore.cli", "bench", "--runtime-dir", str(folder)]
    # Where tests run in the background of a script it is ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": _python_path(os.environ), "COLUMNS": "80"},
    )


def bench(daemon: Daemon, *arguments: object, code: int = 0) -> tuple[str, str]:
    """(standard output, standard error) of a bench that ends by itself."""
    process = start(daemon, *arguments)
    out, err = process.communicate(timeout=RUN_S)
    assert process.returncode == code, err
    return out, err


def assert_nothing_left(daemon: Daemon) -> None:
    with RawAdmin(daemon.admin_socket) as admin:
        assert_quiet(admin)
        assert not admin.call("Spaces").spaces
        assert admin.stats().tiers[0].blocks == 0


def test_it_measures_and_leaves_nothing(daemon: Daemon) -> None:
    sizes = ("--blocks", 12, "--block-kib", 64, "--rounds", 3)
    before = hit_tokens(daemon)
    out, _ = bench(daemon, *sizes, "--json")
    result = json.loads(out)
    assert (result["blocks"], result["block_bytes"]) == (12, 64 << 10)
    assert set(result) == {
        "blocks",
        "block_bytes",
        "copy_bytes_per_second",
        "put_bytes_per_second",
        "get_bytes_per_second",
        "put_over_copy",
        "get_over_copy",
        "lookup_ms",
    }
    assert all(value > 0 for value in result.values())
    for name in ("put", "get"):
        # Rates and ratios speak of the same times.
        ratio = result["copy_bytes_per_second"] / result[f"{name}_bytes_per_second"]
        assert result[f"{name}_over_copy"] == pytest.approx(ratio)
    assert hit_tokens(daemon) - before == 3 * 12 * 16, "three prompts of twelve blocks were found"
    assert_nothing_left(daemon)

    text, _ = bench(daemon, *sizes)
    assert text.startswith("12 blocks of 64 KiB, medians\n")
    rows = re.findall(r"(?m)^(memory copy|get|put) +([0-9.]+) +([0-9.]+)$", text)
    assert [name for name, _, _ in rows] == ["memory copy", "get", "put"]
    assert rows[0][2] == "1.00"
    assert re.search(r"(?m)^lookup of 12 blocks: [0-9.]+ m?s$", text)
    assert_nothing_left(daemon)


def test_what_does_not_fit_is_said_and_dropped(daemon: Daemon) -> None:
    _, err = bench(daemon, "--blocks", 250, "--block-kib", 64, "--rounds", 1, code=1)
    assert re.search(r"put \d+ of 250 blocks: [A-Z_]+: ", err)
    assert_nothing_left(daemon)


def test_a_round_beyond_memory_is_refused_before_it_is_made(daemon: Daemon) -> None:
    _, err = bench(daemon, "--blocks", 4_096, "--block-kib", 1 << 18, code=1)
    assert "a round of 1 TiB is more than the daemon's 16 MiB of memory" in err
    assert_nothing_left(daemon)


def test_nothing_is_stored_that_could_not_be_dropped(daemon: Daemon, tmp_path: Path) -> None:
    away = tmp_path / "admin.sock"
    _, err = bench(daemon, "--blocks", 4, "--admin-socket", away, code=4)
    assert f"no daemon at {away}" in err
    _, err = bench(daemon, "--blocks", 4, "--socket", daemon.admin_socket, code=1)
    assert "not the admin socket" in err
    with RawAdmin(daemon.admin_socket) as admin:
        assert not admin.call("Spaces").spaces


def test_interrupted_it_drops_what_it_stored(daemon: Daemon) -> None:
    process = start(daemon, "--blocks", 32, "--block-kib", 64, "--rounds", 1_000, "--json")
    with RawAdmin(daemon.admin_socket) as admin:
        until("blocks are stored", lambda: admin.stats().tiers[0].blocks >= 4, 30.0)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=RUN_S)
    assert process.returncode not in (0, None)
    assert out == ""
    assert_nothing_left(daemon)


def test_it_measures_over_tcp_as_well(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    settings = pki.settings("a")
    with start_daemon(tmp_path, host__capacity_bytes="16MiB", **settings) as daemon:
        way = ["--socket", f"tcp://{daemon.ready['tcp']}", "--blocks", 4, "--rounds", 1]
        files = {
            "--tls-ca-file": "ca",
            "--tls-cert-file": "a.crt",
            "--tls-key-file": "a.key",
            "--token-file": "a.token",
        }
        given = [one for name, file in files.items() for one in (name, pki.path(file))]
        out, _ = bench(daemon, *way, "--json", "--block-kib", 64, *given)
        measured = json.loads(out)
        assert measured["blocks"] == 4
        assert measured["get_bytes_per_second"] > 0
        _, err = bench(daemon, *way, code=2)
        assert "tls_ca_file" in err
