"""The standing rules of the field cases: no call is late, the daemon stays up, and afterwards
nobody holds anything and the bytes add up.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

from kvstore.model.layout import layout_of
from kvstore.wire import convert
from tests.daemon import Daemon
from tests.e2e.stage import assert_quiet, until
from tests.rawclient import RawAdmin

Value = TypeVar("Value")

FULL = os.environ.get("KVSTORE_FIELD_FULL", "") not in ("", "0")
LATE_S = 0.1
"""How far beyond its deadline a call may return."""
SLACK = 10
"""Against real processes on a machine that has other work, bounds are taken ten times."""
HEADER_BYTES = 1 << 16
"""Of a region's header pages, at most, in these tiny tiers."""


def rounds(short: int, full: int) -> int:
    """How often a case is tried: `full` times where KVSTORE_FIELD_FULL=1."""
    return full if FULL else short


class Punctual:
    """A client's space whose calls have to return by their deadline."""

    def __init__(self, space: Any, deadline_ms: int = 5_000) -> None:
        self._space = space
        self._deadline_ms = deadline_ms

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._space, name)
        if name not in ("explain", "fetch", "lookup", "push", "status"):
            return call

        def timed(*given: Any, deadline_ms: int = self._deadline_ms, **more: Any) -> Any:
            return in_time(lambda: call(*given, deadline_ms=deadline_ms, **more), deadline_ms)

        return timed


def in_time(call: Callable[[], Value], deadline_ms: int) -> Value:
    """What the call gives; it has to return by its deadline."""
    started = time.monotonic()
    value = call()
    late_s = time.monotonic() - started - deadline_ms / 1e3
    assert late_s < LATE_S * SLACK, f"{late_s:.3f} s beyond its deadline of {deadline_ms} ms"
    return value


def metrics(daemon: Daemon) -> dict[str, float]:
    """/metrics, `name{labels}` to value."""
    with urllib.request.urlopen(f"{daemon.http_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    split = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in split}


def total(daemon: Daemon, name: str) -> float:
    """A metric, summed over its labels."""
    found = metrics(daemon).items()
    return sum(value for key, value in found if key.partition("{")[0] == name)


def until_loaded(daemon: Daemon) -> None:
    """Waits until all of the disk tier can be seen."""
    until("the index is loaded", lambda: total(daemon, "kvstore_disk_loading") == 0)


QUEUES = ("kvstore_copies_in_flight", "kvstore_saves_in_flight", "kvstore_fd_connections")


def assert_standing_rules(daemon: Daemon, deadline_s: float = 15.0) -> None:
    """After a case: the daemon is up and had no defect, leases, reservations and queues are at 0,
    and what is used and what is free make the capacity.
    """
    assert daemon.alive, daemon.log()
    with RawAdmin(daemon.admin_socket) as admin:
        assert_quiet(admin, deadline_s=deadline_s)
        spaces = admin.call("Spaces").spaces
        for tier in admin.stats().tiers:
            assert tier.used_bytes <= tier.capacity_bytes, tier
    slots = [layout_of(convert.fingerprint_from_wire(one.fingerprint)).slot_bytes for one in spaces]
    if daemon.ready.get("http"):
        until("queues are empty", lambda: not _queued(daemon), deadline_s)
        until("free + used = capacity", lambda: _adds_up(daemon, max(slots, default=0)), deadline_s)
    log = daemon.log()
    assert "failed: a defect" not in log, log
    assert "Traceback" not in log, log


def _queued(daemon: Daemon) -> dict[str, float]:
    now = metrics(daemon)
    named = {name: now[name] for name in QUEUES}
    leases = {name: value for name, value in now.items() if name.startswith("kvstore_leases")}
    return {name: value for name, value in {**named, **leases}.items() if value}


def _adds_up(daemon: Daemon, slot_bytes: int) -> bool:
    """Regions in use and in stock are the capacity, but for less than one more region."""
    now = metrics(daemon)
    capacity_bytes = now['kvstore_tier_capacity_bytes{tier="host"}']
    used = now['kvstore_tier_used_bytes{tier="host"}']
    left = capacity_bytes - used - now["kvstore_host_stock_bytes"]
    return 0 <= left < max(capacity_bytes // 64, 4 * slot_bytes) + HEADER_BYTES
