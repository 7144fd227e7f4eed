"""Security gates: nothing unpickles, sockets and folders are closed, tenants are strangers, and the
clock and the logs tell nothing.
"""

from __future__ import annotations

import ast
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np

from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon, DaemonDied
from tests.e2e.stage import Prompt, model
from tests.rawclient import RawAdmin, RawClient, Refused
from tests.tidy import source, test_code
from tests.torture import tenants
from tests.torture.audit import audit
from tests.torture.base import Job, Outcome
from tests.torture.daemons import daemon_of
from tests.torture.pickles import pickles
from tests.torture.watching import START_S, check_alive, check_quiet, http, until

STRANGER = 12_345
BANNED_NAMES = frozenset({"__reduce__", "__reduce_ex__", "__setstate__", "find_class", "Unpickler"})
BANNED_MODULES = frozenset({"copyreg", "multiprocessing", "pickletools", "yaml", "code", "codeop"})
PLANTED = ("import pickle", "eval('1')", "import torch\ntorch.load('x')", "x.__reduce__()")
TOKENS = [4_022_250_974, 4_111_222_333, 4_000_000_007] * 8
"""Ids that nothing else is called."""
EXIT_SETTINGS = 2


class Gates:
    """K."""

    name = "gates"
    what = "pickles fed everywhere, modes and folders, tenants against each other, clock and logs"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        parts: tuple[Callable[[Job, Outcome], None], ...] = (
            scan,
            pickles,
            modes,
            refused_folders,
            strangers,
        )
        for number, part in enumerate(parts):
            began = time.monotonic()
            try:
                part(job, outcome)
            except (Refused, OSError, AssertionError, grpc.RpcError) as error:
                text = f"{part.__name__}: {type(error).__name__}: {error}"
                outcome.failed.append(text[:1_000])
            outcome.counts[f"{part.__name__}_s"] = round(time.monotonic() - began)
            job.progress(number + 1, len(parts), outcome)
            if job.enough(outcome):
                break
        return outcome


# ---------------------------------------------------------------- scan


def scan(job: Job, outcome: Outcome) -> None:
    """No module of the product imports or calls what runs code out of data."""
    for text in PLANTED:
        if not list(_banned(ast.parse(text))):
            outcome.failed.append(f"the scan does not find {text!r}")
    files = source.product_files()
    for path in files:
        for line, what in _banned(source.tree(path)):
            outcome.failed.append(f"{path.relative_to(source.ROOT)}:{line}: {what}")
    outcome.trials += len(files)
    outcome.counts["modules_scanned"] = len(files)
    if len(files) < 100:
        outcome.failed.append(f"only {len(files)} modules were found")


def _banned(module: ast.Module) -> Iterator[tuple[int, str]]:
    yield from test_code.banned(module)
    for line, name in source.imported_names(module):
        if name.split(".")[0] in BANNED_MODULES:
            yield line, f"import {name}"
    for node in ast.walk(module):
        named = {str(getattr(node, kind, "")) for kind in ("attr", "id", "name")}
        for banned in named & BANNED_NAMES:
            yield getattr(node, "lineno", 0), banned


# ---------------------------------------------------------------- modes


def modes(job: Job, outcome: Outcome) -> None:
    """Whatever the umask: sockets 0600, folders 0700, files for us alone, nothing abstract."""
    for umask in ("0", "022")[: job.scale.of(2)]:
        folder = job.folder / f"umask-{umask}"
        folder.mkdir()
        folder.chmod(0o755)
        daemon = daemon_of(
            job,
            folder,
            argv_prefix=("sh", "-c", f'umask {umask}; exec "$@"', "sh"),
            host__capacity_bytes="16MiB",
            disk__path=str(folder / "data" / "disk"),
            disk__capacity_bytes="64MiB",
            state__path=str(folder / "data" / "state"),
            trace__file=str(folder / "trace.jsonl"),
            tenants__default__socket="data.sock",
            tenants__wide__socket="wide/data.sock",
            tenants__wide__mode="0660",
        )
        with daemon.start(START_S):
            prompt = Prompt(model(), 1, blocks=8)
            with RawClient(daemon.data_sockets["default"]) as client:
                space = client.open(model()).space_id
                reserved = client.reserve(space, prompt.keys)
                client.fill(reserved, prompt.rows())
                client.commit(reserved.lease_id, durable=True)
            _check_modes(folder, umask, outcome)
            _check_sockets(daemon, outcome)
            check_alive(daemon, outcome, f"umask {umask}")


def _check_modes(folder: Path, umask: str, outcome: Outcome) -> None:
    expected = {
        "run": 0o711,  # since one tenant's socket is for others
        "run/data.sock": 0o600,
        "run/data.sock.fd": 0o600,
        "run/admin.sock": 0o600,
        "run/wide": 0o711,
        "run/wide/data.sock": 0o660,
        "run/wide/data.sock.fd": 0o660,
        "data": 0o700,
        "data/disk": 0o700,
        "data/state": 0o700,
        "trace.jsonl": 0o600,
    }
    for name, mode in expected.items():
        found = stat.S_IMODE((folder / name).stat().st_mode)
        if found != mode:
            outcome.failed.append(f"umask {umask}: {name} has mode {found:o}, not {mode:o}")
    files = list((folder / "data").rglob("*"))
    for path in [*files, *(folder / "run").rglob("*.lock")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077:
            outcome.failed.append(f"umask {umask}: {path.relative_to(folder)} has mode {mode:o}")
    outcome.trials += len(expected) + len(files)
    if len(files) < 8:
        outcome.failed.append(f"umask {umask}: only {len(files)} files of data were looked at")


def _check_sockets(daemon: Daemon, outcome: Outcome) -> None:
    """It listens in its folder and on loopback, nowhere else."""
    own = set()
    for fd in Path(f"/proc/{daemon.pid}/fd").iterdir():
        try:
            own.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[6]}]" in own and len(fields) > 7 and fields[7].startswith("@"):
            outcome.failed.append(f"an abstract socket: {fields[7]}")
    loopback = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), 'little'):08X}"
    listening = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            listening += 1
            if fields[1].split(":")[0] != loopback:
                outcome.failed.append(f"it listens on {fields[1]}")
    tcp6 = Path("/proc/net/tcp6")
    for line in tcp6.read_text().splitlines()[1:] if tcp6.exists() else []:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            outcome.failed.append(f"it listens on {fields[1]}")
    if listening != 1:
        outcome.failed.append(f"it listens on {listening} ports, not on that for metrics alone")


def refused_folders(job: Job, outcome: Outcome) -> None:
    """A folder that others may write into, or turn, is refused by its setting, and not touched."""
    cases: list[tuple[str, Callable[[Path], Path]]] = [
        ("server.runtime_dir", _open_folder),
        ("state.path", _open_folder),
        ("disk.path", _open_folder),
        ("disk.path", _below),
    ]
    if os.geteuid() == 0:
        cases += [
            ("server.runtime_dir", _anothers_link),
            ("state.path", _anothers_link),
            ("disk.path", _anothers),
            ("disk.path", _anothers_link),
        ]
    else:
        outcome.skipped = "folders and links of another user: not root"
    chosen = job.rng.sample(cases, job.scale.of(len(cases), at_least=3))
    for number, (setting, make) in enumerate(chosen):
        folder = job.folder / f"refused-{number}"
        folder.mkdir()
        bad = make(folder)
        kind = make.__name__.strip("_")
        values = {"host.capacity_bytes": "16MiB", setting: str(bad)}
        daemon = daemon_of(job, folder)
        daemon.settings |= values
        outcome.trials += 1
        try:
            daemon.start(START_S)
            outcome.failed.append(f"{setting}: {kind} was taken")
            daemon.kill()
        except DaemonDied as died:
            if died.code != EXIT_SETTINGS or setting not in died.output:
                text = f"{setting}, {kind}: ended with {died.code}: {died.output[-300:]}"
                outcome.failed.append(text)
        if bad.is_dir() and list(bad.iterdir()):
            outcome.failed.append(f"{setting}, {kind}: was written into before it was refused")
    outcome.counts["folders_refused"] = len(chosen)


def _open_folder(folder: Path) -> Path:
    bad = folder / "open"
    bad.mkdir()
    bad.chmod(0o777)
    return bad


def _below(folder: Path) -> Path:
    return _open_folder(folder) / "below" / "it"


def _anothers(folder: Path) -> Path:
    bad = folder / "theirs"
    bad.mkdir(mode=0o755)
    os.chown(bad, STRANGER, -1)
    return bad


def _anothers_link(folder: Path) -> Path:
    (folder / "real").mkdir(mode=0o700)
    bad = folder / "link"
    bad.symlink_to("real")
    os.lchown(bad, STRANGER, -1)
    return bad


# ---------------------------------------------------------------- tenants


def strangers(job: Job, outcome: Outcome) -> None:
    """Two tenants above one disk, before and after a restart; then the clock; then all that was
    written down meanwhile.
    """
    folder = job.folder / "tenants"
    folder.mkdir()
    daemon = daemon_of(
        job,
        folder,
        host__capacity_bytes="32MiB",
        disk__path=str(folder / "disk"),
        disk__capacity_bytes="128MiB",
        trace__file=str(folder / "trace.jsonl"),
        tenants__a__socket="a.sock",
        tenants__b__socket="b.sock",
    )
    secrets: list[bytes] = []
    with daemon.start(START_S):
        seed = job.rng.randrange(1 << 20)
        secrets += tenants.matrix(daemon, seed, outcome)
        check_quiet(daemon, outcome, "the tenants' matrix")
        daemon.restart()
        if not until(lambda: "kvstore_disk_loading 0.0" in http(daemon, "/metrics")[1], 20.0):
            outcome.failed.append("the disk tier does not load")
        # What a had is on disk alone now.
        secrets += tenants.matrix(daemon, seed, outcome, stored=True)
        if not job.enough(outcome):
            audit(job, daemon, outcome)
        secrets += _tokens(daemon, outcome)
        check_quiet(daemon, outcome, "the timing audit")
        texts = _written(daemon)
        check_alive(daemon, outcome, "two tenants")
        daemon.stop()
    texts |= {"trace.file": (folder / "trace.jsonl").read_text()}
    texts |= {"the log": daemon.log()}
    _tells_nothing(texts, secrets, outcome)
    _names_nothing(folder / "disk", outcome)


def _tokens(daemon: Daemon, outcome: Outcome) -> list[bytes]:
    """The SDK with token ids, so that they could be written somewhere; returns the keys."""
    tokens = np.array(TOKENS * 4, np.uint32)
    with Client(daemon.data_sockets["a"], config=ClientConfig(deadline_ms=10_000)) as client:
        space = client.space(model(name="with-tokens"))
        keys = space.keys(tokens)
        rows = np.zeros((len(keys), space.part_bytes), np.uint8)
        if space.push(tokens, rows).stored != len(keys) or space.lookup(tokens).blocks != len(keys):
            outcome.failed.append("a prompt with token ids was not stored")
        space.explain(keys)
    return [bytes(key) for key in keys]


def _written(daemon: Daemon) -> dict[str, str]:
    """Everything that the daemon shows of itself."""
    with RawAdmin(daemon.admin_socket) as admin:
        return {
            "trace": "\n".join(admin.call("Trace", last=100_000).records),
            "stats": str(admin.stats()),
            "/metrics": http(daemon, "/metrics")[1],
            "config": str(admin.call("Config").toml),
        }


def _tells_nothing(texts: dict[str, str], secrets: list[bytes], outcome: Outcome) -> None:
    """No whole key, no secret and no token id; of a model's name nothing in the metrics."""
    for where, text in texts.items():
        if not text:
            outcome.failed.append(f"{where} is empty: nothing was searched")
        for secret in secrets:
            # Eight digits of a key may be shown.
            if secret.hex()[:12] in text or repr(secret)[2:-1] in text:
                outcome.failed.append(f"{where} holds a key or a secret")
                break
        for token in set(TOKENS):
            if str(token) in text or f"{token:x}" in text:
                outcome.failed.append(f"{where} holds a token id")
    for name in (tenants.SECRET_NAME, tenants.SECRET_REVISION, "with-tokens"):
        if name in texts["/metrics"] or name in texts["stats"]:
            outcome.failed.append(f"the metrics name a model: {name}")
    outcome.counts["characters_searched"] = sum(map(len, texts.values()))
    outcome.counts["keys_searched_for"] = len(secrets)


def _names_nothing(disk: Path, outcome: Outcome) -> None:
    """No tenant's or model's name is part of a path."""
    paths = [str(path.relative_to(disk)) for path in disk.rglob("*")]
    for path in paths:
        if tenants.SECRET_NAME in path or "tokens" in path or path.split("/")[-1] in ("a", "b"):
            outcome.failed.append(f"a name in a path: {path}")
    if not paths:
        outcome.failed.append("the disk tier has no files")
