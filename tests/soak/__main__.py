"""`python -m tests.soak [--seconds 60] [--seed N]`: exits 0 if no byte was wrong and memory and
descriptors stayed flat.

Four client processes put, get, verify, are killed with -9 and come back, on a daemon that is 100 %
full. The first third is warm-up; after it the daemon's own memory (RssAnon + RssFile) and
descriptors may not climb.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.daemon import Daemon, start_daemon
from tests.soak.worker import WRITERS

CAPACITY = "192MiB"
KILL_EVERY_S = 1.5
SAMPLE_EVERY_S = 0.5
RSS_SLOPE_MB_PER_MIN_MAX = 6.0
"""Of noise: the allocator's arenas. A leak of 1 KiB an operation would show as hundreds."""
FDS_GROWTH_MAX = 12


@dataclass
class Fleet:
    """The client processes, and what they have said so far."""

    target: str
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    kills: int = 0

    def start(self) -> None:
        self.processes = [self._spawn(writer) for writer in range(WRITERS)]

    def kill_one(self) -> None:
        writer = self.rng.randrange(WRITERS)
        self.processes[writer].kill()
        self.processes[writer].wait()
        self.kills += 1
        self.processes[writer] = self._spawn(writer)

    def check_alive(self) -> None:
        for writer, process in enumerate(self.processes):
            if process.poll() is not None:
                self.wrong.append(f"client {writer} ended by itself with {process.returncode}")
                self.processes[writer] = self._spawn(writer)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _spawn(self, writer: int) -> subprocess.Popen[str]:
        seed = self.rng.randrange(2**31)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.worker", self.target, str(seed), str(writer)],
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # the last line of a killed process may be cut
            if "wrong" in said:
                self.wrong.append(line.strip())
            self.counts.update(said.get("counts", {}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-") as name:
        daemon = start_daemon(Path(name), host__capacity_bytes=CAPACITY)
        fleet = Fleet(f"unix:{daemon.data_socket}", random.Random(asked.seed))
        try:
            fleet.start()
            samples = _watch(daemon, fleet, asked.seconds)
        finally:
            fleet.stop()
            code = daemon.stop()
    return _verdict(fleet, samples, code)


def _watch(daemon: Daemon, fleet: Fleet, seconds: float) -> list[tuple[float, float, int]]:
    """Samples of (seconds, own memory in MB, descriptors) of the daemon."""
    samples: list[tuple[float, float, int]] = []
    started = killed = time.monotonic()
    while (now := time.monotonic()) - started < seconds:
        if now - killed > KILL_EVERY_S:
            killed = now
            fleet.kill_one()
        fleet.check_alive()
        samples.append((now - started, own_rss_mb(daemon.pid), fds(daemon.pid)))
        if len(samples) % 10 == 0:
            print(
                f"{now - started:5.0f} s  {samples[-1][1]:6.1f} MB  {samples[-1][2]} fds  "
                f"{fleet.counts['requests']} requests  {fleet.kills} kills  "
                f"{len(fleet.wrong)} wrong",
                flush=True,
            )
        time.sleep(SAMPLE_EVERY_S)
    return samples


def _verdict(fleet: Fleet, samples: list[tuple[float, float, int]], code: int) -> int:
    rows = np.array(samples[len(samples) // 3 :])
    slope = float(np.polyfit(rows[:, 0], rows[:, 1], 1)[0]) * 60
    fds_growth = int(np.median(rows[-5:, 2]) - np.median(rows[:5, 2]))
    for name, count in sorted(fleet.counts.items()):
        print(f"  {name:28} {count}")
    print(
        f"kills {fleet.kills}, wrong {len(fleet.wrong)}, "
        f"rss slope {slope:.2f} MB/min, fds {fds_growth:+d}"
    )
    failures = list(fleet.wrong)
    if fleet.counts["blocks verified"] == 0:
        failures.append("nothing was verified")
    if slope > RSS_SLOPE_MB_PER_MIN_MAX:
        failures.append(f"memory climbs by {slope:.2f} MB a minute")
    if fds_growth > FDS_GROWTH_MAX:
        failures.append(f"descriptors grew by {fds_growth}")
    if code != 0:
        failures.append(f"the daemon ended with {code}")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def own_rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(values[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1000


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


if __name__ == "__main__":
    sys.exit(main())
