"""What the tables of settings are written with: a knob, the error for a wrong one, an address."""

from __future__ import annotations

import re

import msgspec

from kvstore.model.reasons import Reason, StartError


def knob(
    what: str,
    *,
    when: str,
    ge: int | None = None,
    le: int | None = None,
    pattern: str | None = None,
) -> msgspec.Meta:
    """Limits of one setting, what it is, and when one would change it."""
    extra = {"when": when}
    if pattern is not None:
        return msgspec.Meta(pattern=pattern, description=what, extra=extra)
    return msgspec.Meta(ge=ge, le=le, description=what, extra=extra)


def wrong(setting: str, detail: str) -> StartError:
    """The error for a setting that cannot be used as it is."""
    return StartError(Reason.START_SETTINGS, detail, setting)


def address(setting: str, text: str) -> tuple[str, int] | None:
    """(host, port) of HOST:PORT, or None of an empty text. Raises StartError if it is neither."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host and ":" not in host and "[" not in host
    if not colon or not (bracketed or plain) or not re.fullmatch(r"\d{1,5}", port):
        raise wrong(setting, f"{text!r} is not HOST:PORT")
    if int(port) > 65535:
        raise wrong(setting, f"port {port} is above 65535")
    return host.strip("[]"), int(port)
