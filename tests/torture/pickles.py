"""Pickles that would run code, as values, names, metadata and records at rest (field case P36): no
marker file appears, nothing is unpickled, and the values come back as the bytes that they are.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import lmdb
import numpy as np

from kvstore.tiers.disk.change import TABLES
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from tests.daemon import Daemon, _python_path
from tests.e2e.stage import ROOT, Bytes, model
from tests.rawclient import CALL_S, RawAdmin, RawClient, Refused, refused_as
from tests.torture import watched
from tests.torture.base import Job, Outcome
from tests.torture.daemons import daemon_of
from tests.torture.watching import START_S, check_alive, http, until

MODEL = model(name="pickled")
BLOCKS = 16
BLOCK_BYTES = 4_096
CLI_S = 60.0

INSPECTIONS: tuple[tuple[str, ...], ...] = (
    ("status", "--json"),
    ("spaces",),
    ("trace", "--json"),
    ("review", "list"),
    ("config",),
)


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self._marker, "w")


def bombs(marker: Path) -> list[bytes]:
    """In every protocol."""
    return [pickle.dumps(Bomb(marker), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


def pickles(job: Job, outcome: Outcome) -> None:
    """The whole life: fed, read, restarted, damaged, inspected."""
    folder = job.folder / "pickles"
    folder.mkdir()
    marker, proof = folder / "marker", folder / "proof"
    pickle.loads(bombs(proof)[0]).close()  # noqa: S301
    if not proof.exists():
        outcome.failed.append("the pickle does not do what it is there for")
    charge = bombs(marker)
    daemon = daemon_of(
        job,
        folder,
        host__capacity_bytes="16MiB",
        disk__path=str(folder / "disk"),
        disk__capacity_bytes="64MiB",
        trace__file=str(folder / "trace.jsonl"),
    )
    daemon.module = "tests.torture.watched"
    daemon.environ |= {watched.PROGRAM: "kvstored", watched.FILE: str(folder / "watch.daemon")}
    with daemon.start(START_S):
        keys = _fed(daemon, charge, outcome)
        daemon.restart()
        _read(daemon, charge, keys, outcome, "after a restart")
        daemon.kill()
        planted = _plant(folder / "disk", charge, job.rng)
        daemon.start(START_S)
        if not until(lambda: "kvstore_disk_loading 0.0" in http(daemon, "/metrics")[1], 20.0):
            outcome.failed.append("the daemon does not load a folder with pickles in it")
        _read(daemon, charge, keys, outcome, "after pickles in the folder", lossy=True)
        commands = [*INSPECTIONS, ("explain", "--space", "1", keys[0].hex())]
        chosen = job.rng.sample(commands, job.scale.of(len(commands), at_least=2))
        _inspect(daemon, folder, chosen, outcome)
        check_alive(daemon, outcome, "pickles")
        daemon.stop()
    _verify(folder, outcome)
    outcome.trials += planted + len(keys)
    outcome.counts["pickles_planted"] = planted
    if marker.exists():
        outcome.failed.append("a pickle was unpickled: its marker file is there")
    _watches(folder, outcome)


# ---------------------------------------------------------------- over the wire


def _value(charge: list[bytes], index: int) -> Bytes:
    return np.frombuffer(charge[index % len(charge)].ljust(BLOCK_BYTES, b"\0"), np.uint8)


def _fed(daemon: Daemon, charge: list[bytes], outcome: Outcome) -> list[bytes]:
    """Values, keys, names and metadata; returns the keys of what is stored durably."""
    pieces = b"".join(charge)
    keys = [pieces[at : at + 32].ljust(32, b".") for at in range(0, BLOCKS * 7, 7)]
    with RawClient(daemon.data_socket, group=charge[2][:64]) as client:
        space = client.open(MODEL).space_id
        reserved = client.reserve(space, keys)
        client.fill(reserved, [_value(charge, index) for index in range(BLOCKS)])
        done = client.commit(reserved.lease_id, durable=True)
        if done.visible != BLOCKS:
            outcome.failed.append(f"of {BLOCKS} pickles as values {done.visible} were stored")
        for text in _texts(charge):
            _named(client, space, keys, text)
        metadata = [(f"x-{index}-bin", bomb) for index, bomb in enumerate(charge)]
        call: Any = client.stub.Lookup
        query = pb.Query(space_id=space, keys=b"".join(keys))
        request = pb.LookupRequest(session=client.secret, queries=[query])
        call(request, metadata=metadata, timeout=CALL_S)
        for method in pb.DESCRIPTOR.services_by_name["Store"].methods:
            for bomb in charge:
                _raw(client.channel, method.name, bomb)
    with RawAdmin(daemon.admin_socket) as admin:
        for text in _texts(charge):
            for verb, fields in (
                ("SetWeightEpoch", {"model_name": text, "epoch": 1, "why": text}),
                ("Review", {"review_id": 1, "who": text, "why": text, "revision": text}),
                ("Trace", {"request_id": text, "outcome": text}),
            ):
                with contextlib.suppress(Refused):
                    admin.call(verb, **fields)
    _read(daemon, charge, keys, outcome, "at once")
    return keys


def _texts(charge: list[bytes]) -> list[str]:
    """Pickles as text: as they are, and those of protocol 0 in one line."""
    return [bomb.decode("latin-1") for bomb in charge] + [charge[0].decode().replace("\n", " ")]


def _named(client: RawClient, space: int, keys: list[bytes], text: str) -> None:
    """A pickle in every text of a fingerprint and of the calls; most are refused."""
    message = convert.fingerprint_to_wire(MODEL)
    for group in (message.identity, message.geometry, message.encoding):
        for field in group.DESCRIPTOR.fields:
            if field.type == field.TYPE_STRING:
                offer = convert.fingerprint_to_wire(MODEL)
                setattr(getattr(offer, group.DESCRIPTOR.name.lower()), field.name, text)
                with contextlib.suppress(Refused):
                    client.call("Open", pb.OpenRequest(fingerprint=offer))
    with contextlib.suppress(Refused):
        client.lookup(space, keys, request_id=text)
    with contextlib.suppress(Refused):
        RawClient(client.data_socket, engine_id=text, fd=False).close()


def _raw(wire: grpc.Channel, method: str, data: bytes) -> None:
    """A pickle in place of the message itself."""
    call: Any = wire.stream_stream(f"/kvstore.v1.Store/{method}")
    with contextlib.suppress(Refused):
        refused_as(lambda: list(call(iter([data]), timeout=CALL_S)))


def _read(
    daemon: Daemon,
    charge: list[bytes],
    keys: list[bytes],
    outcome: Outcome,
    when: str,
    *,
    lossy: bool = False,
) -> None:
    """The values are the bytes that were put; `lossy`: or a miss."""
    with RawClient(daemon.data_socket) as client:
        space = client.open(MODEL).space_id

        def there() -> bool:
            return client.lookup(space, keys).hit_blocks == len(keys)

        if not lossy and not until(there, 20.0):
            outcome.failed.append(f"{when}: pickles that are values are not there")
        for index, row in enumerate(client.get(space, keys)):
            if row is not None and not np.array_equal(row, _value(charge, index)):
                outcome.wrong.append(f"{when}: value {index} is not the pickle that was put")


# ---------------------------------------------------------------- at rest


def _plant(disk: Path, charge: list[bytes], rng: random.Random) -> int:
    """Pickles in records, in rows, over files, and as files of their own; returns how many."""
    planted = 0
    for segment in sorted((disk / "segments").glob("*.seg")):
        with segment.open("r+b") as file:
            for _ in range(20):
                bomb = rng.choice(charge)
                file.seek(rng.randrange(max(1, segment.stat().st_size // 512)) * 512)
                file.write(bomb)
                planted += 1
    for name in ("index.pkl", "segments/00000000.pkl", "aside/x.pickle", "conftest.py", "lmdb.py"):
        path = disk / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rng.choice(charge))
        planted += 1
    with lmdb.open(str(disk / "index"), max_dbs=len(TABLES), map_size=64 << 20) as env:
        tables = [env.open_db(name, create=False) for name in TABLES]
        with env.begin(write=True) as transaction:
            for table in tables:
                for bomb in charge:
                    transaction.put(rng.randbytes(12), bomb, db=table)
                    planted += 1
    ledger = str(disk / "ledger" / "ledger.mdb")
    if os.path.exists(ledger):
        with (
            lmdb.open(ledger, subdir=False, map_size=64 << 20, lock=False) as env,
            env.begin(write=True) as transaction,
        ):
            transaction.put(b"spaces\0pickle", charge[0])
            planted += 1
    return planted


# ---------------------------------------------------------------- the tool


def _tool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": _python_path(os.environ), watched.PROGRAM: "kvstore"}
    environ[watched.FILE] = str(folder / f"watch.{arguments[0]}")
    return subprocess.run(
        [sys.executable, "-m", "tests.torture.watched", *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=CLI_S,
        check=False,
    )


def _inspect(
    daemon: Daemon, folder: Path, commands: Sequence[tuple[str, ...]], outcome: Outcome
) -> None:
    """What an operator would look at."""
    with ThreadPoolExecutor(2) as pool:
        arguments = [(*command, "--admin-socket", daemon.admin_socket) for command in commands]
        ended = list(pool.map(lambda command: _tool(folder, *command), arguments))
    for command, done in zip(commands, ended, strict=True):
        if "Traceback" in done.stderr or done.returncode not in (0, 1):
            outcome.failed.append(
                f"kvstore {command[0]} ends with {done.returncode}: {done.stderr}"
            )
        outcome.counts["inspections"] += 1


def _verify(folder: Path, outcome: Outcome) -> None:
    done = _tool(folder, "verify", str(folder / "disk"))
    if "Traceback" in done.stderr or done.returncode not in (0, 1):
        outcome.failed.append(f"kvstore verify ends with {done.returncode}: {done.stderr[-400:]}")


def _watches(folder: Path, outcome: Outcome) -> None:
    """Each program saw its own pickle and no other."""
    files = sorted(folder.glob("watch.*"))
    if len(files) < outcome.counts["inspections"] + 2:  # the daemon and `verify` besides
        outcome.failed.append(f"only {[file.name for file in files]} were watched")
    for file in files:
        lines = file.read_text().splitlines()
        others = [line for line in lines if line != watched.OWN]
        if watched.OWN not in lines:
            outcome.failed.append(f"{file.name}: the watch did not see its own pickle")
        for line in others[:5]:
            outcome.failed.append(f"{file.name}: {line}")
    outcome.counts["programs_watched"] = len(files)
