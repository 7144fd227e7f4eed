"""`kvstore config`: the effective settings of the running daemon."""

from __future__ import annotations

import sys

import click

from kvstore.cli import show
from kvstore.cli.connect import Daemon, daemon_options
from kvstore.wire.v1 import admin_pb2 as pb

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@click.command(short_help="Print the effective settings.")
@daemon_options
def command(daemon: Daemon) -> None:
    """Print the settings that the daemon runs with, as TOML that it would load."""
    with daemon.admin() as admin:
        reply = admin.Config(pb.ConfigRequest(), timeout=daemon.timeout_s)
    if daemon.as_json:
        show.as_json(tomllib.loads(reply.toml))
    else:
        click.echo(reply.toml, nl=not reply.toml.endswith("\n"))
