"""`kvstore unpin`: gives pinned blocks back to eviction."""

from __future__ import annotations

import click

from kvstore.cli import show
from kvstore.cli.arguments import ID
from kvstore.cli.connect import Daemon, NotSo, daemon_options
from kvstore.wire.v1 import admin_pb2 as pb


@click.command(short_help="Give pinned blocks back.")
@click.argument("pin_id", type=ID)
@daemon_options
def command(daemon: Daemon, pin_id: int) -> None:
    """End a pin. Exit code 1 if there is no such pin."""
    with daemon.admin() as admin:
        reply = admin.Unpin(pb.UnpinRequest(pin_id=pin_id), timeout=daemon.timeout_s)
    if not reply.known:
        raise NotSo(f"there is no pin {pin_id}")
    if daemon.as_json:
        show.as_json({"pin_id": pin_id})
    else:
        click.echo(f"unpinned {pin_id}")
