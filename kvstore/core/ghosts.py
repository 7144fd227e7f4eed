"""Ghosts: why names left, for a bounded number of names, so that a miss can be explained."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvstore.model.reasons import Reason

KEY_HEAD_BYTES = 8
"""Enough of a key to tell ghosts of one space apart; a collision only explains a miss wrongly."""


class Ghost(NamedTuple):
    """Why a name left, and when."""

    why: Reason
    at_ns: int


class Ghosts:
    """The last `names_max` names that left, oldest forgotten first."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._ghosts: OrderedDict[tuple[int, bytes], Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def add(self, space_id: int, key: bytes, why: Reason, now_ns: int) -> None:
        """The name left."""
        name = (space_id, key[:KEY_HEAD_BYTES])
        self._ghosts[name] = Ghost(why, now_ns)
        self._ghosts.move_to_end(name)
        if len(self._ghosts) > self._names_max:
            self._ghosts.popitem(last=False)

    def get(self, space_id: int, key: bytes) -> Ghost | None:
        """Why and when the name left, if that is remembered."""
        return self._ghosts.get((space_id, key[:KEY_HEAD_BYTES]))
