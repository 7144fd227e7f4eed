"""The systemd unit, as far as it can be judged without a running systemd: its own tools read it,
and a traced daemon shows that no restriction takes away what the daemon needs.
"""

from __future__ import annotations

import configparser
import re
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from kvstore.config import load
from kvstore.config.load import env_name, names
from kvstore_client import Client
from kvstore_server.notify import WATCHDOG_VARIABLE
from tests.daemon import make_daemon
from tests.e2e.stage import Prompt, model, until
from tests.rawclient import RawClient
from tests.tls_kit import Pki

ROOT = Path(__file__).resolve().parent.parent.parent
UNIT = ROOT / "deploy/systemd/kvstored.service"
TARGETS = Path("/lib/systemd/system")
ANALYZE = shutil.which("systemd-analyze")
EXPOSURE_MAX = 2.0
"""Out of 10. "OK" ends at 5."""

needs_analyze = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def analyze(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, check=False
    )


class Unit(configparser.RawConfigParser):
    """The unit's values; a name that is given several times has its lines one below the other."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr

    def values_of(self, name: str, section: str = "Service") -> list[str]:
        text = UNIT.read_text(encoding="utf-8")
        part = text.split(f"[{section}]\n")[1].split("\n[")[0]
        return re.findall(rf"(?m)^{name}=(.*)$", part)


unit = Unit()


def one(name: str) -> str:
    (value,) = unit.values_of(name)
    return value


def seconds(name: str) -> float:
    return float(one(name).removesuffix("s"))


# ---------------------------------------------------------------- by systemd's own tools


@needs_analyze
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """In a root of its own, where the commands that it names exist."""
    if not TARGETS.is_dir():
        pytest.skip("systemd's own units are not installed")
    shutil.copytree(TARGETS, tmp_path / TARGETS.relative_to("/"), symlinks=True)
    for command in ("ExecStart", "ExecReload"):
        program = tmp_path / one(command).split()[0].lstrip("/")
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    placed = tmp_path / "etc/systemd/system" / UNIT.name
    placed.parent.mkdir(parents=True)
    shutil.copy(UNIT, placed)
    found = analyze("verify", f"--root={tmp_path}", "--man=no", placed)
    ours = [line for line in found.stderr.splitlines() if UNIT.name in line]
    assert ours == []
    assert found.returncode == 0, found.stderr
    # The check would notice.
    placed.write_text(UNIT.read_text().replace("WatchdogSec=30s", "WatchdogSec=soon"))
    assert UNIT.name in analyze("verify", f"--root={tmp_path}", "--man=no", placed).stderr


@needs_analyze
def test_it_is_hardly_exposed() -> None:
    found = analyze("security", "--offline=yes", "--no-pager", UNIT)
    level, word = re.findall(r"exposure level for \S+: (\S+) (\w+)", found.stdout)[0]
    print(f"exposure: {level} {word}")
    assert word in ("OK", "SAFE", "PERFECT")
    assert float(level) <= EXPOSURE_MAX


# ---------------------------------------------------------------- against the daemon's settings


def test_its_times_fit_the_daemons(record_property: object) -> None:
    grace_s = load(None, {}, {}).server.drain_grace_s
    assert seconds("TimeoutStopSec") >= grace_s + 30
    assert seconds("WatchdogSec") >= 10
    assert seconds("RestartSec") * int(unit.values_of("StartLimitBurst", "Unit")[0]) > 10
    assert WATCHDOG_VARIABLE == "WATCHDOG_USEC"


def test_its_environment_is_taken_by_the_daemon() -> None:
    """With %t and %S as the system's manager has them."""
    environ = dict(line.split("=", 1) for line in unit.values_of("Environment"))
    known = {env_name(name) for name in names("default")}
    assert set(environ) - known == {"KVSTORE_CONFIG"}
    environ = {
        name: value.replace("%t", "/run").replace("%S", "/var/lib")
        for name, value in environ.items()
    }
    settings = load(str(ROOT / "deploy/kvstored.toml"), environ, {})
    assert settings.server.runtime_dir == f"/run/{one('RuntimeDirectory')}"
    assert settings.state.path.startswith(f"/var/lib/{one('StateDirectory')}/")


def test_the_user_is_made_and_engines_may_pass() -> None:
    made = (ROOT / "deploy/systemd/kvstore.sysusers.conf").read_text()
    assert f"\nu {one('User')} - " in made
    assert one("Group") == one("User")
    assert int(one("RuntimeDirectoryMode"), 8) & 0o077 == 0o050
    assert int(one("StateDirectoryMode"), 8) & 0o077 == 0


# ---------------------------------------------------------------- against what the daemon does


def has_all(client: RawClient, space: int, prompt: Prompt) -> bool:
    return client.lookup(space, prompt.keys).hit_blocks == len(prompt.keys)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Every system call of two lives: memory, locks, disk, clients, a reload, a warm start."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    folder = tmp_path_factory.mktemp("traced")
    file = folder / "trace"
    pki = Pki(folder)
    daemon = make_daemon(
        folder,
        argv_prefix=("strace", "-f", "-qq", "-A", "-o", str(file)),
        host__mlock="auto",
        disk__path=str(folder / "disk"),
        disk__capacity_bytes="256MiB",
        **pki.settings("default"),
    )
    prompt = Prompt(model(), 5, blocks=24)
    with daemon:
        for life in range(2):
            daemon.start(60)
            with RawClient(daemon.data_socket, group=b"traced") as client:
                space = client.open(model()).space_id
                if life == 0:
                    client.put(space, prompt.keys, prompt.rows())
                until("the blocks are there", partial(has_all, client, space, prompt))
                prompt.assert_right(client.get(space, prompt.keys))
            daemon.signal(signal.SIGHUP)
            over_tcp = pki.config("default", deadline_ms=20_000)
            with Client(f"tcp://{daemon.ready['tcp']}", config=over_tcp) as client:
                assert client.space(model()).fetch(prompt.keys).blocks == 24
            assert daemon.stop(60) == 0
    return file.read_text(errors="replace").splitlines()


def called(trace: list[str]) -> set[str]:
    found = (re.match(r"\d+ +([a-z_0-9]+)\(", line) for line in trace)
    return {match[1] for match in found if match}


def filter_sets() -> dict[str, list[str]]:
    """Systemd's named groups of system calls; a member may be a group itself."""
    groups: dict[str, list[str]] = {}
    for line in analyze("syscall-filter", "--no-pager").stdout.splitlines():
        if line.startswith("@"):
            groups[line.strip()] = members = []
        elif line.startswith(" ") and line.strip()[0] not in "#":
            members.append(line.strip())
    return groups


def expanded(words: list[str], groups: dict[str, list[str]]) -> set[str]:
    calls: set[str] = set()
    for word in words:
        calls |= expanded(groups[word], groups) if word in groups else {word}
    return calls


@needs_analyze
@pytest.mark.process
def test_no_call_of_the_daemon_is_filtered_out(trace: list[str]) -> None:
    groups = filter_sets()
    allowed: set[str] = set()
    for line in unit.values_of("SystemCallFilter"):
        if line.startswith("~"):
            allowed -= expanded(line[1:].split(), groups)
        else:
            allowed |= expanded(line.split(), groups)
    calls = called(trace)
    assert {"memfd_create", "mlock", "sendmsg", "fdatasync", "execve"} <= calls, "not a whole life"
    assert calls - allowed == set()
    assert not allowed & {"ptrace", "mount", "bpf", "init_module", "reboot", "keyctl", "setuid"}


@pytest.mark.process
def test_no_socket_of_the_daemon_is_of_a_refused_family(trace: list[str]) -> None:
    families = {m[1] for line in trace if (m := re.search(r" socket\((AF_\w+)", line))}
    assert "AF_UNIX" in families
    assert families <= set(one("RestrictAddressFamilies").split())


@pytest.mark.process
def test_no_memory_of_the_daemon_is_writable_and_executable(trace: list[str]) -> None:
    """MemoryDenyWriteExecute: not at once, and not later by mprotect."""
    assert one("MemoryDenyWriteExecute") == "yes"
    mapped = [line for line in trace if re.search(r" (mmap|mprotect|pkey_mprotect|shmat)\(", line)]
    assert len(mapped) > 100
    assert [line for line in mapped if "PROT_WRITE" in line and "PROT_EXEC" in line] == []
    assert [line for line in mapped if " mmap(" not in line and "PROT_EXEC" in line] == []


@pytest.mark.process
def test_the_daemon_writes_only_where_it_may(trace: list[str]) -> None:
    """ProtectSystem=strict leaves the runtime and state folders."""
    assert one("ProtectSystem") == "strict"
    opened = [line for line in trace if re.search(r"O_(WRONLY|RDWR|CREAT)", line)]
    paths = {m[1] for line in opened if (m := re.search(r'openat\([^"]*"([^"]+)"', line))}
    assert any("/disk/" in path for path in paths)
    outside = {p for p in paths if "/traced" not in p and not p.startswith(("/dev/", "/proc/self"))}
    assert outside == set()
