"""Malformed input at every way in: the daemon lives, stays flat, and serves who behaves.

Raw connections first (data socket, fd socket, admin socket, HTTP port), among them slow ones that
send a byte now and then; then messages that gRPC accepts and the daemon must refuse by a typed
error: see `bad_messages`. Meanwhile a well-behaved client puts, gets and verifies.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.daemon import Daemon
from tests.rawclient import channel
from tests.torture import bad_bytes
from tests.torture.bad_messages import BadMessages
from tests.torture.base import Job, Outcome
from tests.torture.daemons import daemon_of
from tests.torture.watching import (
    START_S,
    Footprint,
    GoodClient,
    check_alive,
    check_quiet,
    http,
    metrics,
    total,
)

CONNECTIONS = 100_000
MESSAGES = 20_000
CAPACITY = "64MiB"
GROWTH_MAX = 20 << 20
LATE_GROWTH_MAX = 6 << 20
LOG_MAX = 64 << 10
WARM_UP = 0.1
"""Of the connections and messages, before the footprint is taken."""
SAMPLES = 30

IN_FLIGHT = {"data": 24, "admin": 16, "fd": 12, "http": 6}
"""Connections of a way in that are open at a time; the fd socket lets 64 wait, HTTP serves 16."""
SHARES = {"data": 55, "admin": 24, "fd": 15, "http": 6}
MAKERS = {
    "data": bad_bytes.HTTP2,
    "admin": bad_bytes.HTTP2,
    "fd": bad_bytes.FD,
    "http": bad_bytes.HTTP1,
}
SOCKET_S = 5.0
PACE = 100
"""Connections after which it waits for the daemon."""
SLOW = 4
"""Connections of each way in that send a byte now and then."""
SLOW_EVERY_S = 0.2
SLOW_S_MAX = 15.0
"""Handshakes and whole HTTP requests have 5 s; nobody may dribble for longer than this."""
HEALTH_EVERY_S = 0.5

SLOW_BYTES = {
    "data": bad_bytes.OPENING,
    "admin": bad_bytes.OPENING,
    "fd": b"\x20\x00\x00\x00" + bytes(32),
    "http": b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 4_096,
}


class Malformed:
    """F1."""

    name = "malformed"
    what = "garbage, half requests and bad messages at every way in, beside a client that behaves"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        daemon = daemon_of(job, job.folder, host__capacity_bytes=CAPACITY, trace__ring_records=256)
        with daemon.start(START_S):
            good = GoodClient(daemon, outcome, seed=job.rng.randrange(1 << 20))
            with good, SlowPeers(daemon, outcome):
                _connections(job, daemon, outcome)
                if not job.enough(outcome):
                    _messages(job, daemon, outcome)
            if len(daemon.log()) > LOG_MAX:
                outcome.failed.append(f"strangers wrote {len(daemon.log())} characters of log")
            if check_alive(daemon, outcome, "malformed input"):
                _counters(daemon, outcome)
                check_quiet(daemon, outcome, "malformed input")
        return outcome


def _connections(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    count = job.scale.of(CONNECTIONS, at_least=1_000)
    attack = Attack(daemon, job.rng)
    try:
        attack.throw(round(count * WARM_UP))
        footprint = Footprint(daemon)
        step = max(1, round(count * (1 - WARM_UP)) // SAMPLES)
        while attack.thrown < count and daemon.alive and not job.enough(outcome):
            attack.throw(min(step, count - attack.thrown))
            footprint.sample()
            job.progress(attack.thrown, count, outcome)
    finally:
        attack.close()
    outcome.trials += attack.thrown
    outcome.counts.update({f"thrown_{way}": n for way, n in attack.by_way.items()})
    outcome.counts["kinds_of_connections"] = len(attack.by_kind)
    outcome.counts["connections_refused"] = attack.refused
    if daemon.alive:
        footprint.check(outcome, GROWTH_MAX, LATE_GROWTH_MAX, files_more=16)


def _messages(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    count = job.scale.of(MESSAGES, at_least=1_000)
    with BadMessages(daemon, job.rng, outcome) as messages:
        messages.boundaries()
        messages.send(round(count * WARM_UP))
        messages.large()
        footprint = Footprint(daemon)
        step = max(1, round(count * (1 - WARM_UP)) // SAMPLES)
        while messages.sent < count and daemon.alive and not job.enough(outcome):
            messages.send(min(step, count - messages.sent))
            footprint.sample()
            job.progress(messages.sent, count, outcome)
        messages.large()
    outcome.trials += messages.sent
    outcome.counts["bad_messages"] = messages.sent
    outcome.counts.update({f"answered_{name}": n for name, n in messages.answers.items()})
    if daemon.alive:
        footprint.check(outcome, GROWTH_MAX, LATE_GROWTH_MAX, files_more=16)


def _counters(daemon: Daemon, outcome: Outcome) -> None:
    """What was refused is counted; when all have gone nobody holds anything."""
    seen = metrics(daemon)
    for name, *labels in (
        ("kvstore_requests_total", 'reason="BAD_REQUEST"'),
        ("kvstore_requests_total", 'reason="BAD_KEY_LENGTH"'),
        ("kvstore_requests_total", 'reason="SESSION_UNKNOWN"'),
        ("kvstore_requests_total", 'op="admin_pin"', 'reason="BAD_REQUEST"'),
        ("kvstore_fd_events_total", 'event="accepted"'),
        ("kvstore_fd_events_total", 'event="closed_protocol"'),
        ("kvstore_fd_events_total", 'event="denied"'),
        ("kvstore_fd_events_total", 'event="closed_handshake_late"'),
        ("kvstore_http_connections_total", 'event="accepted"'),
        ("kvstore_http_connections_total", 'event="cut"'),
    ):
        if not total(seen, name, *labels):
            outcome.failed.append(f"{name} of {', '.join(labels)} did not move")


@dataclass
class Slow:
    """A connection that sends a byte now and then."""

    way: str
    sock: socket.socket
    began: float = field(default_factory=time.monotonic)
    sent: int = 0
    cut_s: float = 0.0

    def dribble(self) -> None:
        """The next byte, if its peer still takes it."""
        data = SLOW_BYTES[self.way]
        try:
            self.sock.send(data[self.sent % len(data) :][:1])
            self.sent += 1
            if self.sock.recv(4_096) == b"":
                self.cut_s = time.monotonic() - self.began
        except BlockingIOError:
            pass
        except OSError:
            self.cut_s = time.monotonic() - self.began


class Attack:
    """Opens connections, writes what `bad_bytes` makes, and leaves a few open for a while."""

    def __init__(self, daemon: Daemon, rng: random.Random) -> None:
        self.daemon = daemon
        self.rng = rng
        self.thrown = 0
        self.refused = 0
        self.by_way: Counter[str] = Counter()
        self.by_kind: Counter[str] = Counter()
        self._open: dict[str, deque[socket.socket]] = {way: deque() for way in SHARES}
        self._wires = [channel(daemon.data_socket), channel(daemon.admin_socket)]
        self._checks: list[Any] = [
            wire.unary_unary("/grpc.health.v1.Health/Check") for wire in self._wires
        ]
        self._null = os.open(os.devnull, os.O_RDONLY)

    def throw(self, count: int) -> None:
        """So many connections."""
        ways = self.rng.choices(list(SHARES), list(SHARES.values()), k=count)
        for index, way in enumerate(ways):
            self._throw(way)
            if index % PACE == PACE - 1:
                self._pace()

    def _pace(self) -> None:
        """Waits until the daemon has taken what was thrown: what is asked for here is malformed
        input, not a flood, of which gRPC sheds a part of everybody's calls.
        """
        for call in self._checks:
            with contextlib.suppress(grpc.RpcError):
                call(b"", timeout=SOCKET_S)

    def _throw(self, way: str) -> None:
        self.thrown += 1
        self.by_way[way] += 1
        bad = bad_bytes.make(MAKERS[way], self.rng)
        self.by_kind[bad.kind] += 1
        opened = self._open[way]
        if len(opened) >= IN_FLIGHT[way]:
            opened.popleft().close()
        sock = connect(self.daemon, way)
        if sock is None:
            self.refused += 1
            return
        with contextlib.suppress(OSError):  # cut off, as it should be
            if bad.descriptors and bad.data:
                socket.send_fds(sock, [bad.data], [self._null] * bad.descriptors)
            else:
                sock.sendall(bad.data)
            if self.rng.random() < 0.2:
                sock.shutdown(socket.SHUT_WR)
            if self.rng.random() < 0.2:
                sock.setblocking(False)
                sock.recv(100)
        if self.rng.random() < 0.3:
            sock.close()
        else:
            opened.append(sock)

    def close(self) -> None:
        for opened in self._open.values():
            for sock in opened:
                sock.close()
        for wire in self._wires:
            wire.close()
        os.close(self._null)


class SlowPeers:
    """Some on each way in that dribble, in a thread of its own, which also asks for the health that
    a supervisor would act on.
    """

    def __init__(self, daemon: Daemon, outcome: Outcome) -> None:
        self._daemon = daemon
        self._outcome = outcome
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slow-peers")
        self._slow: list[Slow] = []
        self._began = time.monotonic()

    def __enter__(self) -> SlowPeers:
        for way in SHARES:
            for _ in range(SLOW):
                sock = connect(self._daemon, way)
                if sock is None:
                    self._outcome.failed.append(f"a slow {way} peer could not connect")
                    continue
                sock.setblocking(False)
                self._slow.append(Slow(way, sock))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Each was cut, or is by the end of its time."""
        end = self._began + SLOW_S_MAX + 1.0
        while (
            self._daemon.alive and time.monotonic() < end and any(not s.cut_s for s in self._slow)
        ):
            time.sleep(0.05)
        self._stop.set()
        self._thread.join()
        for slow in self._slow:
            slow.sock.close()
        if not self._daemon.alive:
            return
        for way in SHARES:
            cuts = [slow.cut_s for slow in self._slow if slow.way == way]
            late = [cut for cut in cuts if not 0 < cut <= SLOW_S_MAX]
            self._outcome.counts[f"slow_cut_after_ms_{way}"] = round(max(cuts, default=0) * 1e3)
            if late:
                self._outcome.failed.append(f"{len(late)} of {len(cuts)} slow {way} peers: not cut")

    def _run(self) -> None:
        asked = 0.0
        while not self._stop.wait(SLOW_EVERY_S):
            for slow in self._slow:
                if not slow.cut_s:
                    slow.dribble()
            if time.monotonic() - asked >= HEALTH_EVERY_S:
                asked = time.monotonic()
                self._ask()

    def _ask(self) -> None:
        # Twice: the port serves few at a time, and the youngest push the oldest out.
        answers = [http(self._daemon, "/healthz") for _ in range(2)]
        self._outcome.counts["health_calls"] += 1
        if all(status != 200 for status, _ in answers) and self._daemon.alive:
            self._outcome.failed.append(f"/healthz beside malformed input: {answers}")


def connect(daemon: Daemon, way: str) -> socket.socket | None:
    """A connection by a way in; None if it was refused."""
    sock = socket.socket(socket.AF_INET if way == "http" else socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(SOCKET_S)
    host, port = daemon.ready["http"].rsplit(":", 1)
    paths = {"data": daemon.data_socket, "admin": daemon.admin_socket}
    paths["fd"] = f"{daemon.data_socket}.fd"
    end = time.monotonic() + SOCKET_S
    while True:
        try:
            sock.connect((host, int(port)) if way == "http" else paths[way])
            return sock
        except BlockingIOError:  # the backlog of a unix socket is full
            if time.monotonic() < end:
                time.sleep(0.001)
                continue
        except OSError:
            pass
        sock.close()
        return None
