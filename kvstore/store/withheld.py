"""Which requests of a session were held out, so that what they ask for next is not loaded either.

By the engine's request id, the latest ones. One instance a session.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.model.reasons import Reason

REQUESTS_MAX = 1_024
"""Remembered; a request that has none of its own name is not."""


class Withheld:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[str, Reason] = OrderedDict()

    def note(self, request_id: str, reason: Reason) -> None:
        """A lookup of this request was held out."""
        if request_id:
            self._reasons[request_id] = reason
            self._reasons.move_to_end(request_id)
            if len(self._reasons) > REQUESTS_MAX:
                self._reasons.popitem(last=False)

    def served(self, request_id: str) -> None:
        """A later lookup under this name was not held out."""
        self._reasons.pop(request_id, None)

    def why(self, request_id: str) -> Reason | None:
        """Why nothing is loaded for this request; None: it was not held out."""
        return self._reasons.get(request_id) if request_id else None
