"""What people are told of guards: log lines and metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.config.guarding import GuardSettings
from kvstore.policy.guards import GuardLimits, State
from kvstore.store.guards import GuardChange, GuardStats
from kvstore_server.logs import event

log = logging.getLogger(__name__)

WARN_SHARE_OF_STOP = 0.02
"""Of a share of failures at which a guard stops: where it warns."""
LOADS_SHARE = 4
"""Clients report loads of prompts, of which there are fewer than of blocks."""


def guard_limits(settings: GuardSettings) -> GuardLimits:
    """All lines, as these settings say."""
    return GuardLimits(
        hold_s=settings.hold_s,
        window_s=settings.window_s,
        samples_min=settings.samples_min,
        loads_min=max(settings.samples_min // LOADS_SHARE, 1),
        memory_free_stop_bytes=settings.memory_free_stop_bytes,
        disk_free_stop_bytes=settings.disk_free_stop_bytes,
        errors_warn_share=WARN_SHARE_OF_STOP * settings.errors_stop_share,
        errors_stop_share=settings.errors_stop_share,
        corrupt_warn_share=WARN_SHARE_OF_STOP * settings.corrupt_stop_share,
        corrupt_stop_share=settings.corrupt_stop_share,
        load_warn_ratio=settings.load_stop_ratio / 2,
        load_stop_ratio=settings.load_stop_ratio,
        held_stop=settings.held_stop,
    )


_WORDS = {
    State.OK: "fine again",
    State.WARN: "past its warn line",
    State.PROBE: "tried half-open",
    State.STOP: "past its stop line",
}


def tell_of_guard(change: GuardChange) -> None:
    """Logs a change. What gets worse, or is stopped, is a warning."""
    stats = change.stats
    worse = stats.state > change.was or stats.state is State.STOP
    fields: dict[str, Any] = {
        "guard": stats.name.guard,
        "tier": stats.name.tier,
        "tenant": stats.name.tenant,
        "value": round(stats.value, 6),
        "warn": stats.warn,
        "stop": stats.stop,
        "detail": change.detail,
    }
    level = logging.WARNING if worse and stats.state is not State.PROBE else logging.INFO
    event(
        log, level, f"guard {_WORDS[stats.state]}", **{k: v for k, v in fields.items() if v != ""}
    )


Row = tuple[dict[str, str], float]

_GAUGES = (
    ("state", "0: fine, 1: past its warn line, 2: tried half-open, 3: stopped."),
    ("value", "What the guard saw last, in its own unit."),
    ("warn_line", "Where the guard warns; 0: nowhere."),
    ("stop_line", "Where the guard stops what it guards; 0: nowhere."),
)
_COUNTERS = (
    ("warnings", "How often the guard went from fine past its warn line."),
    ("stops", "How often the guard stopped what it guards."),
)


def rows_of_guards(
    guards: Sequence[GuardStats], tenant_label: Any
) -> Iterator[tuple[str, str, bool, list[Row]]]:
    """(name, help, whether it is a counter, rows) of each metric. tenant_label: of a name."""
    labels = [
        {
            "guard": one.name.guard,
            "tier": one.name.tier,
            "tenant": tenant_label(one.name.tenant) if one.name.tenant else "",
        }
        for one in guards
    ]
    for name, text in (*_GAUGES, *_COUNTERS):
        field = name.removesuffix("_line")
        values = [float(getattr(one, field)) for one in guards]
        counter = (name, text) in _COUNTERS
        yield f"guard_{name}", text, counter, list(zip(labels, values, strict=True))
