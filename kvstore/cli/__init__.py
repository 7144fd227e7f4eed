"""`kvstore`, the operator's tool: one command a file, each imported when it is called for.

It talks to a running daemon over its admin socket (`connect`), or works alone (`plan`, `report`,
`token`, `verify`).
Exit codes: 0 it is so, 1 what was asked is not so, 2 wrong usage, 4 the daemon cannot be reached.
Nothing imports this package.
"""

from __future__ import annotations

import importlib

import click

import kvstore

COMMANDS = (
    "bench",
    "config",
    "drain",
    "epoch",
    "explain",
    "invalidate",
    "pin",
    "plan",
    "report",
    "review",
    "simulate",
    "spaces",
    "status",
    "token",
    "top",
    "trace",
    "unpin",
    "verify",
)
"""Each is a module of this package that defines `command`."""


class LazyGroup(click.Group):
    """Imports a command's module when the command is looked up, so that none pays for another."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"{__name__}.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvstore.__version__, prog_name="kvstore")
def main() -> None:
    """Look into a running kvstored, decide what it must not, and plan capacity.

    Exit codes: 0 it is so, 1 what was asked is not so, 2 wrong usage, 4 daemon unreachable.
    """
