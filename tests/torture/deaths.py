"""Clients that die with thousands of leases, one after the other, while another asks for the
daemon's health (field case P19).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import grpc

from tests.daemon import Daemon, _python_path
from tests.e2e.stage import ROOT
from tests.rawclient import RawAdmin, channel
from tests.torture.base import Job, Outcome
from tests.torture.watching import percentile

CLIENTS, LEASES = 4, 5_000
DEATH_EVERY_S = 0.2
FREED_S, HEALTH_S = 1.0, 0.1
"""What is promised; ten times of it is allowed here."""
SLACK = 10
START_S = 120.0


def deaths(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    """Everything of each is free soon after its death, and nobody else waits for that."""
    clients, leases = job.scale.of(CLIENTS, at_least=2), job.scale.of(LEASES, at_least=500)
    environ = {**os.environ, "PYTHONPATH": _python_path(os.environ)}
    holders = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.torture.holder",
                daemon.data_socket,
                f"h{n}",
                str(leases),
            ],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(clients)
    ]
    try:
        _kill_one_by_one(daemon, holders, clients * leases, outcome)
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    outcome.trials += clients * leases
    outcome.counts["leases_of_the_dead"] = clients * leases


def _kill_one_by_one(
    daemon: Daemon, holders: list[subprocess.Popen[str]], leases: int, outcome: Outcome
) -> None:
    for holder in holders:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            outcome.failed.append(f"a client with many leases ended with {holder.wait(START_S)}")
            return
    with RawAdmin(daemon.admin_socket) as admin:
        stats = admin.stats()
        before = int(stats.read_leases + stats.view_leases)
        # Those that were taken first may have run out on a machine that is slow.
        outcome.counts["leases_held_at_death"] = before
        if before < len(holders):
            outcome.failed.append(f"{before} of {leases} leases are held")
        asking = Asking(daemon)
        worst = 0.0
        try:
            left = len(holders)
            for holder in holders:
                holder.kill()
                left -= 1
                died = time.monotonic()
                while (seen := admin.stats()).sessions > left:
                    if time.monotonic() - died > FREED_S * SLACK:
                        outcome.failed.append(f"{seen.sessions} sessions, not {left}, long after")
                        return
                    time.sleep(0.005)
                worst = max(worst, time.monotonic() - died)
                time.sleep(max(0.0, DEATH_EVERY_S - (time.monotonic() - died)))
            stats = admin.stats()
            if stats.read_leases or stats.view_leases:
                outcome.failed.append(f"{stats.read_leases} leases of the dead are held")
        finally:
            asking.stop()
    outcome.counts["freed_after_death_ms"] = round(worst * 1e3)
    p99 = percentile(asking.seconds or [0.0], 99)
    outcome.counts["health_beside_deaths_p99_ms"] = round(p99 * 1e3)
    outcome.counts["health_beside_deaths_calls"] = len(asking.seconds)
    if not asking.seconds or p99 > HEALTH_S * SLACK or asking.failures:
        outcome.failed.append(f"health beside dying clients: p99 {p99:.2f} s, {asking.failures}")


class Asking:
    """Asks for the daemon's health over and over, in a thread of its own."""

    def __init__(self, daemon: Daemon) -> None:
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._wire = channel(daemon.data_socket)
        self._check: Any = self._wire.unary_unary("/grpc.health.v1.Health/Check")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health")
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            began = time.monotonic()
            try:
                self._check(b"", timeout=10.0)
            except grpc.RpcError as error:
                self.failures.append(str(error)[:200])
            self.seconds.append(time.monotonic() - began)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._wire.close()
