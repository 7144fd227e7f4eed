"""What the daemon itself uses, for the trace file: a record at its start with its environment and
settings, and one a minute with processor time, memory, bytes written to SSD, and what is held.

On the event loop's thread: a few small reads of /proc.
"""

from __future__ import annotations

import os
import platform
import re
import time

import kvstore
from kvstore.clock import Clock
from kvstore.config import Settings, render_toml
from kvstore.config.digest import settings_digest
from kvstore.model.reasons import Reason
from kvstore.model.record import Record, RecordBuilder
from kvstore.store import Store
from kvstore_server.metrics import Metrics

USAGE_EVERY_S = 60.0
INSTANCE_DIGITS = 16
_SALT = re.compile(r"^salt = .*$", re.MULTILINE)


def start_record(settings: Settings, store: Store, clock: Clock) -> Record:
    """Where and with what this daemon runs. The settings hold paths, and no secret."""
    toml = render_toml(settings)
    uname = os.uname()
    found = {
        "instance": store.instance_id.hex()[:INSTANCE_DIGITS],
        "kvstore": kvstore.__version__,
        "python": platform.python_version(),
        "system": f"{uname.sysname} {uname.release} {uname.machine}",
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "tiers": {tier.name: tier.capacity_bytes for tier in store.tiers},
        "config_digest": settings_digest(toml),
        "config": _SALT.sub('salt = "..."', toml),
    }
    return _record("start", {"start": found}, clock)


def usage_record(store: Store, metrics: Metrics, clock: Clock) -> Record:
    """What was used since the start; counts only grow."""
    archives = store.archives.stats().values()
    found = {
        "instance": store.instance_id.hex()[:INSTANCE_DIGITS],
        "cpu_s": round(time.process_time(), 3),
        "rss_bytes": resident_bytes(),
        "ssd_written_bytes": round(sum(one.counters.get("saved_bytes", 0) for one in archives)),
        "audit_mismatches": metrics.audit_mismatches,
        "reviews": dict(store.core.review_states()),
    }
    return _record("usage", {"usage": found}, clock)


def resident_bytes() -> int:
    """Memory of this process that is resident, the arena included; 0 where /proc does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _record(verb: str, evidence: dict[str, object], clock: Clock) -> Record:
    now_ns = clock.monotonic_ns()
    builder = RecordBuilder(verb, "", "", now_ns, clock.wall_s())
    builder.record.evidence = evidence
    return builder.finish(Reason.OK, now_ns)
