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
from tests.soak.watch import BOUNDS, Sample, climbs, sample, trend

CAPACITY = "192MiB"
DISK_CAPACITY = "256MiB"
"""Less than the prompts have, so that it is full; a few times what memory has."""
DISK_HOST_CAPACITY = "96MiB"
KILL_EVERY_S = 1.5
SAMPLE_EVERY_S = 0.5
DEAD_S = 8.0
"""Until as many dead clients are about as will be: the daemon keeps what is theirs for a while."""
FULL_SHARE = 0.9
"""Of the capacity, in use: what is less is not full."""
FILL_SHARE, WARM_UP_SHARE = 1 / 6, 1 / 3
"""Of the time. The first part goes on until all tiers are full, and nobody is killed in it."""
WARM_UP_MAX = 5
"""Times of the whole: what is not full by then will not be."""


@dataclass
class Soak:
    """What was seen. wrong: bytes; failed: everything else that had to hold."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    kills: int = 0
    samples: list[Sample] = field(default_factory=list)
    warm_at: int = 0

    @property
    def warm(self) -> list[Sample]:
        """Samples from the end of the warm-up on."""
        return self.samples[self.warm_at :]

    def trends(self) -> Iterator[str]:
        """In words, for a person."""
        rows = self.warm
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
    watch = _Watch(daemon, fleet, seen, said)
    try:
        fleet.start()
        watch.fill(seconds * FILL_SHARE, seconds * WARM_UP_MAX)
        watch.go_on(max(seconds * (WARM_UP_SHARE - FILL_SHARE), DEAD_S))
        seen.warm_at = len(seen.samples)
        watch.go_on(seconds * (1 - WARM_UP_SHARE))
    finally:
        fleet.stop()
        code = daemon.stop()
    seen.kills = fleet.kills
    if not seen.counts["blocks verified"]:
        seen.failed.append("nothing was verified")
    seen.failed += climbs(seen.warm)
    if code:
        seen.failed.append(f"the daemon ended with {code}")
    if "Traceback" in daemon.log():
        seen.failed.append(f"an error was logged: {daemon.log()[-1_000:]}")
    return seen


class _Watch:
    """Looks at a daemon and its clients while they work."""

    def __init__(
        self, daemon: Daemon, fleet: Fleet, seen: Soak, said: Callable[[Soak, Sample], None]
    ) -> None:
        self._daemon = daemon
        self._fleet = fleet
        self._seen = seen
        self._said = said
        path = daemon.settings.get("disk.path")
        self._disk = Path(path) if path else None
        self._started = self._killed = time.monotonic()

    def fill(self, seconds: float, most_s: float) -> None:
        """Until all tiers are full."""
        while (now_s := self._look()) < seconds or (found := _not_full(self._daemon)):
            if now_s > most_s:
                self._seen.failed += found
                break

    def go_on(self, seconds: float) -> None:
        """With clients that are killed."""
        until_s = time.monotonic() - self._started + seconds
        while self._look() < until_s:
            if time.monotonic() - self._killed > KILL_EVERY_S:
                self._killed = time.monotonic()
                self._fleet.kill_one()
                self._seen.kills = self._fleet.kills

    def _look(self) -> float:
        """Takes a sample; the time of it, since the start."""
        time.sleep(SAMPLE_EVERY_S)
        self._fleet.check_alive()
        now_s = time.monotonic() - self._started
        samples = self._seen.samples
        samples.append(sample(self._daemon.pid, self._disk, now_s))
        if len(samples) % 10 == 0:
            self._said(self._seen, samples[-1])
        return now_s


def _not_full(daemon: Daemon) -> list[str]:
    """Tiers that are not full yet."""
    with RawAdmin(daemon.admin_socket) as admin:
        tiers = admin.stats().tiers
    return [
        f"{tier.name} was not full: {tier.used_bytes} of {tier.capacity_bytes} bytes"
        for tier in tiers
        if tier.used_bytes < FULL_SHARE * tier.capacity_bytes or not tier.evictions
    ]
