"""`kvstore pin`: keeps blocks from being evicted, until `kvstore unpin`."""

from __future__ import annotations

import click

from kvstore.cli import show
from kvstore.cli.arguments import ID
from kvstore.cli.connect import Daemon, NotSo, daemon_options, packed_keys
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import admin_pb2 as pb


@click.command(short_help="Keep blocks from eviction.")
@click.option("--space", "space_id", type=ID, required=True)
@click.argument("keys", nargs=-1, required=True, metavar="KEYHEX...")
@daemon_options
def command(daemon: Daemon, space_id: int, keys: tuple[str, ...]) -> None:
    """Pin blocks of a space (64 hexadecimal digits a key, "-" reads them).

    Prints the pin's number. Exit code 1 if not every key could be pinned; those that could stay
    pinned.
    """
    packed = packed_keys(keys)
    asked = len(packed) // 32
    request = pb.PinRequest(space_id=space_id, keys=packed)
    with daemon.admin() as admin:
        reply = admin.Pin(request, timeout=daemon.timeout_s)
    reason = Reason.from_wire(reply.reason)
    if daemon.as_json:
        fields = {"pin_id": reply.pin_id, "asked": asked, "pinned": reply.pinned}
        show.as_json({**fields, **show.reason_fields(reason)})
    elif reply.pin_id:
        click.echo(f"pin {reply.pin_id}: {reply.pinned} of {asked} blocks")
    if reply.pinned < asked:
        raise NotSo(f"{asked - reply.pinned} of {asked} not pinned: {reason.name}: {reason.text}")
