"""`kvstore token`: makes a token for clients that come over TCP. Needs no daemon."""

from __future__ import annotations

import os
import secrets
import stat

import click

from kvstore.cli.connect import NotSo

RANDOM_BYTES = 32


@click.command(short_help="Make a token for clients over TCP.")
@click.argument("path", required=False, metavar="[FILE]")
def command(path: str | None) -> None:
    """Print a new token of 256 random bits, or add it to FILE.

    FILE is made for its owner alone (mode 0600) if it is absent. The daemon takes every token of
    its tenants.NAME.token_file after a SIGHUP; a client shows the last one of its own file.
    """
    token = secrets.token_urlsafe(RANDOM_BYTES)
    if path is None:
        click.echo(token)
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if mode & 0o077:
                raise NotSo(f"{path} has mode {mode:04o}: others may read it; chmod 0600 it first")
            os.write(fd, f"{token}\n".encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise NotSo(f"cannot write {path}: {error.strerror}") from None
