"""What a daemon takes, sample by sample, and whether any of it climbs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """at_s: since the start. rss_mb: RssAnon and RssFile, which are the daemon's own. fds: all but
    one for each region. regions: anonymous memory files. memfd_mb: of all regions. disk_mb: of the
    folder's files, as allocated; index_mb: those of LMDB.
    """

    at_s: float
    rss_mb: float
    fds: int
    regions: int
    threads: int
    memfd_mb: float
    disk_mb: float
    index_mb: float


class Bound(NamedTuple):
    """per_min: by how much it may climb a minute. slack: and altogether, whatever the time, since
    what is noise in a short run is no slope.
    """

    name: str
    per_min: float
    slack: float


BOUNDS: tuple[Bound, ...] = (
    # Noise is that of the allocator's arenas, +6.5 in the eight seconds of a short run. A leak of
    # 1 KiB an operation would show as hundreds.
    Bound("rss_mb", 6.0, 12.0),
    Bound("fds", 4.0, 12.0),
    # As many as a pool begins with: while staging comes and goes for half a minute, what is left
    # between two of them is cut smaller. What each holds counts in memfd_mb.
    Bound("regions", 4.0, 64.0),
    Bound("threads", 1.0, 4.0),
    Bound("memfd_mb", 2.0, 8.0),
    Bound("disk_mb", 2.0, 4.0),
    Bound("index_mb", 0.5, 1.0),
)


def sample(pid: int, disk: Path | None, at_s: float) -> Sample:
    """Of a daemon that is there."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    rss_mb = sum(int(values[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1000
    descriptors = os.listdir(f"/proc/{pid}/fd")
    memfds = _memfds(pid, descriptors)
    disk_bytes, index_bytes = (0, 0) if disk is None else _folder_bytes(disk)
    return Sample(
        at_s,
        rss_mb,
        len(descriptors) - len(memfds),
        len(memfds),
        int(values["Threads"]),
        sum(memfds.values()) / 1e6,
        disk_bytes / 1e6,
        index_bytes / 1e6,
    )


def climbs(rows: Sequence[Sample], bounds: Sequence[Bound] = BOUNDS) -> Iterator[str]:
    """What of it climbs, in samples from the end of the warm-up on."""
    for bound in bounds:
        slope, growth = trend(rows, bound.name)
        if slope > bound.per_min and growth > bound.slack:
            yield f"{bound.name} climbs by {slope:.2f} a minute, {growth:+.1f} altogether"


def trend(rows: Sequence[Sample], name: str) -> tuple[float, float]:
    """(slope a minute, growth from the first to the last fifth)."""
    if len(rows) < 5:
        return 0.0, 0.0
    times = np.array([row.at_s for row in rows])
    values = np.array([getattr(row, name) for row in rows], np.float64)
    fifth = max(len(rows) // 5, 1)
    growth = float(np.median(values[-fifth:]) - np.median(values[:fifth]))
    return float(np.polyfit(times, values, 1)[0]) * 60, growth


def _memfds(pid: int, descriptors: Sequence[str]) -> dict[int, int]:
    """Bytes of each anonymous memory file, by inode, once however many descriptors it has."""
    held: dict[int, int] = {}
    for descriptor in descriptors:
        path = f"/proc/{pid}/fd/{descriptor}"
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(path).startswith("/memfd:"):
                status = os.stat(path)
                held[status.st_ino] = status.st_blocks * 512
    return held


def _folder_bytes(folder: Path) -> tuple[int, int]:
    total = index = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                allocated = os.stat(os.path.join(root, name)).st_blocks * 512
                total += allocated
                index += allocated if name.endswith(".mdb") else 0
    return total, index
