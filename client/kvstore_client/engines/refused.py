"""The refusal of an engine whose KV cannot be stored; every adapter turns it into "off"."""

from __future__ import annotations

__all__ = ["Refused"]


class Refused(ValueError):
    """This engine's KV cannot be stored; the message says why and what to change."""
