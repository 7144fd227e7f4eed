"""`kvstore top`: the daemon's state again and again, with what happened since the last look."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from kvstore.cli import show
from kvstore.cli.arguments import Number
from kvstore.cli.connect import Daemon, daemon_options
from kvstore.cli.status import (
    ARCHIVE_HEADERS,
    TENANT_HEADERS,
    TIER_HEADERS,
    archive_rows,
    as_fields,
    print_status,
    tenant_row,
    tier_row,
)
from kvstore.wire.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from rich.console import Group

COUNTERS_SHOWN_MAX = 20


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and end, for scripts.")
@click.option(
    "--interval",
    "interval_s",
    type=Number(min=0.1, max=86_400),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@daemon_options
def command(daemon: Daemon, once: bool, interval_s: float) -> None:
    """Watch tiers, tenants and rates until interrupted.

    With --json, one line of JSON a look.
    """
    with daemon.admin() as admin:
        stats = admin.Stats(pb.StatsRequest(), timeout=daemon.timeout_s)
        if once and daemon.as_json:
            show.as_json(as_fields(stats))
        elif once:
            print_status(stats)
        else:
            # An interrupt is how this command ends; it is no failure.
            try:
                _watch(
                    lambda: admin.Stats(pb.StatsRequest(), timeout=daemon.timeout_s),
                    stats,
                    interval_s,
                    daemon.as_json,
                )
            except KeyboardInterrupt:
                return


def rates(
    before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float
) -> list[tuple[str, float]]:
    """(counter, change a second) of the counters that moved, the busiest first."""
    changed = [
        (name, (value - before.get(name, 0.0)) / elapsed_s)
        for name, value in after.items()
        if value != before.get(name, 0.0)
    ]
    return sorted(changed, key=lambda row: (-abs(row[1]), row[0]))


def _watch(
    look: Callable[[], pb.StatsReply], stats: pb.StatsReply, interval_s: float, as_json: bool
) -> None:
    from rich.live import Live

    if as_json:
        while True:
            click.echo(json.dumps(as_fields(stats), separators=(",", ":")))
            time.sleep(interval_s)
            stats = look()
    with Live(frame(stats, stats), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(interval_s)
            before, stats = stats, look()
            live.update(frame(before, stats), refresh=True)


def frame(before: pb.StatsReply, after: pb.StatsReply) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(headers: tuple[str, ...], rows: list[tuple[str, ...]], left: int) -> Table:
        grid = Table(box=None, header_style="bold", pad_edge=False)
        for at, header in enumerate(headers):
            grid.add_column(header, justify="left" if at < left else "right", no_wrap=True)
        for row in rows:
            grid.add_row(*row)
        return grid

    head = Text(
        f"kvstored {after.version}, {after.state}, up {show.seconds(after.uptime_s)}, "
        f"{after.sessions} sessions, {after.read_leases + after.view_leases} read and "
        f"{after.write_leases} write leases, {after.copies_in_flight} copies in flight"
    )
    elapsed_s = max(after.uptime_s - before.uptime_s, 1e-9)
    moved = rates(before.counters, after.counters, elapsed_s)[:COUNTERS_SHOWN_MAX]
    archives = archive_rows(after)
    return Group(
        head,
        Text(),
        table(TIER_HEADERS, [tier_row(tier) for tier in after.tiers], 2),
        Text(),
        *((table(ARCHIVE_HEADERS, archives, 1), Text()) if archives else ()),
        table(TENANT_HEADERS, [tenant_row(tenant) for tenant in after.tenants], 1),
        Text(),
        table(("counter", "a second"), [(name, f"{rate:,.1f}") for name, rate in moved], 1),
    )
