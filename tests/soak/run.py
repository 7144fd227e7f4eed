"""One soak: a daemon that is kept full, clients that die and come back, and what it takes."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.daemon import Daemon
from tests.rawclient import RawAdmin
from tests.soak.fleet import Fleet
from tests.soak.watch import BOUNDS, WARM_UP_SHARE, Sample, climbs, sample, trend

CAPACITY = "192MiB"
DISK_CAPACITY = "256MiB"
"""Less than the prompts have, so that it is full; a few times what memory has."""
DISK_HOST_CAPACITY = "96MiB"
KILL_EVERY_S = 1.5
SAMPLE_EVERY_S = 0.5
FULL_SHARE = 0.9
"""Of the capacity, in use at the end: what is less was not full."""


@dataclass
class Soak:
    """What was seen. wrong: bytes; failed: everything else that had to hold."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    kills: int = 0
    samples: list[Sample] = field(default_factory=list)

    def trends(self) -> Iterator[str]:
        """In words, for a person."""
        rows = self.samples[int(len(self.samples) * WARM_UP_SHARE) :]
        for bound in BOUNDS:
            slope, growth = trend(rows, bound.name)
            last = getattr(rows[-1], bound.name) if rows else 0
            yield f"{bound.name} {last:.1f}, {slope:+.2f}/min, {growth:+.1f} in all"


def soak(
    daemon: Daemon,
    seconds: float,
    rng: random.Random,
    *,
    traffic: str = "zipf",
    said: Callable[[Soak, Sample], None] = lambda soak, now: None,
) -> Soak:
    """Soaks a daemon that was started, and stops it. said: called now and then."""
    seen = Soak()
    fleet = Fleet(f"unix:{daemon.data_socket}", rng, traffic, seen.counts, seen.wrong, seen.failed)
    try:
        fleet.start()
        _watch(daemon, fleet, seconds, seen, said)
        seen.failed += _not_full(daemon)
    finally:
        fleet.stop()
        code = daemon.stop()
    seen.kills = fleet.kills
    if not seen.counts["blocks verified"]:
        seen.failed.append("nothing was verified")
    seen.failed += climbs(seen.samples)
    if code:
        seen.failed.append(f"the daemon ended with {code}")
    if "Traceback" in daemon.log():
        seen.failed.append(f"an error was logged: {daemon.log()[-1_000:]}")
    return seen


def _watch(
    daemon: Daemon,
    fleet: Fleet,
    seconds: float,
    seen: Soak,
    said: Callable[[Soak, Sample], None],
) -> None:
    path = daemon.settings.get("disk.path")
    disk = Path(path) if path else None
    started = killed = time.monotonic()
    while (now := time.monotonic()) - started < seconds:
        if now - killed > KILL_EVERY_S:
            killed = now
            fleet.kill_one()
            seen.kills = fleet.kills
        fleet.check_alive()
        seen.samples.append(sample(daemon.pid, disk, now - started))
        if len(seen.samples) % 10 == 0:
            said(seen, seen.samples[-1])
        time.sleep(SAMPLE_EVERY_S)


def _not_full(daemon: Daemon) -> list[str]:
    """Tiers that were not filled: then nothing was shown."""
    with RawAdmin(daemon.admin_socket) as admin:
        tiers = admin.stats().tiers
    return [
        f"{tier.name} was not full: {tier.used_bytes} of {tier.capacity_bytes} bytes"
        for tier in tiers
        if tier.used_bytes < FULL_SHARE * tier.capacity_bytes or not tier.evictions
    ]
