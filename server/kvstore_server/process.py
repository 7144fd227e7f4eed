"""What the daemon changes about its own process: descriptors, heap, core files, debuggers.

Called once, by main, before anything else is opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal

log = logging.getLogger(__name__)

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DESCRIPTORS = 65_536
OWN_DESCRIPTORS = 64
_PR_SET_DUMPABLE = 4  # prctl(2)
# mallopt(3): name and value. As it is, glibc raises both thresholds with the largest message that
# was freed: a dozen messages of 12 MiB then left 400 MiB in the heaps of gRPC's threads. Set, they
# stay; a chunk of a stream (2 MiB) is still taken from the heap.
_MALLOC_OPTIONS = (
    (-3, 4 << 20),
    (-1, 4 << 20),
    (-8, 4),
)  # MMAP_THRESHOLD, TRIM_THRESHOLD, ARENA_MAX


def end_at_once_when_told() -> None:
    """Before there is anything to tidy up a signal ends the process, as a success; also as the
    first process of a container, for which the kernel drops signals that nobody handles.
    """
    for number in END_SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))


def region_share(usual: float) -> float:
    """Part of the memory for one region: larger where descriptors are so few that those of all
    regions, two each while they are prepared, would take more than half of them.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return usual if limit == resource.RLIM_INFINITY else max(usual, 4 / limit)


def why_few_descriptors(regions: int, sessions_max: int, reads_max: int) -> str:
    """Empty if the limit on descriptors leaves room for memory and clients, else a sentence.

    A region has two; a client one for its calls, one for its fd socket, one that tells its death
    and two for staging; a read over the fd socket one, of which all tenants have `reads_max`.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = 2 * regions + 5 * sessions_max + reads_max + OWN_DESCRIPTORS
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return ""
    return f"RLIMIT_NOFILE is {limit}; {sessions_max} sessions and the memory may need {wanted}"


def harden() -> None:
    """Takes all the descriptors that it may have, gives freed memory back, and leaves no bytes of
    blocks to core files or other processes of the same user: KV bytes can be inverted to text.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError):  # another C library has another heap
        for option, value in _MALLOC_OPTIONS:
            libc.mallopt(option, value)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        log.warning("prctl(PR_SET_DUMPABLE): %s", os.strerror(ctypes.get_errno()))
