"""`kvstore drain`: the daemon takes nothing new, waits for its sessions, and ends."""

from __future__ import annotations

import click

from kvstore.cli import show
from kvstore.cli.connect import Daemon, daemon_options
from kvstore.wire.v1 import admin_pb2 as pb


@click.command()
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Seconds that running requests get.",
)
@daemon_options
def command(daemon: Daemon, grace_s: float) -> None:
    """Begin the daemon's orderly end, as SIGTERM does."""
    with daemon.admin() as admin:
        reply = admin.Drain(pb.DrainRequest(grace_s=grace_s), timeout=daemon.timeout_s)
    if daemon.as_json:
        show.as_json({"sessions": reply.sessions, "grace_s": grace_s})
    else:
        click.echo(f"draining: {reply.sessions} sessions have {show.seconds(grace_s)}")
