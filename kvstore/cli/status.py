"""`kvstore status`: what the daemon holds and how it is, once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import click

from kvstore.cli import show
from kvstore.cli.connect import Daemon, daemon_options
from kvstore.wire.v1 import admin_pb2 as pb


@click.command()
@daemon_options
def command(daemon: Daemon) -> None:
    """Show tiers, tenants, sessions, leases and hits."""
    with daemon.admin() as admin:
        stats = admin.Stats(pb.StatsRequest(), timeout=daemon.timeout_s)
    if daemon.as_json:
        show.as_json(as_fields(stats))
    else:
        print_status(stats)


def as_fields(stats: pb.StatsReply) -> dict[str, Any]:
    """The reply as plain values."""
    return {
        "version": stats.version,
        "instance_id": stats.instance_id.hex(),
        "uptime_s": stats.uptime_s,
        "state": stats.state,
        "tiers": [
            {
                "name": tier.name,
                "state": tier.state,
                "capacity_bytes": tier.capacity_bytes,
                "used_bytes": tier.used_bytes,
                "block_bytes": tier.block_bytes,
                "blocks": tier.blocks,
                "free_slots": tier.free_slots,
                "regions": tier.regions,
                "closing_regions": tier.closing_regions,
                "staging_bytes": tier.staging_bytes,
                "evictions": tier.evictions,
            }
            for tier in stats.tiers
        ],
        "tenants": [
            {
                "name": tenant.tenant,
                "used_bytes": tenant.used_bytes,
                "quota_bytes": tenant.quota_bytes,
                "blocks": tenant.blocks,
                "hit_tokens": tenant.hit_tokens,
                "lookup_tokens": tenant.lookup_tokens,
            }
            for tenant in stats.tenants
        ],
        "sessions": stats.sessions,
        "read_leases": stats.read_leases,
        "view_leases": stats.view_leases,
        "write_leases": stats.write_leases,
        "pins": stats.pins,
        "copies_in_flight": stats.copies_in_flight,
        "spaces_open": stats.spaces_open,
        "spaces_held": stats.spaces_held,
        "guards": guards_of(stats.counters),
        "counters": dict(sorted(stats.counters.items())),
    }


def print_status(stats: pb.StatsReply) -> None:
    click.echo(
        f"kvstored {stats.version}, {stats.state}, up {show.seconds(stats.uptime_s)}, "
        f"instance {stats.instance_id.hex()[:8]}"
    )
    click.echo(
        f"{stats.sessions} sessions, {stats.read_leases} read, {stats.view_leases} view and "
        f"{stats.write_leases} write leases, {stats.pins} pins, "
        f"{stats.copies_in_flight} copies in flight"
    )
    click.echo(f"{stats.spaces_open} open spaces, {stats.spaces_held} held for review")
    click.echo()
    show.columns(TIER_HEADERS, [tier_row(tier) for tier in stats.tiers], left=2)
    click.echo()
    if archives := archive_rows(stats):
        show.columns(ARCHIVE_HEADERS, archives)
        click.echo()
    show.columns(TENANT_HEADERS, [tenant_row(tenant) for tenant in stats.tenants])
    guards = guards_of(stats.counters)
    click.echo()
    if guards and all(guard["state"] == "ok" for guard in guards):
        click.echo(f"{len(guards)} guards, all ok")
    elif guards:
        show.columns(GUARD_HEADERS, [guard_row(guard) for guard in guards], left=4)


TIER_HEADERS = ("tier", "state", "used", "of", "share", "blocks", "bytes", "staging", "evicted")
ARCHIVE_HEADERS = (
    "archive", "slots", "free", "age at eviction", "written in 24 h", "budget", "share",
    "set aside",
)  # fmt: skip
GUARD_HEADERS = (
    "guard", "tier", "tenant", "state", "value", "warns at", "stops at", "warnings", "stops",
)  # fmt: skip
GUARD_STATES = ("ok", "warn", "probe", "stop")
_GUARD = re.compile(r'kvstore_guard_state\{guard="([^"]*)",tier="([^"]*)",tenant="([^"]*)"\}')
TENANT_HEADERS = ("tenant", "used", "quota", "blocks", "looked up", "hit", "hit share")


def tier_row(tier: pb.TierStats) -> tuple[str, ...]:
    return (
        tier.name,
        tier.state,
        show.size(tier.used_bytes),
        show.size(tier.capacity_bytes),
        show.share(tier.used_bytes, tier.capacity_bytes),
        f"{tier.blocks:,}",
        show.size(tier.block_bytes),
        show.size(tier.staging_bytes),
        f"{tier.evictions:,}",
    )


def archive_rows(stats: pb.StatsReply) -> list[tuple[str, ...]]:
    """Of the tiers whose blocks outlive the daemon: the figures that only those have."""
    rows: list[tuple[str, ...]] = []
    for tier in stats.tiers:
        of = {
            name: stats.counters.get(f"kvstore_{tier.name}_{name}", 0.0)
            for name in (
                "slots", "eviction_age_seconds", "written_day_bytes", "endurance_day_bytes",
                "aside_bytes",
            )
        }  # fmt: skip
        if f"kvstore_{tier.name}_written_day_bytes" not in stats.counters:
            continue
        age_s, budget = of["eviction_age_seconds"], of["endurance_day_bytes"]
        rows.append(
            (
                tier.name,
                f"{of['slots']:,.0f}",
                f"{tier.free_slots:,}",
                show.seconds(age_s) if age_s else "-",
                show.size(of["written_day_bytes"]),
                show.size(budget) if budget else "no limit",
                show.share(of["written_day_bytes"], budget),
                show.size(of["aside_bytes"]),
            )
        )
    return rows


def guards_of(counters: Mapping[str, float]) -> list[dict[str, Any]]:
    """Each guard with its state, value and lines; a tenant is the digest of its name, as in the
    metrics.
    """
    guards = []
    for name, number in sorted(counters.items()):
        matched = _GUARD.fullmatch(name)
        if matched is None:
            continue
        labels = name.removeprefix("kvstore_guard_state")
        fields = {
            field: counters.get(f"kvstore_guard_{metric}{labels}", 0.0)
            for field, metric in (
                ("value", "value"),
                ("warn", "warn_line"),
                ("stop", "stop_line"),
                ("warnings", "warnings_total"),
                ("stops", "stops_total"),
            )
        }
        guard, tier, tenant = matched.groups()
        state = GUARD_STATES[int(number)] if number < len(GUARD_STATES) else str(number)
        guards.append({"guard": guard, "tier": tier, "tenant": tenant, "state": state, **fields})
    return guards


def guard_row(guard: Mapping[str, Any]) -> tuple[str, ...]:
    shown = show.size if guard["guard"] in ("memory", "bytes") else _number
    return (
        guard["guard"],
        guard["tier"] or "-",
        guard["tenant"] or "-",
        guard["state"],
        shown(guard["value"]),
        shown(guard["warn"]) if guard["warn"] else "-",
        shown(guard["stop"]) if guard["stop"] else "-",
        f"{guard['warnings']:,.0f}",
        f"{guard['stops']:,.0f}",
    )


def _number(value: float) -> str:
    return f"{value:.4g}"


def tenant_row(tenant: pb.TenantStats) -> tuple[str, ...]:
    return (
        tenant.tenant,
        show.size(tenant.used_bytes),
        show.size(tenant.quota_bytes) if tenant.quota_bytes else "equal share",
        f"{tenant.blocks:,}",
        f"{tenant.lookup_tokens:,}",
        f"{tenant.hit_tokens:,}",
        show.share(tenant.hit_tokens, tenant.lookup_tokens),
    )
