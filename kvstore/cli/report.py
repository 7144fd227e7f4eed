"""`kvstore report`: whether the store helped, by criteria that were fixed beforehand."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import show
from kvstore.cli.connect import Daemon, NotSo, daemon_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.evidence.check import Now
    from kvstore.evidence.criteria import Criteria, Fixed
    from kvstore.evidence.records import Records

INSTANCE_DIGITS = 16
"""As daemons record themselves."""
MISMATCHES = 'kvstore_audited_blocks_total{outcome="mismatch"}'
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Say whether the store helped: keep, roll back, inconclusive.")
@click.option("--criteria", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="TOML file of what has to be seen. Without it there is no verdict.")  # fmt: skip
@click.option("--fix", is_flag=True, help="Fix the criteria now: writes FILE.digest.")
@click.option("--records", "files", type=FILE, multiple=True, metavar="FILE",
              help="Trace file of a daemon, plain or .gz; may be repeated. "
              "Default: trace.file of the running daemon.")  # fmt: skip
@click.option("--write", type=click.Path(path_type=Path), metavar="PREFIX",
              help="Write PREFIX.json and PREFIX.md.")  # fmt: skip
@click.option("--check", "record", type=FILE, metavar="RECORD",
              help="Name what changed since this report (PREFIX.json) was made.")  # fmt: skip
@click.option("--config", type=FILE, metavar="FILE",
              help="With --check: settings to compare; else the daemon's.")  # fmt: skip
@daemon_options
def command(
    daemon: Daemon,
    criteria: Path | None,
    fix: bool,
    files: tuple[Path, ...],
    write: Path | None,
    record: Path | None,
    config: Path | None,
) -> None:
    """Compare requests that were served with those that were held out or shadowed.

    Write the criteria, fix them with --fix, let traffic run with serve.share below 1, then report.
    Exit code 0: keep, or nothing has changed. 1: anything else.
    """
    if record is not None:
        _check(daemon, record, criteria, config)
    elif criteria is None:
        raise NotSo("no verdict: give --criteria FILE, fixed with --fix before the traffic")
    elif fix:
        _fix(criteria, daemon.as_json)
    else:
        _report(daemon, criteria, files, write)


def _fix(path: Path, as_json: bool) -> None:
    import kvstore
    from kvstore.evidence.criteria import CriteriaError
    from kvstore.evidence.criteria import fix as fix_now

    try:
        fixed = fix_now(path, time.time(), kvstore.__version__)
    except (CriteriaError, OSError) as error:
        raise NotSo(str(error)) from error
    if as_json:
        show.as_json({"digest": fixed.digest, "fixed_at_s": fixed.fixed_at_s})
    else:
        click.echo(f"fixed {path.name}: {fixed.digest}")


def _report(daemon: Daemon, path: Path, files: tuple[Path, ...], write: Path | None) -> None:
    from kvstore.evidence.criteria import CriteriaError, fixed_of, read_criteria
    from kvstore.evidence.markdown import as_markdown

    try:
        criteria, digest = read_criteria(path)
    except CriteriaError as error:
        raise NotSo(f"no verdict: {error}") from error
    made = _made(criteria, fixed_of(path, digest), files or (_trace_file(daemon),))
    text = as_markdown(made)
    if write is not None:
        for suffix, content in ((".json", json.dumps(made, indent=1) + "\n"), (".md", text)):
            _write(write.with_name(write.name + suffix), content)
    if daemon.as_json:
        show.as_json(made)
    else:
        click.echo(text)
    word = made["verdict"]["word"]
    if word != "keep":
        raise NotSo(f"{word}: {'; '.join(made['verdict']['reasons'])}")


def _write(path: Path, content: str) -> None:
    """For this user alone: the report names files and settings."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, 0o600)
            file.write(content)
    except OSError as error:
        raise NotSo(f"{path.name} cannot be written: {error.strerror}") from error


def _made(criteria: Criteria, fixed: Fixed, files: Sequence[Path]) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import Progress

    from kvstore.evidence.report import make_report

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=None)
        records = _read(files, lambda count: progress.update(task, advance=count))
        progress.update(task, description="comparing", total=None, completed=0)
        return make_report(
            criteria,
            fixed,
            records,
            time.time(),
            lambda what: progress.update(task, advance=1, description=what),
        )


def _read(files: Sequence[Path], told: Any) -> Records:
    from kvstore.evidence.records import read_records

    try:
        return read_records(files, told)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise NotSo(str(error)) from error


def _trace_file(daemon: Daemon) -> Path:
    """Where the running daemon records."""
    toml = _asked(daemon).config
    from kvstore.config.digest import settings_of

    name = settings_of(toml).get("trace.file", "").strip('"')
    if not name:
        raise NotSo("the daemon records nothing: set trace.file, or give --records FILE")
    return Path(name)


def _asked(daemon: Daemon) -> Now:
    from kvstore.evidence.check import Now
    from kvstore.wire.v1 import admin_pb2 as pb

    with daemon.admin() as admin:
        config = admin.Config(pb.ConfigRequest(), timeout=daemon.timeout_s)
        stats = admin.Stats(pb.StatsRequest(), timeout=daemon.timeout_s)
        reply = admin.Reviews(pb.ReviewsRequest(all=True), timeout=daemon.timeout_s)
    return Now(
        stats.version,
        config.toml,
        stats.instance_id.hex()[:INSTANCE_DIGITS],
        round(stats.counters[MISMATCHES]) if MISMATCHES in stats.counters else 0,
        Counter(review.state for review in reply.reviews),
    )


def _check(daemon: Daemon, record: Path, criteria: Path | None, config: Path | None) -> None:
    from kvstore.evidence.check import changed_since

    toml = None if config is None else _toml(config)
    try:
        made = json.loads(record.read_text(encoding="utf-8"))
        checked = changed_since(made, criteria, _now(daemon), toml, time.time())
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise NotSo(f"{record.name} is no report: {error}") from error
    changed, news = checked
    if daemon.as_json:
        show.as_json({"changed": changed, "news": news})
    else:
        click.echo("\n".join((*(changed or ["nothing has changed"]), *news)))
    if changed:
        raise NotSo(f"{len(changed)} things changed or could not be compared")


def _now(daemon: Daemon) -> Now | None:
    """None: nobody answers."""
    try:
        return _asked(daemon)
    except click.ClickException:
        return None


def _toml(config: Path) -> str:
    from kvstore.config import load, render_toml
    from kvstore.model.reasons import StartError

    try:
        return render_toml(load(str(config)))
    except StartError as error:
        raise NotSo(str(error)) from error
