"""`kvstore epoch`: the floor of a model's weight epoch, shown or raised."""

from __future__ import annotations

import click

from kvstore.cli import show
from kvstore.cli.connect import Daemon, NotSo, daemon_options
from kvstore.wire.v1 import admin_pb2 as pb


@click.command(short_help="Show or raise weight epochs.")
@click.argument("model_name", required=False, metavar="[MODEL]")
@click.argument("epoch", required=False, type=click.IntRange(0, 2**63 - 1), metavar="[EPOCH]")
@click.option("--reason", "why", default="", help="Why; kept in the log.")
@daemon_options
def command(daemon: Daemon, model_name: str | None, epoch: int | None, why: str) -> None:
    """Show the weight epochs below which blocks are stale, or raise one: MODEL EPOCH.

    A raise is for good: everything older of that model is invisible when this command returns.
    """
    if model_name is None or epoch is None:
        _show(daemon, model_name)
        return
    request = pb.SetWeightEpochRequest(model_name=model_name, epoch=epoch, why=why)
    with daemon.admin() as admin:
        reply = admin.SetWeightEpoch(request, timeout=daemon.timeout_s)
    if reply.epoch > epoch:
        raise NotSo(f"the floor of {model_name} is {reply.epoch} already; it never goes down")
    if daemon.as_json:
        show.as_json(
            {
                "model_name": model_name,
                "epoch": reply.epoch,
                "closed_spaces": reply.closed_spaces,
                "dropped_blocks": reply.dropped_blocks,
                "durable": reply.durable,
            }
        )
        return
    click.echo(
        f"{model_name}: epoch {reply.epoch}; closed {reply.closed_spaces} spaces, "
        f"dropped {reply.dropped_blocks:,} blocks"
    )
    if not reply.durable:
        click.echo("not durable: the floor ends with the daemon; set state.path", err=True)


def _show(daemon: Daemon, model_name: str | None) -> None:
    with daemon.admin() as admin:
        reply = admin.Spaces(pb.SpacesRequest(), timeout=daemon.timeout_s)
    floors = dict(sorted(reply.epoch_floors.items()))
    if model_name is not None:
        if model_name not in floors:
            raise NotSo(f"no epoch was ever set for {model_name}")
        floors = {model_name: floors[model_name]}
    if daemon.as_json:
        show.as_json(floors)
    elif not floors:
        click.echo("no epoch was ever set")
    else:
        show.columns(("model", "epoch"), floors.items())
