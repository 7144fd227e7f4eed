"""`python -m tests.simulation.same_hits TRACE`: the same hits from a daemon as from the simulation?

The requests of a trace go to a real daemon (a process, its sockets, blocks of a page) whose clock
the trace drives and whose movements are awaited, and to the replay that `kvstore simulate` runs.
Compared is every block: there or not, and from which tier. Then the access log that the daemon
wrote of it is replayed as well.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.config import Settings
from kvstore.model.hits import ABSENT, PENDING, leading_run
from kvstore.policy.choice import NAMES, policy_maker
from kvstore.simulate.archive import SimulatedArchive
from kvstore.simulate.replay import (
    BLOCK_BYTES,
    DISK,
    HOST,
    MODEL,
    STEP_NS,
    Memory,
    Replay,
    key_of,
)
from kvstore.simulate.trace import Request, read_trace, traces_in
from kvstore.tiers.disk.format import record_bytes
from kvstore.tiers.disk.ring import Ring
from kvstore.tiers.disk.rows import index_bytes
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.assembly import _core_limits
from kvstore_server.disk import DISK_LIMITS
from tests.daemon import Daemon, make_daemon
from tests.e2e.stage import until
from tests.rawclient import RawClient
from tests.simulation.clocked_daemon import VARIABLE

CLOCK_S = 60.0
MARK_BYTES = 8


class Size(NamedTuple):
    """A daemon's settings; 0: no disk."""

    host_bytes: int = 4 << 20
    disk_bytes: int = 0


class Run(NamedTuple):
    """What a daemon gave. hits: of each request, the tiers of its leading hit. blocks, disk_blocks:
    its slots at the end. saves: blocks that it wrote to disk. log: its access log, read back.
    """

    hits: list[list[int]]
    blocks: int
    disk_blocks: int
    saves: int
    log: list[Request]


def from_zero(requests: Sequence[Request]) -> list[Request]:
    """The same requests, from the first one's time on, as an access log tells them."""
    first_ns = requests[0].at_ns if requests else 0
    return [one._replace(at_ns=one.at_ns - first_ns) for one in requests]


class Clock:
    """The clock of a daemon that `clocked_daemon` runs."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(CLOCK_S)
        until("its socket", lambda: not self._socket.connect_ex(str(path)), CLOCK_S)
        self._answers = self._socket.makefile("rb")
        self._now_ns = 0

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def advance(self, at_ns: int) -> None:
        """A step further, or more; has done what is due then."""
        self._now_ns = max(self._now_ns + STEP_NS, at_ns)
        self._tell(str(self._now_ns))

    def settle(self) -> None:
        """Waits until nothing moves."""
        self._tell("")

    def _tell(self, line: str) -> None:
        self._socket.sendall(f"{line}\n".encode())
        answer = self._answers.readline()
        assert answer == b"done\n", f"the daemon's clock: {answer!r}"


class Driver:
    """One engine: gets what is there of each prompt, then puts the rest; waits for everything."""

    def __init__(self, data_socket: str, clock: Clock) -> None:
        self._client = RawClient(data_socket, group=b"engine")
        self._space = self._client.open(MODEL).space_id
        self._clock = clock
        self._attempt = 0

    def close(self) -> None:
        self._client.close()

    def serve(self, request: Request) -> list[int]:
        """The tier of each block of the prompt's leading hit."""
        self._clock.advance(request.at_ns)
        self._client.unmap()
        keys = [key_of(one) for one in request.ids]
        hits: list[int] = []
        while len(hits) < len(keys):
            more = self._get(keys[len(hits) :])
            hits += more
            if not more:
                break
        self._put(keys, len(hits))
        return hits

    def _get(self, keys: Sequence[bytes]) -> list[int]:
        client = self._client
        codes = client.lookup(self._space, keys).tiers
        if not leading_run(codes):
            return []
        leased = client.acquire(self._space, keys)
        hits = []
        for key, code, place in zip(keys, codes, leased.places, strict=True):
            if not place.region or code in (ABSENT, PENDING):
                break
            mark = bytes(client.region(place.region).slot(place.slot, MARK_BYTES))
            assert mark == key[:MARK_BYTES], "a hit has another block's bytes"
            hits.append(code - 1)
        client.release(leased.lease_id)
        self._clock.settle()
        return hits

    def _put(self, keys: Sequence[bytes], first: int) -> None:
        client, since = self._client, 0
        self._attempt += 1
        while True:
            reserved = client.reserve(
                self._space, keys, first=first, attempt=self._attempt, since=since
            )
            if not reserved.lease_id:
                return
            wanted = convert.unpack_u32(reserved.wanted)
            for index, offset in zip(wanted, convert.unpack_u64(reserved.offsets), strict=True):
                client.write(int(offset), np.frombuffer(keys[index][:MARK_BYTES], np.uint8))
            client.commit(reserved.lease_id)
            self._clock.settle()
            if reserved.reason == pb.REASON_OK:
                return
            first = int(wanted[-1]) + 1
            since = since or reserved.mark


def clocked_daemon(folder: Path, **settings: Any) -> Daemon:
    """A daemon, not started yet, whose clock is driven over the socket `clock` in its folder."""
    daemon = make_daemon(folder, environ={VARIABLE: str(folder / "clock")}, **settings)
    daemon.module = "tests.simulation.clocked_daemon"
    return daemon


def run_daemon(folder: Path, requests: Sequence[Request], policy: str, size: Size) -> Run:
    """The requests through a daemon of its own."""
    disk: dict[str, Any] = {
        "disk__path": str(folder / "disk"),
        "disk__capacity_bytes": size.disk_bytes,
    }
    daemon = clocked_daemon(
        folder,
        host__capacity_bytes=size.host_bytes,
        policy__eviction=policy,
        record__path=str(folder / "record"),
        **(disk if size.disk_bytes else {}),
    )
    with daemon.start():
        with (
            closing(Clock(folder / "clock")) as clock,
            closing(Driver(daemon.data_socket, clock)) as driver,
        ):
            hits = [driver.serve(request) for request in requests]
            gauges = _scraped(daemon)
        assert daemon.stop() == 0, daemon.log()
    ((_, files),) = traces_in([folder / "record"])
    blocks = gauges['kvstore_tier_blocks{tier="host"}']
    blocks += gauges['kvstore_tier_free_slots{tier="host"}']
    disk_blocks, saves = (
        int(gauges.get(f"kvstore_disk_{name}", 0)) for name in ("slots", "saves_total")
    )
    return Run(hits, int(blocks), disk_blocks, saves, read_trace(*files))


def _scraped(daemon: Daemon) -> dict[str, float]:
    """What `/metrics` shows now, by name and labels."""
    with urllib.request.urlopen(f"{daemon.http_url}/metrics") as page:
        lines = page.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


class Simulated(NamedTuple):
    """What the simulation gave. saves: blocks written to disk."""

    hits: list[list[int]]
    saves: int


def simulate(requests: Sequence[Request], policy: str, size: Size) -> Simulated:
    """The requests through the replay, of a daemon with these settings."""
    host_bytes, disk_bytes = size
    settings = Settings()
    limits = _core_limits(settings, settings.limits_for(host_bytes))
    archive = None
    if disk_bytes:
        limits = replace(limits, **DISK_LIMITS)
        ring = Ring(disk_bytes, index_bytes)
        archive = SimulatedArchive(0, ring=ring, record_bytes=record_bytes(BLOCK_BYTES))
    hits: list[list[int]] = []
    replay = Replay(
        policy_maker(policy, host_bytes, disk_bytes),
        0,
        memory=Memory(host_bytes, limits),
        archive=archive,
        observe=lambda _, got: hits.append(got),
    )
    return Simulated(hits, replay.serve(requests).disk_writes)


def differences(
    requests: Sequence[Request], ours: Sequence[list[int]], theirs: Sequence[list[int]]
) -> Iterator[str]:
    """A line for each request whose blocks do not come from the same places."""
    for number, (request, one, other) in enumerate(zip(requests, ours, theirs, strict=True)):
        if one != other:
            yield f"request {number}, {len(request.ids)} blocks: {_told(one)} | {_told(other)}"


def _told(hits: Sequence[int]) -> str:
    return f"{len(hits)} hits, {sum(tier > 0 for tier in hits)} of them from disk"


def translated(log: Sequence[Request], requests: Sequence[Request]) -> list[Request]:
    """The log with the trace's own ids. ValueError: its ids do not stand for the same blocks."""
    back: dict[int, int] = {}
    for one, request in zip(log, requests, strict=True):
        for id_there, id_here in zip(one.ids, request.ids, strict=True):
            if back.setdefault(id_there, id_here) != id_here:
                raise ValueError(f"id {id_there} is two blocks")
    if len(set(back.values())) < len(back):
        raise ValueError("a block has two ids")
    return [one._replace(ids=[back[i] for i in one.ids]) for one in log]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--policy", choices=NAMES, action="append")
    parser.add_argument("--host-bytes", type=int, default=Size().host_bytes)
    parser.add_argument("--disk-bytes", type=int, action="append", help="may be repeated; 0: none")
    asked = parser.parse_args()
    requests = from_zero(read_trace(asked.trace)[: asked.requests])
    differ = 0
    for disk_bytes in asked.disk_bytes or [0]:
        for policy in asked.policy or NAMES:
            differ += compare(requests, policy, Size(asked.host_bytes, disk_bytes))
    return 1 if differ else 0


def compare(requests: Sequence[Request], policy: str, size: Size) -> int:
    """Prints what is the same and what is not; how many requests differ."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = run_daemon(Path(folder), requests, policy, size)
    blocks = sum(len(one.ids) for one in requests)
    print(
        f"{policy}, {run.blocks} blocks of memory, {run.disk_blocks} of disk: {len(requests)} "
        f"requests of {blocks} blocks in {time.monotonic() - begun_s:.0f} s"
    )
    again = simulate(requests, policy, size)
    from_log = simulate(translated(run.log, requests), policy, size)
    total = 0
    for name, hits, saves in (
        ("daemon", run.hits, run.saves),
        ("simulated", *again),
        ("its log", *from_log),
    ):
        memory, disk = (sum(tiers.count(tier) for tiers in hits) for tier in (HOST, DISK))
        told = list(differences(requests, run.hits, hits))
        print(f"  {name}: {memory} blocks from memory, {disk} from disk, {saves} blocks saved;"
              f" {len(told)} requests differ", *told[:10], sep="\n    ")  # fmt: skip
        total += len(told)
    sys.stdout.flush()
    return total


if __name__ == "__main__":
    sys.exit(main())
