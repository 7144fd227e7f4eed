"""What each key is told: from the core, and from an archive where the core has nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.model.reasons import Reason
from kvstore.model.values import KeyExplanation
from kvstore.testing.clock import ManualClock
from kvstore.wire import convert
from kvstore_server.sessions import explain_keys

KEY = bytes(32)


class Archived:
    """A store whose disk has the key, and whose core says `found` of it."""

    def __init__(self, found: KeyExplanation) -> None:
        self.clock = ManualClock()
        self.tiers = [SimpleNamespace(name="host"), SimpleNamespace(name="disk")]
        self.archives = self.core = self
        self._found = found

    async def held_for(self, tenant: str, space_id: int, keys: Sequence[bytes]) -> dict[bytes, int]:
        return dict.fromkeys(keys, 1)

    def explain(self, tenant: str, space_id: int, key: bytes, now_ns: int) -> KeyExplanation:
        return self._found


@pytest.mark.parametrize(
    ("why", "told", "tier"),
    [
        (Reason.MISS_EVICTED, Reason.HIT, "disk"),
        (Reason.MISS_NEVER_STORED, Reason.HIT, "disk"),
        (Reason.MISS_IN_PROGRESS, Reason.MISS_IN_PROGRESS, ""),
        (Reason.HELD_FOR_REVIEW, Reason.HELD_FOR_REVIEW, ""),
    ],
)
def test_what_a_disk_has_is_a_hit_unless_something_keeps_it_from_everybody(
    why: Reason, told: Reason, tier: str
) -> None:
    store = Archived(KeyExplanation(why, -1, 0, 0, -1))
    reply = asyncio.run(explain_keys(cast(Any, store), "a", 1, [KEY]))
    (found,) = reply.keys
    assert (Reason.from_wire(found.reason), found.tier) == (told, tier)
    assert found.reason == convert.reason_to_wire(told)
