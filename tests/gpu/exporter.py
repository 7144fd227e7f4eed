"""A process that has a pool of GPU memory, as the daemon does, and another process that opens it.

    python -m tests.gpu.exporter BLOCKS BLOCK_BYTES SECONDS

Block i is full of byte i. The other process's output is its own; its standard input is this one's,
so that it lives on when this one is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvstore import shm
from kvstore.model.values import Place, Region
from kvstore.tiers.base import Crossing
from kvstore.tiers.cuda import CudaDriver
from kvstore.tiers.device import DeviceTier


def main() -> None:
    blocks, block_bytes, seconds = map(int, sys.argv[1:4])
    tier = DeviceTier(
        CudaDriver(0),
        blocks * block_bytes + (64 << 20),
        background=ThreadPoolExecutor(1),
        host_map=lambda region_id: None,
        export=True,
    )
    tier.open()
    header = shm.header_bytes(blocks)
    total = header + blocks * block_bytes
    tier.assign(Region(1, 0, "default", block_bytes, blocks, header, total))
    rows = [np.full(block_bytes, i % 256, np.uint8) for i in range(blocks)]
    crossings = [Crossing(Place(0, 1, i, 1, 0), None, row, True) for i, row in enumerate(rows)]
    assert tier.cross(crossings) == [None] * blocks
    handed = tier.exported(1)
    assert handed is not None, "the device exports nothing"
    memory, mapped_bytes = handed
    given = [str(memory.fd), str(mapped_bytes), str(block_bytes), str(seconds)]
    os.set_inheritable(memory.fd, True)
    opener = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.opener", *given], pass_fds=(memory.fd,)
    )
    print(f'{{"opener": {opener.pid}}}', flush=True)
    while opener.poll() is None:  # the daemon goes on writing into its pool
        assert tier.cross(crossings) == [None] * blocks
        os.sched_yield()
    tier.close()


if __name__ == "__main__":
    main()
