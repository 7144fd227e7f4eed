"""Writes the table of reasons in deploy/docs/troubleshooting.md, from the reasons themselves.

    python -m tests.deploy.reason_table --write

`STEPS` is what an operator does beyond the reason's own sentence; test_docs.py compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvstore.model.reasons import Origin, Reason

FILE = Path(__file__).resolve().parent.parent.parent / "deploy/docs/troubleshooting.md"
BEGIN, END = "<!-- reasons: begin -->", "<!-- reasons: end -->"
ORIGINS = {
    Origin.DATA: "What was sent, or what is stored. Whoever runs the engine can act.",
    Origin.SETTINGS: "A setting of the daemon or the client. The operator can act.",
    Origin.POLICY: "A decision of the policy or of a person. Usually nothing is wrong.",
    Origin.RESOURCES: "Memory, disk, processor or time. More of it, or less work.",
    Origin.DEFECT: "Ours. Please report it.",
}

STEPS: dict[Reason, str] = {
    Reason.UNSPECIFIED: "`kvstore status` shows the daemon's version.",
    Reason.COST_UNKNOWN: "`kvstore plan --list` has measured fits to begin with.",
    Reason.MISS_EVICTED: "`kvstore status`: evictions and share of the tier; sizing.md.",
    Reason.MISS_INCOMPATIBLE: "`kvstore explain --fingerprint FILE` names the fields.",
    Reason.MISS_EPOCH_STALE: "`kvstore epoch` lists the epochs in force.",
    Reason.MISS_INVALIDATED: "The log says who and why.",
    Reason.MISS_CORRUPT: "`kvstore verify FOLDER` once the daemon is stopped; `smartctl`.",
    Reason.DECLINED_RECOMPUTE_FASTER: "`kvstore plan` shows from which length on loading wins.",
    Reason.DECLINED_HOLDOUT: "`serve.share`; evidence.md.",
    Reason.DECLINED_SHADOW: "`serve.share`; evidence.md.",
    Reason.HELD_BY_AUDIT: "`kvstore review list` tells which model; evidence.md.",
    Reason.DECLINED_GUARD: "`kvstore status` shows the tier's state.",
    Reason.HELD_FOR_REVIEW: "`kvstore review list` shows the missing field, or what was seen.",
    Reason.REJECTED_BY_REVIEW: "`kvstore review list --all` shows who decided; evidence.md.",
    Reason.LEASE_EXPIRED: "`limits.lease_ttl_ms`; is the node's processor overloaded?",
    Reason.SESSION_UNKNOWN: "Clients do so by themselves. Often: does the daemon restart?",
    Reason.GENERATION_CHANGED: "Rare, or the tier is too small for what is read at a time.",
    Reason.NO_SPACE: "`kvstore status`: leases and pins; `host.capacity_bytes`.",
    Reason.STAGING_BUSY: "`host.staging_bytes`.",
    Reason.VIEW_LIMIT: "`limits.view_bytes_per_session_max`.",
    Reason.QUOTA_EXCEEDED: "`tenants.NAME.quota_bytes`.",
    Reason.PIN_LIMIT: "`kvstore unpin`.",
    Reason.DISK_FULL: "Free bytes on `disk.path`'s file system; `disk.capacity_bytes`.",
    Reason.LIMIT_SESSIONS: "`limits.sessions_max`; each rank of an engine is one.",
    Reason.LIMIT_QUEUE: "`limits.concurrent_calls_max`.",
    Reason.COPY_FAILED: "The daemon's log; memory pressure, or the disk.",
    Reason.DEADLINE_EXCEEDED: "The client's `deadline_ms`; `kvstore trace` shows which stage.",
    Reason.UNAVAILABLE: "Is it running, and may this user use the socket? See below.",
    Reason.BREAKER_OPEN: "As UNAVAILABLE; it closes by itself.",
    Reason.DRAINING: "`systemctl status kvstored`, or who called `kvstore drain`.",
    Reason.IO_ERROR: "The kernel's log; the tier is probed and taken up again by itself.",
    Reason.NO_DURABLE_TIER: "`disk.path`.",
    Reason.TOO_MANY_KEYS: "`limits.keys_per_call_max`.",
    Reason.PART_TOO_LARGE: "`host.staging_bytes`.",
    Reason.PROTOCOL_VERSION: "operations.md: upgrade.",
    Reason.PERMISSION_DENIED: "security.md.",
    Reason.START_MEMORY: "`host.capacity_bytes`, `host.allow_smaller`, the memory limit.",
    Reason.START_LOCKED: "The message has the other daemon's pid.",
    Reason.START_SETTINGS: "`kvstored config --config FILE` says the same without starting.",
    Reason.START_DISK: "Owner and mode of `disk.path`: its own user, 0700.",
    Reason.START_SOCKET: "Owner and mode of `server.runtime_dir`; see below.",
    Reason.INTERNAL: "The daemon's log has the traceback; `kvstore trace --outcome INTERNAL`.",
}


def tables() -> str:
    """A table for each origin."""
    lines = []
    for origin, meaning in ORIGINS.items():
        lines += [f"### Origin: {origin.value}", "", meaning, ""]
        lines += ["| reason | number | what, and what to do | then |", "|---|---|---|---|"]
        for reason in Reason:
            if reason.origin is origin:
                retry = " Worth a retry." if reason.is_retryable else ""
                steps = STEPS.get(reason, "")
                lines.append(
                    f"| `{reason.name}` | {reason.value} | {reason.text}{retry} | {steps} |"
                )
        lines.append("")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """The document with the tables of now."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    document = with_tables(FILE.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(document, encoding="utf-8")
    else:
        print(document)
