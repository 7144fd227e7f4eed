"""`kvstore trace`: the last requests with their five stages."""

from __future__ import annotations

import json
from typing import Any

import click

from kvstore.cli import show
from kvstore.cli.connect import Daemon, NotSo, daemon_options
from kvstore.model.record import Stage
from kvstore.wire.v1 import admin_pb2 as pb


@click.command(short_help="Show recent requests by stage.")
@click.option(
    "--last",
    type=click.IntRange(1, 1 << 20),
    default=20,
    show_default=True,
    help="At most so many.",
)
@click.option("--request-id", default="", help="Only this request of the engine.")
@click.option("--outcome", default="", help="Only this outcome (hit, miss, ...) or reason.")
@daemon_options
def command(daemon: Daemon, last: int, request_id: str, outcome: str) -> None:
    """Show recent requests, oldest first: what each stage took and where it departed.

    --json prints one record a line, replayable where it holds hash_ids. Exit code 1 if none
    matches.
    """
    request = pb.TraceRequest(last=last, request_id=request_id, outcome=outcome)
    with daemon.admin() as admin:
        reply = admin.Trace(request, timeout=daemon.timeout_s)
    if not reply.records:
        raise NotSo("no such request in the daemon's ring; see trace.ring_records")
    if daemon.as_json:
        for line in reply.records:
            click.echo(line)
        return
    stages = [stage.name.lower() for stage in Stage]
    rows = [_row(json.loads(line), stages) for line in reply.records]
    headers = ("verb", "request", "outcome", "reason", "origin", "departed")
    show.columns((*headers, "asked", "handed on", *(f"{s} us" for s in stages), "total us"), rows,
                 left=len(headers))  # fmt: skip


def _row(record: dict[str, Any], stages: list[str]) -> tuple[object, ...]:
    unit = record.get("unit", "")
    times = record.get("stages_us", {})
    return (
        record.get("verb", "-"),
        record.get("request_id") or "-",
        record.get("outcome", "-"),
        record.get("reason", "-"),
        record.get("origin", "-"),
        record.get("departed") or "-",
        f"{record.get('asked', 0)} {unit}".rstrip(),
        record.get("handed_on", 0),
        *(times.get(stage, "-") for stage in stages),
        record.get("total_us", "-"),
    )
