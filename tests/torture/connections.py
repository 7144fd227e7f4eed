"""Connections in numbers, and clients that do not behave: they stop reading, freeze while they hold
leases, fork, or die with thousands of them; a daemon without descriptors; a daemon that is frozen.

After each part nobody holds anything, and free + used = capacity.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvstore.model.reasons import Reason
from kvstore.testing.payload import Finding
from kvstore.wire.v1 import fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon, _python_path
from tests.e2e.stage import ROOT, Child, Prompt, held, model, open_files, resident_bytes
from tests.rawclient import CALL_S, RawAdmin, RawClient, Refused, channel, reason, send
from tests.torture.bad_bytes import OPENING
from tests.torture.base import Job, Outcome
from tests.torture.daemons import daemon_of
from tests.torture.deaths import deaths
from tests.torture.freezes import frozen_clients, frozen_daemon, lost_leases
from tests.torture.watching import (
    START_S,
    check_alive,
    check_quiet,
    check_rows,
    descriptors,
    http,
    metrics,
    percentile,
    total,
    until,
)

IDLE, BUSY = 3_000, 500
CALLS_EACH = 4
THREADS = 8
SPARE_FILES = 600
CALLS_MAX = 16
SLOW_READERS = 16
SLOW_TTL_MS = 1_500
SLOW_MEMORY_MAX = 10 << 20
"""What a stream that nobody reads may hold: two messages of 2 MiB, and gRPC's buffers."""
FORKS = 2
FEW_FILES = 64


class Connections:
    """H."""

    name = "connections"
    what = "3,500 connections, no descriptors, slow, frozen, forked and dying clients, lost leases"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        parts: tuple[tuple[str, Callable[[Job, Daemon, Outcome], None], dict[str, Any]], ...] = (
            (
                "a crowd",
                crowd,
                {"limits__sessions_max": BUSY + 64, "host__staging_bytes": "256KiB"},
            ),
            ("too many calls", too_many_calls, {"limits__concurrent_calls_max": CALLS_MAX}),
            ("slow readers", slow_readers, {"limits__lease_ttl_ms": SLOW_TTL_MS}),
            ("frozen clients", frozen_clients, {"host__capacity_bytes": "8MiB"}),
            ("forks", forks, {}),
            ("deaths", deaths, {}),
            ("lost leases", lost_leases, {}),
            ("a frozen daemon", frozen_daemon, {}),
            ("no descriptors", no_descriptors, {"host__capacity_bytes": "8MiB"}),
        )
        # Where all blocks have one size, slots are counted, too.
        one_size = (frozen_clients, deaths, lost_leases, frozen_daemon)
        for number, (name, part, settings) in enumerate(parts):
            folder = job.folder / str(number)
            folder.mkdir()
            prefix = ("prlimit", f"--nofile={FEW_FILES}:{FEW_FILES}")
            few = part is no_descriptors
            daemon = daemon_of(
                job,
                folder,
                argv_prefix=prefix if few else (),
                **{"trace__ring_records": 256, **settings},
            )
            began = time.monotonic()
            with daemon.start(START_S):
                try:
                    part(job, daemon, outcome)
                except (Refused, OSError, AssertionError, grpc.RpcError) as error:
                    outcome.failed.append(f"{name}: {type(error).__name__}: {error}")
                if check_alive(daemon, outcome, name):
                    check_quiet(
                        daemon, outcome, name, slot_bytes=4_096 if part in one_size else None
                    )
            outcome.counts[f"{name.replace(' ', '_')}_s"] = round(time.monotonic() - began)
            job.progress(number + 1, len(parts), outcome)
            if job.enough(outcome):
                break
        return outcome


# ---------------------------------------------------------------- a crowd


def crowd(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    """Thousands of connections that do nothing, hundreds that put and get at once."""
    idle, busy = job.scale.of(IDLE, at_least=200), job.scale.of(BUSY, at_least=40)
    idle = _within_limit(idle, busy, outcome)
    files = descriptors(daemon.pid)
    with contextlib.ExitStack() as stack:
        _idle(stack, daemon, idle, outcome)
        clients = _attached(stack, daemon, busy)
        if len(clients) < busy:
            outcome.failed.append(f"{busy - len(clients)} of {busy} clients could not attach")
        seen = metrics(daemon)
        for name in ("kvstore_sessions", "kvstore_fd_connections"):
            if total(seen, name) != len(clients):
                outcome.failed.append(f"{name} is {total(seen, name):g}, not {len(clients)}")
        _all_busy(clients, outcome)
        outcome.trials += idle + busy
    _until_closed(daemon, files + 16, outcome)


def _within_limit(idle: int, busy: int, outcome: Outcome) -> int:
    """As many idle ones as this process may open; it raises its own limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = idle + 6 * busy + SPARE_FILES
    if soft < min(wanted, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    if hard < wanted:
        less = max(0, hard - 6 * busy - SPARE_FILES)
        outcome.skipped = f"{idle - less} of {idle} idle connections: RLIMIT_NOFILE is {hard}"
        return less
    return idle


def _idle(stack: contextlib.ExitStack, daemon: Daemon, count: int, outcome: Outcome) -> None:
    """Connections that have shaken hands and say no more; each was answered."""
    opened = []
    for _ in range(count):
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.settimeout(10.0)
        opened.append(sock)
        try:
            sock.connect(daemon.data_socket)
        except BlockingIOError:  # the backlog is full
            time.sleep(0.05)
            sock.connect(daemon.data_socket)
        sock.sendall(OPENING)
    silent = 0
    for sock in opened:
        with contextlib.suppress(TimeoutError):
            if sock.recv(64):
                continue
        silent += 1
    outcome.counts["idle_connections"] = count
    if silent:
        outcome.failed.append(f"{silent} of {count} idle connections were not answered")


def _attached(stack: contextlib.ExitStack, daemon: Daemon, count: int) -> list[RawClient]:
    clients = []
    for number in range(count):
        with contextlib.suppress(Refused):
            client = RawClient(daemon.data_socket, group=b"busy-%d" % number)
            clients.append(stack.enter_context(client))
    return clients


def _all_busy(clients: list[RawClient], outcome: Outcome) -> None:
    """Each gets what the first one put, over and over, and some put what is their own."""
    prompt = Prompt(model(), 1, blocks=4)
    first = clients[0]
    first.put(first.open(model()).space_id, prompt.keys, prompt.rows())
    seconds: list[float] = []

    def work(number: int) -> None:
        client = clients[number]
        space = client.open(model()).space_id
        for _ in range(CALLS_EACH):
            began = time.monotonic()
            rows = client.get(space, prompt.keys)
            seconds.append(time.monotonic() - began)
            there = [row for row in rows if row is not None]
            if len(there) < len(rows):
                outcome.failed.append(f"client {number} of {len(clients)} found {len(there)} of 4")
            check_rows(outcome, prompt, there, f"client {number}")
        if number % 10 == 0:
            own = Prompt(model(), 1_000 + number, blocks=2)
            client.put(space, own.keys, own.rows(), patience_s=20.0)
            check_rows(
                outcome, own, [r for r in client.get(space, own.keys) if r is not None], "own"
            )

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, number) for number in range(len(clients))]:
            try:
                done.result()
            except (Refused, OSError, AssertionError) as error:
                outcome.failed.append(f"a busy client: {type(error).__name__}: {error}")
    outcome.counts["busy_clients"] = len(clients)
    outcome.counts["busy_call_p99_ms"] = round(percentile(seconds or [0.0], 99) * 1e3)


def _until_closed(daemon: Daemon, files: int, outcome: Outcome) -> None:
    if not until(lambda: descriptors(daemon.pid) <= files, 15.0):
        outcome.failed.append(f"{descriptors(daemon.pid)} descriptors are open, not {files}")


def too_many_calls(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    """Calls beyond the bound are refused at once, with the setting; those within it are served."""
    prompt = Prompt(model(), 2, blocks=2)
    with RawClient(daemon.data_socket) as client, RawClient(daemon.data_socket) as waiter:
        space = client.open(model()).space_id
        reserved = client.reserve(space, prompt.keys)
        request = pb.AcquireRequest(
            session=waiter.secret,
            space_id=waiter.open(model()).space_id,
            keys=b"".join(prompt.keys),
            wait_ms=20_000,
        )
        calls = [waiter.stub.Acquire.future(request, timeout=CALL_S) for _ in range(3 * CALLS_MAX)]
        refused = 0

        def most_are_refused() -> bool:
            nonlocal refused
            refused = sum(call.done() for call in calls)
            return refused >= 2 * CALLS_MAX

        if not until(most_are_refused, 10.0):
            outcome.failed.append(f"{refused} of {len(calls)} calls were refused, not two thirds")
        for call in [call for call in calls if not call.done()][:2]:
            call.cancel()  # the bound is that of everybody on this socket: room for the commit
        client.fill(reserved, prompt.rows())

        def committed() -> bool:
            with contextlib.suppress(Refused):
                return client.commit(reserved.lease_id).visible == 2
            return False

        if not until(committed, 10.0):
            outcome.failed.append("there is no room for a commit although calls have ended")
        why = Counter(_outcome_of(call) for call in calls)
    outcome.trials += len(calls)
    outcome.counts["calls_refused_beyond_the_bound"] = why[Reason.LIMIT_QUEUE.name]
    others = set(why) - {Reason.OK.name, Reason.CANCELLED.name, Reason.LIMIT_QUEUE.name}
    if why[Reason.LIMIT_QUEUE.name] < 2 * CALLS_MAX or others or not why[Reason.OK.name]:
        outcome.failed.append(f"too many calls: {dict(why)}")


def _outcome_of(call: Any) -> str:
    try:
        return reason(call.result().reason).name
    except grpc.FutureCancelledError:
        return Reason.CANCELLED.name
    except grpc.RpcError as error:
        return Refused(error).reason.name


# ---------------------------------------------------------------- slow readers


def slow_readers(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    """Streams that stop reading hold bounded memory, and no block for longer than a lease."""
    count = job.scale.of(SLOW_READERS, at_least=3)
    large = model(1 << 20, name="large")
    prompt = Prompt(large, 3, blocks=8)
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(large).space_id
        client.put(space, prompt.keys, prompt.rows())
        before = resident_bytes(daemon.pid)
        request = pb.FetchRequest(session=client.secret, space_id=space, keys=b"".join(prompt.keys))
        with contextlib.ExitStack() as stack:
            streams = []
            for _ in range(count):
                wire = stack.enter_context(channel(daemon.data_socket))
                fetch: Any = wire.unary_stream(
                    "/kvstore.v1.Store/Fetch", pb.FetchRequest.SerializeToString
                )
                streams.append(fetch(request))
                next(streams[-1])
            grown = max(resident_bytes(daemon.pid) - before, 0)
            outcome.counts["slow_readers"] = count
            outcome.counts["slow_reader_KiB_each"] = grown // count >> 10
            if grown > count * SLOW_MEMORY_MAX:
                outcome.failed.append(f"{count} slow readers took {grown >> 20} MiB")
            began = time.monotonic()
            if not until(lambda: not admin.stats().read_leases, 10 * SLOW_TTL_MS / 1e3):
                outcome.failed.append(f"slow readers hold {admin.stats().read_leases} leases")
            outcome.counts["slow_readers_free_after_ms"] = round((time.monotonic() - began) * 1e3)
            for stream in streams:
                if _read_on(stream) not in (grpc.StatusCode.DEADLINE_EXCEEDED, None):
                    outcome.failed.append(f"a slow reader was told {stream.code()}")
        outcome.trials += count
        rows = client.get(space, prompt.keys)
        there = [row for row in rows if row is not None]
        if len(there) < len(rows):
            outcome.failed.append(f"{len(rows) - len(there)} blocks went because of slow readers")
        check_rows(outcome, prompt, there, "after slow readers")
    _slow_on_the_fd_socket(daemon, outcome)


def _read_on(stream: Any) -> grpc.StatusCode | None:
    """How a stream ends; None if it comes to its end after all."""
    try:
        for _ in stream:
            pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None


def _slow_on_the_fd_socket(daemon: Daemon, outcome: Outcome) -> None:
    """Who asks for memory and does not read the answers is cut."""
    client = RawClient(daemon.data_socket, group=b"slow-fd")
    space = client.open(model()).space_id
    prompt = Prompt(model(), 4, blocks=1)
    client.put(space, prompt.keys, prompt.rows())
    region = client.acquire(space, prompt.keys).places[0].region
    request = fd_pb2.FdRequest(seq=1, get_region=fd_pb2.GetRegion(region_id=region))
    frame = request.SerializeToString()
    sock = client.the_fd().sock
    with contextlib.suppress(OSError):
        for _ in range(20_000):
            send(sock, frame)
    if not until(
        lambda: total(metrics(daemon), "kvstore_fd_events_total", 'event="closed_slow"') > 0, 10.0
    ):
        outcome.failed.append("a client that reads no answers on the fd socket was not cut")
    # Its process lives, so that its memory counts as mapped until it says so.
    given = [region, client.staging_map().info.region_id]
    client.close()
    with RawClient(daemon.data_socket, group=b"slow-fd") as heir:
        for region_id in given:
            heir.the_fd().unmapped(region_id)


# ---------------------------------------------------------------- forks


def forks(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    """Forked children work with the same objects; a child keeps no dead parent's leases alive."""
    for turn in range(job.scale.of(FORKS)):
        path = daemon.data_socket
        argv = [sys.executable, "-m", "tests.integration.sdk_child", "fork", path]
        environ = {**os.environ, "PYTHONPATH": _python_path(os.environ)}
        done = subprocess.run(
            argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            outcome.failed.append(f"a forking client ended with {done.returncode}: {done.stderr}")
            continue
        said = json.loads(done.stdout)
        for child in said["children"]:
            outcome.trials += 1
            if child.get("right") is False and child.get("blocks"):
                outcome.wrong.append(f"a forked child got other bytes: {child}")
            elif child.get("blocks") != 8 or child.get("pushed") != 2:
                outcome.failed.append(f"a forked child: {child}")
        if said["parent"] != 8 or not said["same_session"] or not said["view_valid"]:
            outcome.failed.append(f"the parent of forked children: {said}")
        with (
            Child("hold", path, f"f{turn}", "fork") as child,
            RawAdmin(daemon.admin_socket) as admin,
        ):
            forked = child.hear()["forked"]
            child.kill()
            if not until(lambda: not held(admin.stats()), 10.0):
                outcome.failed.append(f"a forked child keeps {held(admin.stats())} of the dead")
            if not Path(f"/proc/{forked}").exists():
                outcome.failed.append("the forked child went with its parent: nothing was tried")
            admin.call("Invalidate", everything=True, why="the next one puts the same")
    outcome.counts["forking_clients"] = job.scale.of(FORKS)


# ---------------------------------------------------------------- no descriptors


def no_descriptors(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    """With 64 descriptors: who is there is served, others are refused by their deadline, and let in
    when there is room.
    """
    prompt = Prompt(model(), 5, blocks=8)
    with RawClient(daemon.data_socket) as old, RawAdmin(daemon.admin_socket) as admin:
        space = old.open(model()).space_id
        old.put(space, prompt.keys, prompt.rows())
        admin.stats()
        before = descriptors(daemon.pid)
        with _all_taken(daemon) as crowd_of:
            outcome.counts["descriptors_taken"] = open_files(daemon.pid)
            if open_files(daemon.pid) < FEW_FILES - 2:
                outcome.failed.append(f"only {open_files(daemon.pid)} descriptors are taken")
            _served(old, space, prompt, outcome)
            _refused(daemon, outcome)
            spent = _cpu_s(daemon.pid)
            time.sleep(1.0)
            busy_ms = round((_cpu_s(daemon.pid) - spent) * 1e3)
            outcome.counts["cpu_ms_a_second_without_descriptors"] = busy_ms
            if busy_ms > 700:
                outcome.failed.append(
                    f"without descriptors the daemon spins: {busy_ms} ms a second"
                )
            _served(old, space, prompt, outcome)
            admin.stats()
            outcome.trials += len(crowd_of)
        _until_closed(daemon, before + 2, outcome)
        began = time.monotonic()
        if not until(lambda: _works(daemon, prompt), 20.0):
            outcome.failed.append("nobody is let in although descriptors are free again")
        outcome.counts["let_in_after_ms"] = round((time.monotonic() - began) * 1e3)
        if http(daemon, "/healthz")[0] != 200:
            outcome.failed.append("/healthz does not answer although descriptors are free again")


@contextlib.contextmanager
def _all_taken(daemon: Daemon) -> Iterator[list[socket.socket]]:
    """Connections until the daemon has no descriptor left."""
    with contextlib.ExitStack() as stack:
        taken = []
        for _ in range(FEW_FILES):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.settimeout(1.0)
            with contextlib.suppress(OSError):
                sock.connect(daemon.data_socket)
                sock.sendall(OPENING)
                taken.append(sock)
        until(lambda: open_files(daemon.pid) >= FEW_FILES - 1, 5.0)
        yield taken


def _served(old: RawClient, space: int, prompt: Prompt, outcome: Outcome) -> None:
    """A client that was there before gets and puts."""
    rows = old.get(space, prompt.keys)
    check_rows(outcome, prompt, [row for row in rows if row is not None], "without descriptors")
    if any(row is None for row in rows):
        outcome.failed.append("without descriptors an old client misses")
    own = Prompt(model(), int(time.monotonic_ns()) % (1 << 30), blocks=2)
    stored = old.put(space, own.keys, own.rows())
    if stored.visible != 2:
        outcome.failed.append(f"without descriptors a put ends with {reason(stored.reason).name}")
    # Blocks of another size want a new region; a refusal is an answer.
    other = Prompt(model(1 << 14, name="new"), 6, blocks=1)
    with contextlib.suppress(Refused):
        old.put(old.open(other.fingerprint).space_id, other.keys, other.rows(), patience_s=0)


def _refused(daemon: Daemon, outcome: Outcome) -> None:
    """A new client's call is a miss by its deadline."""
    config = ClientConfig(deadline_ms=300, connect_timeout_ms=300)
    with Client(daemon.data_socket, config=config) as client:
        began = time.monotonic()
        hit = client.space(model()).lookup([bytes(32)])
        took = time.monotonic() - began
    outcome.counts["refused_after_ms"] = round(took * 1e3)
    if hit.blocks or took > 0.3 + 1.0:
        outcome.failed.append(f"without descriptors a new client waits {took:.1f} s: {hit.reason}")


def _works(daemon: Daemon, prompt: Prompt) -> bool:
    with Client(daemon.data_socket, config=ClientConfig(deadline_ms=2_000)) as client:
        fetched = client.space(model()).fetch(prompt.keys)
        rows = np.asarray(fetched.data)[: fetched.blocks]
        right = [prompt.finding(i, row) is Finding.RIGHT for i, row in enumerate(rows)]
        return fetched.reason is Reason.OK and len(right) == 8 and all(right)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
