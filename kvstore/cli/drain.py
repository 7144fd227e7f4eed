"""`kvstore drain`: the daemon takes nothing new, waits for its sessions, and ends."""

from __future__ import annotations

import click

from kvstore.cli import show
from kvstore.cli.arguments import Number
from kvstore.cli.connect import Daemon, daemon_options
from kvstore.wire.v1 import admin_pb2 as pb


@click.command()
@click.option(
    "--grace",
    "grace_s",
    type=Number(min=0, min_open=True),
    default=None,
    help="Seconds that running requests get; never more than server.drain_grace_s, the default.",
)
@daemon_options
def command(daemon: Daemon, grace_s: float | None) -> None:
    """Begin the daemon's orderly end, as SIGTERM does."""
    with daemon.admin() as admin:
        request = pb.DrainRequest(grace_s=grace_s or 0.0)  # 0: the daemon's own
        reply = admin.Drain(request, timeout=daemon.timeout_s)
    if daemon.as_json:
        show.as_json({"sessions": reply.sessions, "grace_s": grace_s})
    else:
        at_most = "server.drain_grace_s" if grace_s is None else show.seconds(grace_s)
        click.echo(f"draining: {reply.sessions} sessions have {at_most} at most")
