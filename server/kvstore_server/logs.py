"""Logging of the daemon: one JSON object or one line of text a record, on the standard logging
module.

Facts go in as keyword fields, not into the sentence: `event(log, INFO, "ready",
http="127.0.0.1:9472")`. What may happen a thousand times a second goes through `Throttled`. No
token, no whole key, no secret is ever a field.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, Literal, TextIO

from kvstore.clock import Clock

THROTTLE_S = 60.0
KINDS_MAX = 256
_FIELDS = "kvstore_fields"


def configure(
    level: Literal["debug", "info", "warning", "error"],
    log_format: Literal["json", "text"],
    stream: TextIO = sys.stderr,
) -> None:
    """Sends every record of this process to `stream`. Called once, by the daemon's main."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(callers_may_leave)


def callers_may_leave(record: logging.LogRecord) -> bool:
    """False for what gRPC says, with a traceback, whenever a caller has given up by the time that
    its answer is sent, or a stop ends a call that has just begun: these are no errors.
    """
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ not in ("ExecuteBatchError", "CancelledError")


def event(log: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Logs `message` with facts. Values are shown as JSON; what JSON has no form for, as text."""
    if log.isEnabledFor(level):
        log.log(level, message, extra={_FIELDS: fields}, stacklevel=2)


class JsonFormatter(logging.Formatter):
    """{"time": ..., "level": ..., "logger": ..., "event": message, then the fields}."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        for name, value in _fields(record).items():
            entry.setdefault(name, value)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message, then the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        shown = [
            f"{name}={json.dumps(value, default=str)}" for name, value in _fields(record).items()
        ]
        # A line's end inside a message would let a client write log lines of its own.
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        line = " ".join([_time(record), f"{record.levelname:7}", message, *shown])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class Throttled:
    """Logs the first record of a kind, then at most one a minute with the number of those left
    out."""

    def __init__(self, log: logging.Logger, clock: Clock, every_s: float = THROTTLE_S) -> None:
        self._log = log
        self._clock = clock
        self._every_ns = int(every_s * 1e9)
        self._kinds: dict[str, list[int]] = {}  # kind -> [next time in ns, left out]

    def warning(self, kind: str, message: str, **fields: Any) -> None:
        """A warning of this kind. Kinds beyond 256 share one."""
        now_ns = self._clock.monotonic_ns()
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            kind = "other"
        state = self._kinds.setdefault(kind, [now_ns, 0])
        if now_ns < state[0]:
            state[1] += 1
            return
        if state[1]:
            fields["left_out"] = state[1]
        state[:] = [now_ns + self._every_ns, 0]
        event(self._log, logging.WARNING, message, **fields)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, _FIELDS, {})
    return fields
