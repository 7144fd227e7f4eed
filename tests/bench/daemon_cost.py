"""What the daemon itself costs: time to readiness and memory beside the arena."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from tests.bench.harness import Results
from tests.daemon import start_daemon

STARTS = 5
ARENA = "4GiB"


def measure(results: Results, folder: Path) -> None:
    starts_s: list[float] = []
    rss_mb = 0.0
    for number in range(STARTS):
        run = folder / f"start-{number}"
        run.mkdir()
        started = time.perf_counter()
        daemon = start_daemon(run, host__capacity_bytes=ARENA)
        starts_s.append(time.perf_counter() - started)
        try:
            if number == STARTS - 1:
                wait_idle(daemon.pid)
                rss_mb = own_rss_bytes(daemon.pid) / 1e6
        finally:
            daemon.stop()
    note = f"{ARENA} arena, from exec to the ready file; {min(starts_s):.2f}-{max(starts_s):.2f}"
    results.add("start_to_ready_s", statistics.median(starts_s), "s", STARTS, note)
    results.add("idle_rss_mb", rss_mb, "MB", 1, "RssAnon + RssFile; the arena is RssShmem")


def own_rss_bytes(pid: int) -> int:
    """What a process takes beside shared memory, mapped file pages included."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def wait_idle(pid: int) -> None:
    """Until the background prefault is over: its processor time stands still."""
    deadline = time.monotonic() + 30
    before = -1.0
    while time.monotonic() < deadline:
        parts = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = float(parts[11]) + float(parts[12])
        if ticks - before < 3:
            return
        before = ticks
        time.sleep(1.0)
