"""What has changed since a report was made, so that its verdict may not hold any more."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvstore
from kvstore.config.digest import settings_digest, settings_of
from kvstore.evidence.criteria import digest_of
from kvstore.evidence.masking import masked
from kvstore.evidence.records import digest_of_start

__all__ = ["Checked", "Now", "changed_since"]


class Checked(NamedTuple):
    """One line each. changed: what the verdict rests on, or what could not be compared; none: all
    is as it was. news: what else is known now.
    """

    changed: list[str]
    news: list[str]


class Now(NamedTuple):
    """What a running daemon says. mismatches: since this daemon's start. reviews: by state."""

    version: str
    config: str
    instance: str
    mismatches: int
    reviews: Mapping[str, int]


def changed_since(
    report: Mapping[str, Any],
    criteria: Path | None,
    daemon: Now | None,
    config: str | None,
    now_s: float,
) -> Checked:
    """KeyError, TypeError, ValueError: that is no report.

    criteria: the file as it is now; None: it cannot be compared, and that is said. daemon: None: it
    cannot be asked, and that is said. config: settings as TOML to compare instead of the daemon's.
    now_s: seconds since 1970.
    """
    news: list[str] = []
    changed = [
        *_of_versions(report["made_with"]),
        *_of_criteria(report["criteria"]["digest"], criteria),
        *_of_sources(report["sources"], news),
        *_of_daemon(report["daemons"], daemon, config),
        *_of_holds(report["holds"], daemon),
        *_of_date(report["next_review"]["at_the_latest"], now_s),
    ]
    if daemon is None and config is not None:
        news.append("audits and reviews: no daemon answers, they are not compared")
    return Checked(changed, news)


def _of_versions(made_with: Mapping[str, str]) -> Iterator[str]:
    now = {
        "kvstore": kvstore.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    for name, version in now.items():
        if made_with[name] != version:
            yield f"{name} was {made_with[name]}, is {version}"


def _of_criteria(digest: str, path: Path | None) -> Iterator[str]:
    if path is None:
        yield "criteria: give --criteria FILE to compare them"
        return
    now = _digest(path)
    if now != digest:
        yield f"criteria: {path.name} was {digest[:19]}, {_is(now)}"


def _of_sources(sources: list[Mapping[str, Any]], news: list[str]) -> Iterator[str]:
    """By the bytes that were read: a daemon that goes on recording changes nothing of them."""
    for one in sources:
        path = Path(one["path"])
        try:
            now, more = digest_of_start(path, one["bytes"])
        except (OSError, EOFError, zlib.error) as error:
            now, more = _unreadable(error), False
        if now != one["digest"]:
            yield f"data: {path.name} was {one['digest'][:19]}, {_is(now)}"
        elif more:
            news.append(f"data: {path.name} has lines that are newer than the report")


def _of_daemon(
    starts: list[Mapping[str, Any]], daemon: Now | None, config: str | None
) -> Iterator[str]:
    if not starts:
        yield "settings: no daemon recorded its own when the report was made"
        return
    if daemon is None and config is None:
        yield "daemon: none answers; give --config FILE to compare its settings at least"
        return
    # Files are read in the order in which they were given: the last start need not be the latest.
    last = max(starts, key=lambda one: float(one["at_s"]))
    if daemon is not None and daemon.version != last["kvstore"]:
        yield f"daemon was {last['kvstore']}, is {daemon.version}"
    toml = config if config is not None or daemon is None else daemon.config
    assert toml is not None, "one of them is there"
    now = settings_digest(toml)
    if now != last["config_digest"]:
        yield f"settings: were {last['config_digest'][:19]}, are {now[:19]}"
        yield from _settings(last["config"], masked(toml))


def _of_holds(holds: Mapping[str, Any], daemon: Now | None) -> Iterator[str]:
    """What was found wrong since. Fewer of a state are no news: decided ones are in another."""
    if daemon is None:
        return
    before = holds["by_instance"].get(daemon.instance, 0)
    if daemon.mismatches > before:
        yield f"audits: the daemon had found {before} blocks that differ, now {daemon.mismatches}"
    for state in sorted(daemon.reviews):
        was, now = holds["reviews"].get(state, 0), daemon.reviews[state]
        if now > was:
            yield f"reviews: {was} were {state}, now {now}"


def _of_date(at_the_latest: str, now_s: float) -> Iterator[str]:
    if datetime.fromtimestamp(now_s, timezone.utc) > datetime.fromisoformat(at_the_latest):
        yield f"review: it was due by {at_the_latest}"


def _settings(before: str, after: str) -> Iterator[str]:
    old, new = settings_of(before), settings_of(after)
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name, "absent"), new.get(name, "absent")
        if was != now and not name.endswith(".salt"):
            yield f"setting {name} was {was}, is {now}"


def _digest(path: Path) -> str:
    try:
        return digest_of(path.read_bytes())
    except OSError as error:
        return _unreadable(error)


def _unreadable(error: Exception) -> str:
    return f"gone ({getattr(error, 'strerror', None) or error})"


def _is(digest: str) -> str:
    return f"is {digest[:19]}" if digest.startswith("sha256:") else f"is {digest}"
