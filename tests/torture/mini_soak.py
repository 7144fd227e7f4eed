"""Stage J: a minute at 100 % full, memory and disk, with clients that are killed and come back.

Traffic changes between skewed, uniform and a scan (field case P17). No byte may be wrong, and after
the warm-up nothing climbs that the daemon takes: its memory, descriptors, threads, regions, files.
"""

from __future__ import annotations

from tests.soak.run import DISK_CAPACITY, DISK_HOST_CAPACITY, Soak, soak
from tests.soak.watch import Sample
from tests.torture.base import Job, Outcome
from tests.torture.daemons import daemon_of

SECONDS = 60
SECONDS_MIN = 12


class MiniSoak:
    name = "mini-soak"
    what = "a full daemon with a full disk under mixed traffic: nothing is wrong, nothing climbs"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        seconds = job.scale.of(SECONDS, at_least=SECONDS_MIN)
        daemon = daemon_of(
            job,
            job.folder,
            host__capacity_bytes=DISK_HOST_CAPACITY,
            disk__path=str(job.folder / "disk"),
            disk__capacity_bytes=DISK_CAPACITY,
        ).start()

        def said(seen: Soak, now: Sample) -> None:
            outcome.wrong, outcome.failed = seen.wrong, seen.failed
            job.progress(int(now.at_s), seconds, outcome)

        try:
            seen = soak(daemon, seconds, job.rng, traffic="mixed", said=said)
        finally:
            if daemon.alive:
                daemon.kill()
        outcome.trials = seen.counts["requests"]
        outcome.wrong, outcome.failed = seen.wrong, seen.failed
        for name in ("blocks verified", "blocks stored"):
            outcome.counts[name] = seen.counts[name]
        outcome.counts["clients killed"] = seen.kills
        if seen.samples:
            last = seen.samples[-1]
            outcome.counts.update(rss_mb=int(last.rss_mb), fds=last.fds)
            outcome.counts.update(regions=last.regions, threads=last.threads)
            outcome.counts.update(disk_mb=int(last.disk_mb), index_kb=int(last.index_mb * 1000))
        return outcome
