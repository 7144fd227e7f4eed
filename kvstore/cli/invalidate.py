"""`kvstore invalidate`: drops blocks, at once and on every tier."""

from __future__ import annotations

import click

from kvstore.cli import show
from kvstore.cli.arguments import ID
from kvstore.cli.connect import Daemon, daemon_options, packed_keys
from kvstore.wire.v1 import admin_pb2 as pb


@click.command(short_help="Drop blocks, at once and everywhere.")
@click.option("--space", "space_id", type=ID, help="This space, or its KEYHEX.")
@click.option("--model", "model_name", default="", help="Every space of this model name.")
@click.option("--everything", is_flag=True, help="All spaces (of --tenant).")
@click.option("--tenant", default="", help="Only this tenant's. Default: all tenants.")
@click.option("--reason", "why", default="", help="Why; kept in the log.")
@click.option("--yes", is_flag=True, help="Do not ask before --everything.")
@click.argument("keys", nargs=-1, metavar="[KEYHEX]...")
@daemon_options
def command(
    daemon: Daemon,
    space_id: int | None,
    model_name: str,
    everything: bool,
    tenant: str,
    why: str,
    yes: bool,
    keys: tuple[str, ...],
) -> None:
    """Drop blocks: of a space, some keys of it, a model, or all.

    They are invisible before this command returns.
    """
    if sum((space_id is not None, bool(model_name), everything)) != 1:
        raise click.UsageError("give one of --space, --model and --everything")
    if keys and space_id is None:
        raise click.UsageError("keys are named within a --space")
    if everything and not yes:
        of = f"tenant {tenant}" if tenant else "all tenants"
        click.confirm(f"Drop every block of {of}?", abort=True, err=True)
    request = pb.InvalidateRequest(
        tenant=tenant,
        space_id=space_id or 0,
        model_name=model_name,
        everything=everything,
        keys=packed_keys(keys),
        why=why,
    )
    with daemon.admin() as admin:
        reply = admin.Invalidate(request, timeout=daemon.timeout_s)
    if daemon.as_json:
        show.as_json({"dropped_blocks": reply.dropped_blocks, "spaces": reply.spaces})
    else:
        click.echo(f"dropped {reply.dropped_blocks:,} blocks of {reply.spaces} spaces")
