"""Client processes that the end-to-end tests kill, stop and wake: `python -m tests.e2e.child VERB
...`.

A child says JSON lines on its standard output and waits for lines on its standard input; it ends,
with what it has forked, when that is closed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.testing.payload import Finding
from kvstore.wire import convert
from kvstore.wire.v1 import store_pb2 as pb
from tests.e2e.stage import Prompt, model
from tests.rawclient import RawClient, Refused, reason


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def heard() -> str:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return line.strip()


# ---------------------------------------------------------------- holding and dying


def hold(path: str, group: str, fork: str) -> None:
    """Takes leases of every kind and keeps them; with `fork` a child of its own keeps every socket
    and mapping open.
    """
    client = RawClient(path, group=group.encode())
    open_space = client.open(model()).space_id
    held_space = client.open(model(name=f"held-{group}", revision=None)).space_id
    prompt = Prompt(model(), seed=int.from_bytes(group.encode()[:4], "little"), blocks=24)
    assert client.put(open_space, prompt.keys[:16], prompt.rows()).visible == 16
    assert client.put(held_space, prompt.keys[:4], prompt.rows()).visible == 4
    copies = [client.acquire(open_space, prompt.keys[: 1 + n]).lease_id for n in range(16)]
    views = [client.acquire(open_space, prompt.keys[n : n + 2], view=True) for n in range(8)]
    rows = [row for view in views for row in client.copy(view)]
    assert all(copies)
    assert all(row is not None for row in rows)
    reserved = [
        client.reserve(open_space, prompt.keys[: 17 + n], first=16 + n).lease_id for n in range(8)
    ]
    assert all(reserved)
    forked = 0
    if fork == "fork":
        forked = os.fork()
        if not forked:
            sys.stdin.read()
            os._exit(0)
    say(held_space=held_space, space=open_space, forked=forked)
    while True:
        heard()


# ---------------------------------------------------------------- waking late


def late_reader(path: str, ttl_ms: str, seed: str) -> None:
    """Leases blocks, waits to be told (it is stopped meanwhile), and only then copies them."""
    with RawClient(path, group=b"late") as client:
        space = client.open(model()).space_id
        prompt = Prompt(model(), int(seed), blocks=16)
        leased = client.acquire(space, prompt.keys, ttl_ms=int(ttl_ms))
        for place in leased.places:
            client.region(place.region)
        say(leased=leased.blocks)
        heard()
        findings: Counter[str] = Counter()
        for index, row in enumerate(client.copy(leased)):
            right = row is not None and prompt.finding(index, row) is Finding.RIGHT
            findings["miss" if row is None else "right" if right else "wrong"] += 1
        released = client.release(leased.lease_id)
        say(findings=findings, unknown=released.unknown)
        heard()


def late_taker(path: str, ttl_ms: str, seed: str, blocks: str) -> None:
    """Reads blocks over the fd socket, and waits to be told within (it is stopped meanwhile)."""

    def meanwhile() -> None:
        say(begun=True)
        heard()

    with RawClient(path, group=b"late") as client:
        space = client.open(model()).space_id
        prompt = Prompt(model(), int(seed), blocks=int(blocks))
        rows = client.read(client.acquire(space, prompt.keys, ttl_ms=int(ttl_ms)), meanwhile)
        findings: Counter[str] = Counter()
        for index, row in enumerate(rows):
            right = row is not None and prompt.finding(index, row) is Finding.RIGHT
            findings["miss" if row is None else "right" if right else "wrong"] += 1
        say(findings=findings)
        heard()


def reader(path: str, seed: str, seconds: str) -> None:
    """Copies blocks row by row with a short lease, checks each and counts; it is stopped at random
    moments.
    """
    findings: Counter[str] = Counter()
    with RawClient(path, group=b"reader") as client:
        space = client.open(model()).space_id
        prompt = Prompt(model(), int(seed), blocks=16)
        say(ready=True)
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            client.unmap()
            leased = client.acquire(space, prompt.keys, ttl_ms=20)
            for index, place in enumerate(leased.places):
                if not place.region:
                    findings["absent"] += 1
                    continue
                mapped = client.region(place.region)
                source = mapped.slot(place.slot, leased.block_bytes)
                # In pieces, so that a stop often falls into the middle of a copy.
                row = np.concatenate([source[at : at + 512].copy() for at in range(0, 4096, 512)])
                if mapped.generation(place.slot) != place.generation:
                    findings["changed"] += 1
                elif prompt.finding(index, row, range(64)) is Finding.RIGHT:
                    findings["right"] += 1
                else:
                    findings["wrong"] += 1
            if leased.lease_id:
                client.release(leased.lease_id)
        say(findings=findings)
        heard()


def late_writer(path: str, ttl_ms: str, seed: str) -> None:
    """Reserves blocks, waits until told, writes them late and commits."""
    with RawClient(path, group=b"late-writer") as client:
        space = client.open(model()).space_id
        prompt = Prompt(model(), int(seed), blocks=8)
        # A block that it has published already: its staging range is written again below.
        first = Prompt(model(), int(seed) + 1, blocks=1)
        published = client.reserve(space, first.keys)
        client.fill(published, first.rows())
        client.commit(published.lease_id)
        reserved = client.reserve(space, prompt.keys, ttl_ms=int(ttl_ms))
        wanted = len(convert.unpack_u32(reserved.wanted))
        say(wanted=wanted)
        heard()
        client.fill(published, [np.full(4096, 0xEE, np.uint8)])
        client.fill(reserved, prompt.rows(version=66))
        try:
            done = reason(client.commit(reserved.lease_id).reason).name
        except Refused as refused:
            done = refused.reason.name
        # All of the staging, whatever it is used for.
        client.staging_map().memory.u8[:] = 0xEE
        say(commit=done)
        heard()


def rank_one(path: str, seed: str, attempt: str, commit: str) -> None:
    """The second rank of a write group: reserves, commits before or (told to) never, stays."""
    fingerprint = model(1 << 16, name="two-ranks", ranks=2)
    prompt = Prompt(fingerprint, int(seed), blocks=8)
    client = RawClient(path, group=b"rank")
    space = client.open(fingerprint).space_id
    reserved = client.reserve(space, prompt.keys, part=1, attempt=int(attempt))
    client.fill(reserved, [np.full(1 << 15, 1, np.uint8)] * 8)
    if commit == "after":
        client.commit(reserved.lease_id)
    say(wanted=len(reserved.wanted) // 4)
    heard()


def unrevised(path: str, seed: str) -> None:
    """An engine that does not know its weights' revision: puts what its weights (`seed`) make of a
    prompt, then gets on demand. Seed 0 puts nothing.
    """
    fingerprint = model(name="unrevised", revision=None)
    prompt = Prompt(fingerprint, 1, blocks=4)
    verdicts = {one: name.removeprefix("VERDICT_").lower() for name, one in pb.Verdict.items()}
    with RawClient(path, group=b"unrevised-" + seed.encode()) as client:
        opened = client.open(fingerprint)
        stored = 0
        if int(seed):
            rows = prompt.rows(version=int(seed))
            stored = client.put(opened.space_id, prompt.keys, rows).visible
        verdict = verdicts[opened.verdict]
        say(verdict=verdict, review_id=opened.review_id, stored=stored)
        while True:
            verb, *arguments = heard().split()
            if verb == "open":
                say(verdict=verdicts[client.open(fingerprint).verdict])
                continue
            try:
                rows_got = client.get(opened.space_id, prompt.keys)
            except Refused:
                rows_got = [None] * 4
            got = [(index, row) for index, row in enumerate(rows_got) if row is not None]
            version = [int(arguments[0])]
            right = sum(prompt.finding(i, row, version) is Finding.RIGHT for i, row in got)
            own = sum(prompt.finding(i, row, [int(seed)]) is Finding.RIGHT for i, row in got)
            say(right=right, wrong=len(got) - max(right, own))


def die_in_commit(path: str, seed: str, after_s: str) -> None:
    """Kills itself while its commit is under way."""
    fingerprint = model(1 << 16)
    prompt = Prompt(fingerprint, int(seed), blocks=32)
    client = RawClient(path, group=b"dies")
    reserved = client.reserve(client.open(fingerprint).space_id, prompt.keys)
    client.fill(reserved, prompt.rows())

    def die() -> None:
        time.sleep(float(after_s))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die).start()
    client.commit(reserved.lease_id)
    heard()


# ---------------------------------------------------------------- attacks on memory


def tamper(path: str, seed: str) -> None:
    """Tries to change a published block through the descriptor that it was given."""
    import mmap

    with RawClient(path, group=b"tamper") as client:
        space = client.open(model()).space_id
        prompt = Prompt(model(), int(seed), blocks=1)
        leased = client.acquire(space, prompt.keys)
        mapped = client.region(leased.places[0].region)
        at = mapped.info.data_offset + leased.places[0].slot * mapped.info.slot_bytes
        again = f"/proc/self/fd/{mapped.fd}"

        def map_writable(flags: int) -> None:
            fd = os.open(again, os.O_RDWR)
            mmap.mmap(fd, mapped.info.total_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)

        ways: dict[str, Callable[[], object]] = {
            "write": lambda: os.pwrite(mapped.fd, b"x" * 64, at),
            "truncate": lambda: os.ftruncate(mapped.fd, 4096),
            "map": lambda: mmap.mmap(
                mapped.fd, mapped.info.total_bytes, mmap.MAP_SHARED, mmap.PROT_WRITE
            ),
            "reopen and write": lambda: os.pwrite(os.open(again, os.O_RDWR), b"x" * 64, at),
            "reopen and truncate": lambda: os.ftruncate(os.open(again, os.O_RDWR), 4096),
            "reopen and grow": lambda: os.ftruncate(os.open(again, os.O_RDWR), 1 << 30),
            "reopen and map": lambda: map_writable(mmap.MAP_SHARED),
            "punch a hole": lambda: _punch(os.open(again, os.O_RDWR), at),
        }
        say(ways={name: _outcome(way) for name, way in ways.items()})
        heard()


def _punch(fd: int, at: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    if libc.fallocate(fd, 0x03, at, 4096):  # PUNCH_HOLE | KEEP_SIZE
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _outcome(way: Callable[[], object]) -> str:
    try:
        way()
    except (OSError, ValueError) as error:
        return type(error).__name__
    return "done"


# ---------------------------------------------------------------- the SDK


def sdk_roundtrip(path: str, verb: str, seed: str) -> None:
    """Puts or gets a prompt with the SDK, tells by which way, and stays until told to end."""
    from kvstore_client import Client, ClientConfig

    fingerprint = model(1 << 16)
    prompt = Prompt(fingerprint, int(seed), blocks=16)
    with Client(path, config=ClientConfig(deadline_ms=10_000)) as client:
        space = client.space(fingerprint)
        kind = client.connection().transport
        if verb == "put":
            pushed = space.push(prompt.keys, np.stack(prompt.rows()))
            say(stored=pushed.stored, reason=pushed.reason.name, kind=kind, mapped=_mapped())
        else:
            fetched = space.fetch(prompt.keys)
            rows = np.asarray(fetched.data)
            right = sum(
                prompt.finding(index, rows[index]) is Finding.RIGHT
                for index in range(fetched.blocks)
            )
            say(right=right, reason=fetched.reason.name, kind=kind, mapped=_mapped())
        heard()


def sdk_idle(path: str, seed: str) -> None:
    """Puts and gets 16 MiB with the SDK, then calls nothing until it is told to."""
    from kvstore_client import Client, ClientConfig

    fingerprint = model(1 << 16)
    prompt = Prompt(fingerprint, int(seed), blocks=256)
    rows = np.stack(prompt.rows())
    with Client(path, config=ClientConfig(deadline_ms=10_000)) as client:
        space = client.space(fingerprint)
        while True:
            space.push(prompt.keys, rows)
            fetched = space.fetch(prompt.keys)
            say(right=int((np.asarray(fetched.data)[: fetched.blocks] == rows).all(1).sum()))
            heard()


def _mapped() -> list[str]:
    """Names of the store's memory that is mapped here."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return [line.split(maxsplit=5)[5].strip() for line in maps if "memfd:kvstore" in line]


VERBS: dict[str, Callable[..., None]] = {
    "die_in_commit": die_in_commit,
    "hold": hold,
    "late_reader": late_reader,
    "late_taker": late_taker,
    "late_writer": late_writer,
    "rank": rank_one,
    "reader": reader,
    "sdk_idle": sdk_idle,
    "sdk_roundtrip": sdk_roundtrip,
    "tamper": tamper,
    "unrevised": unrevised,
}

if __name__ == "__main__":
    VERBS[sys.argv[1]](*sys.argv[2:])
