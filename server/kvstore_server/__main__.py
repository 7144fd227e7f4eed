"""The command `kvstored`: serve, or show the settings.

Exit codes: 0 after a clean end, 2 if the daemon cannot start as it is set up, 3 if another daemon
holds a socket's lock. A start error is one line on stderr that names the setting to change.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

import click

import kvstore
from kvstore.config import Settings, explain, load, parse_flags, render_toml
from kvstore.model.reasons import Reason, StartError
from kvstore_server import process

EXIT_SETTINGS = 2
EXIT_LOCKED = 3
CONFIG_VARIABLE = "KVSTORE_CONFIG"

_ANY_SETTING = {"ignore_unknown_options": True, "allow_extra_args": True}
_CONFIG = click.option(
    "--config",
    "config_path",
    envvar=CONFIG_VARIABLE,
    metavar="PATH",
    help=f"TOML file of settings (or {CONFIG_VARIABLE}).",
)


class _ServeByDefault(click.Group):
    """`kvstored --config x` is `kvstored serve --config x`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {"--help", "--version"}
        if not args or (args[0].startswith("-") and args[0] not in own):
            args = ["serve", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ServeByDefault)
@click.version_option(kvstore.__version__, prog_name="kvstored")
def cli() -> None:
    """kvstored keeps attention KV blocks beside an LLM engine.

    Any setting may be given as a flag: --host.capacity_bytes=4GiB. `kvstored config --explain`
    lists them.
    """


@cli.command(context_settings=_ANY_SETTING)
@_CONFIG
@click.option("--ready-file", metavar="PATH", help="File to write when the daemon serves.")
@click.pass_context
def serve(ctx: click.Context, config_path: str | None, ready_file: str | None) -> None:
    """Serve until SIGTERM (the default command)."""
    settings = _load(config_path, ctx.args)
    # gRPC's own log is not ours to bound: a peer fills it with broken frames, and with any bytes.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Imported late, so that a mistake in the settings is told at once.
    from kvstore_server import disk, logs

    logs.configure(settings.server.log_level, settings.server.log_format)
    process.harden()
    folder = disk.take_folder(settings)
    try:
        # Later still: the disk's index is examined meanwhile, which takes as long.
        from kvstore_server import app
        from kvstore_server.ready import Announcer

        make = partial(app.App, disk_folder=folder)
        ctx.exit(app.serve(settings, Announcer(os.environ, ready_file), make))
    finally:
        if folder is not None:
            folder.close()


@cli.command(context_settings=_ANY_SETTING)
@_CONFIG
@click.option("--explain", "explained", is_flag=True, help="Say what each setting is.")
@click.pass_context
def config(ctx: click.Context, config_path: str | None, explained: bool) -> None:
    """Show the effective settings, with where each came from."""
    settings = _load(config_path, ctx.args)
    click.echo(explain() if explained else render_toml(settings))


def _load(config_path: str | None, arguments: Sequence[str]) -> Settings:
    return load(config_path, os.environ, parse_flags(arguments))


def exit_code(error: StartError) -> int:
    """Tells the error on stderr, in one line that names the setting; the process's exit code."""
    where = f"{error.setting}: " if error.setting else ""
    sys.stderr.write(f"kvstored: {where}{error.detail}\n")
    return EXIT_LOCKED if error.reason is Reason.START_LOCKED else EXIT_SETTINGS


def main() -> None:
    """Entry point of the command."""
    process.end_at_once_when_told()
    try:
        cli.main(prog_name="kvstored")
    except StartError as error:
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
