"""What the end-to-end tests share: models of chosen block sizes, seeded prompts whose bytes say
whose they are, polling with a deadline, gauges, and client processes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.model.fingerprint import Encoding, Fingerprint, Geometry, Identity, Placement
from kvstore.model.keys import BlockKey
from kvstore.model.layout import layout_of
from kvstore.testing.payload import Finding, check, payload, tag_of
from kvstore.wire.v1 import admin_pb2
from tests.daemon import _python_path
from tests.rawclient import RawAdmin

Bytes = NDArray[np.uint8]
Value = TypeVar("Value")

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCK_TOKENS = 16
CHILD_S = 30.0
POLL_S = 0.005


# ---------------------------------------------------------------- models


def model(
    block_bytes: int = 4096, *, name: str = "small", revision: str | None = "r1", ranks: int = 1
) -> Fingerprint:
    """A fingerprint whose blocks have `block_bytes` (a power of two from 4096 on), in `ranks`
    parts."""
    head_size = 64
    heads = block_bytes // (2 * 2 * BLOCK_TOKENS * head_size)
    fingerprint = Fingerprint(
        Identity(model_name=name, weights_revision=revision, config_digest="config"),
        Geometry(attention="mha", layers=1, kv_heads=heads, head_size=head_size),
        Encoding(
            kv_dtype="bfloat16",
            block_tokens=BLOCK_TOKENS,
            element_order="layer_kv_head_token_dim",
        ),
        Placement(tensor_parallel=ranks),
    )
    assert layout_of(fingerprint).block_bytes == block_bytes
    return fingerprint


def altered(fingerprint: Fingerprint, group: str, **fields: Any) -> Fingerprint:
    """A copy with some fields of one group changed."""
    changed = dataclasses.replace(getattr(fingerprint, group), **fields)
    return dataclasses.replace(fingerprint, **{group: changed})


class Prompt:
    """Keys of a made-up prompt, and what their blocks hold when `tenant` writes them."""

    def __init__(
        self, fingerprint: Fingerprint, seed: int, blocks: int, *, tenant: str = "default"
    ) -> None:
        self.fingerprint = fingerprint
        self.tenant = tenant
        self.keys: list[BlockKey] = [
            BlockKey(np.random.default_rng([seed, index]).bytes(32)) for index in range(blocks)
        ]
        self.block_bytes = layout_of(fingerprint).block_bytes

    def tag(self, index: int, version: int = 0) -> bytes:
        return tag_of(self.tenant, self.fingerprint.digest, self.keys[index], version)

    def rows(self, version: int = 0) -> list[Bytes]:
        return [
            payload(self.tag(index, version), self.block_bytes) for index in range(len(self.keys))
        ]

    def finding(self, index: int, row: Bytes, versions: Sequence[int] = (0,)) -> Finding:
        return check(row, [self.tag(index, version) for version in versions])

    def assert_right(self, rows: Sequence[Bytes | None], versions: Sequence[int] = (0,)) -> None:
        """Every row is there and is what was written."""
        for index, row in enumerate(rows):
            assert row is not None, f"block {index} is absent"
            assert self.finding(index, row, versions) is Finding.RIGHT, index


# ---------------------------------------------------------------- waiting


def until(what: str, found: Callable[[], Value], deadline_s: float = 10.0) -> Value:
    """Polls until `found` gives something true, and gives that."""
    end = time.monotonic() + deadline_s
    while True:
        value = found()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}, but {value!r}")
        time.sleep(POLL_S)


def seconds_until(what: str, found: Callable[[], Any], deadline_s: float = 10.0) -> float:
    """How long it took."""
    started = time.monotonic()
    until(what, found, deadline_s)
    return time.monotonic() - started


def record(note: Callable[[str, object], None], name: str, value: float, unit: str = "s") -> None:
    """Into the test report, and onto the screen with -s."""
    note(f"{name}_{unit}", round(value, 4))
    print(f"{name}: {value:.4f} {unit}")


# ---------------------------------------------------------------- gauges

GAUGES = (
    "sessions",
    "read_leases",
    "view_leases",
    "write_leases",
    "pins",
    "copies_in_flight",
)


def held(stats: admin_pb2.StatsReply) -> dict[str, int]:
    """The gauges of what somebody holds that are not 0."""
    host = stats.tiers[0]
    values = {name: int(getattr(stats, name)) for name in GAUGES}
    values["closing_regions"] = host.closing_regions
    values["staging_bytes"] = host.staging_bytes
    return {name: value for name, value in values.items() if value}


def assert_quiet(admin: RawAdmin, slot_bytes: int | None = None, deadline_s: float = 10.0) -> float:
    """Waits until nobody holds anything, then checks that the bytes add up. Returns the seconds.

    slot_bytes: where all slots have one size, the slots' bytes too.
    """
    started = time.monotonic()
    while found := held(admin.stats()):
        assert time.monotonic() - started < deadline_s, f"still held: {found}"
        time.sleep(POLL_S)
    seconds = time.monotonic() - started
    stats = admin.stats()
    host = stats.tiers[0]
    assert 0 <= host.used_bytes <= host.capacity_bytes
    assert sum(tenant.used_bytes for tenant in stats.tenants) == host.used_bytes
    assert sum(tenant.blocks for tenant in stats.tenants) == host.blocks
    if slot_bytes is not None:
        slots = (host.blocks + host.free_slots) * slot_bytes
        header = host.regions * (1 << 16)
        assert slots <= host.used_bytes <= slots + host.used_bytes // 16 + header
    return seconds


# ---------------------------------------------------------------- client processes


class Child:
    """A process of tests/e2e/child.py, or of another such module: it says JSON lines, and is told
    lines.
    """

    def __init__(
        self,
        *arguments: object,
        prefix: Sequence[str] = (),
        python: str = "",
        module: str = "tests.e2e.child",
    ) -> None:
        environ = {**os.environ, "PYTHONPATH": _python_path(os.environ), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*prefix, python or sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environ,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self, deadline_s: float = CHILD_S) -> dict[str, Any]:
        """The next line; the test fails if the process ends or says nothing in time."""
        assert self.process.stdout is not None
        with _alarm(deadline_s, "the child says nothing"):
            line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(CHILD_S)}"
        said: dict[str, Any] = json.loads(line)
        return said

    def tell(self, line: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str = "go", deadline_s: float = CHILD_S) -> dict[str, Any]:
        self.tell(line)
        return self.hear(deadline_s)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP, and waits until it has stopped."""
        self.signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        until("stopped", lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def wake(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(CHILD_S)

    def end(self) -> None:
        """Ends it if it lives; its forked children end with its standard input."""
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@contextlib.contextmanager
def _alarm(seconds: float, what: str) -> Iterator[None]:
    """Interrupts a blocking read of the main thread."""

    def ring(*_: object) -> None:
        raise AssertionError(f"not within {seconds} s: {what}")

    before = signal.signal(signal.SIGALRM, ring)
    left = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before)


def resident_bytes(pid: int, *, mapped: str = "") -> int:
    """Resident memory of a process; with `mapped` only of mappings with this in their name."""
    if not mapped:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        return 0
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        head = line.split(maxsplit=5)
        if "-" in head[0] and not head[0].endswith(":"):
            inside = mapped in line
        elif inside and line.startswith("Rss:"):
            total += int(head[1]) << 10
    return total


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def open_sockets(pid: int) -> int:
    """Unlike all open files, not raised by the regions that a daemon prepares in the background."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(entry.readlink()).startswith("socket:")
    return found
