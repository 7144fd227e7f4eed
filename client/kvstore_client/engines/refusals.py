"""Tells in the log why an engine gets nothing of what it looks up: the first thing that is asked.
Each kind of reason once.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from kvstore.model.reasons import Reason
from kvstore_client.results import Hit, Presence

__all__ = ["Refusals"]

TOLD_MAX: Final = 64
"""Kinds of refusals that are logged."""


class Refusals:
    """For several threads. log: of whoever looks up."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, found: Hit | Presence) -> None:
        """Logs the reason unless it is an ordinary one (a miss, or none), or was told before."""
        ordinary = found.reason.is_miss and found.reason is not Reason.MISS_INCOMPATIBLE
        if ordinary or found.reason is Reason.OK:
            return
        fields = "; ".join(str(difference) for difference in found.differences)
        kind = f"{found.reason.name} {fields}"
        with self._lock:
            if kind in self._told or len(self._told) >= TOLD_MAX:
                return
            self._told.add(kind)
        self._log.warning(
            "kvstore: a lookup found nothing. %s: %s %s",
            found.reason.name,
            found.detail or found.reason.text,
            fields,
        )
