"""`kvstore spaces`: which models' blocks the daemon keeps apart, and their fingerprints."""

from __future__ import annotations

import click

from kvstore.cli import show
from kvstore.cli.connect import Daemon, daemon_options
from kvstore.wire import convert
from kvstore.wire.v1 import admin_pb2 as pb


@click.command()
@daemon_options
def command(daemon: Daemon) -> None:
    """List spaces: tenant, model, state, size. --json shows whole fingerprints."""
    with daemon.admin() as admin:
        reply = admin.Spaces(pb.SpacesRequest(), timeout=daemon.timeout_s)
    if daemon.as_json:
        show.as_json(
            {
                "spaces": [
                    {
                        "space_id": space.space_id,
                        "tenant": space.tenant,
                        "state": space.state,
                        "blocks": space.blocks,
                        "bytes": space.bytes,
                        "review_id": space.review_id,
                        "fingerprint_digest": space.fingerprint_digest.hex(),
                        "fingerprint": convert.fingerprint_from_wire(space.fingerprint).to_dict(),
                    }
                    for space in reply.spaces
                ],
                "epoch_floors": dict(reply.epoch_floors),
            }
        )
        return
    if not reply.spaces:
        click.echo("no spaces: no engine has opened one yet")
        return
    show.columns(
        ("model", "tenant", "state", "dtype", "space", "blocks", "bytes", "epoch", "fingerprint"),
        [
            (
                space.fingerprint.identity.model_name,
                space.tenant,
                space.state if not space.review_id else f"{space.state} (review {space.review_id})",
                space.fingerprint.encoding.kv_dtype,
                space.space_id,
                f"{space.blocks:,}",
                show.size(space.bytes),
                space.fingerprint.identity.weight_epoch,
                space.fingerprint_digest.hex()[:12],
            )
            for space in reply.spaces
        ],
        left=4,
    )
