"""`python -m tests.soak [--seconds 60] [--seed N] [--disk] [--traffic zipf|uniform|scan|mixed]`:
exits 0 if no byte was wrong and the daemon's memory, descriptors, threads and files stayed flat.

Four client processes put, get, verify, are killed with -9 and come back, on a daemon that is 100 %
full; with --disk it has a disk tier below, that is full too. The first third is warm-up, or more if
it is not full by then; after it nothing may climb that the daemon takes.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.daemon import Daemon, start_daemon
from tests.soak.run import CAPACITY, DISK_CAPACITY, DISK_HOST_CAPACITY, Soak, soak
from tests.soak.watch import Sample


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--disk", action="store_true", help="with a disk tier below memory")
    parser.add_argument("--traffic", choices=("zipf", "uniform", "scan", "mixed"), default="zipf")
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-") as name:
        daemon = _start(Path(name), disk=asked.disk)
        rng = random.Random(asked.seed)
        seen = soak(daemon, asked.seconds, rng, traffic=asked.traffic, said=_said)
    return _verdict(seen)


def _start(folder: Path, *, disk: bool) -> Daemon:
    if not disk:
        return start_daemon(folder, host__capacity_bytes=CAPACITY)
    return start_daemon(
        folder,
        host__capacity_bytes=DISK_HOST_CAPACITY,
        disk__path=str(folder / "disk"),
        disk__capacity_bytes=DISK_CAPACITY,
    )


def _said(seen: Soak, now: Sample) -> None:
    print(
        f"{now.at_s:5.0f} s  {now.rss_mb:6.1f} MB  {now.fds} fds  {now.regions} regions  "
        f"{now.threads} threads  {now.disk_mb:.0f} MB on disk  "
        f"{seen.counts['requests']} requests  {seen.kills} kills  {len(seen.wrong)} wrong",
        flush=True,
    )


def _verdict(seen: Soak) -> int:
    for name, count in sorted(seen.counts.items()):
        print(f"  {name:28} {count}")
    print(f"kills {seen.kills}, wrong {len(seen.wrong)}")
    for line in seen.trends():
        print(f"  {line}")
    for failure in (*seen.wrong, *seen.failed):
        print(f"FAILED: {failure}")
    return 1 if seen.wrong or seen.failed else 0


if __name__ == "__main__":
    sys.exit(main())
