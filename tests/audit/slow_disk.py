"""`python -m tests.audit.slow_disk serve ...` is `kvstored serve ...` above a disk that reads at a
fixed rate: bytes a second, read anew from the file that SLOW_DISK_RATE_FILE names before each read.

All reads share the rate, one after the other, as on a device that is at its limit. `kvstored` has
no switch for this: `SegmentFiles.preadv` is wrapped in this process alone.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.tiers.base import Bytes
from kvstore.tiers.disk.files import SegmentFiles
from kvstore_server.__main__ import main

VARIABLE = "SLOW_DISK_RATE_FILE"


def throttle(rate_file: Path) -> None:
    """Every read of a segment waits for its turn, and takes its bytes' time."""
    preadv = SegmentFiles.preadv
    guard = threading.Lock()
    free_at_s = 0.0

    @functools.wraps(preadv)
    def slow(self: SegmentFiles, segment_id: int, offset: int, buffers: Sequence[Bytes]) -> None:
        nonlocal free_at_s
        with guard:
            rate = float(rate_file.read_text())
            length = sum(len(buffer) for buffer in buffers)
            free_at_s = max(free_at_s, time.monotonic()) + length / rate
            wait_s = free_at_s - time.monotonic()
        preadv(self, segment_id, offset, buffers)
        time.sleep(max(0.0, wait_s))

    SegmentFiles.preadv = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    throttle(Path(os.environ[VARIABLE]))
    main()
