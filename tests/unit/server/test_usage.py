"""What the daemon records of its own use."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from kvstore.testing.clock import ManualClock
from kvstore_server.metrics import Metrics
from kvstore_server.usage import usage_record


def test_reviews_are_counted_and_no_space_is_looked_at() -> None:
    """On the event loop, once a minute: there may be many spaces a review. This core has none to
    look at."""
    states = Counter(held=2, approved=1)
    archive = SimpleNamespace(counters={"saved_bytes": 7.0})
    store = SimpleNamespace(
        instance_id=bytes(16),
        core=SimpleNamespace(review_states=lambda: states),
        archives=SimpleNamespace(stats=lambda: {1: archive, 2: archive}),
    )
    record = usage_record(cast(Any, store), Metrics(), ManualClock())
    assert record.evidence is not None
    found = record.evidence["usage"]
    assert found["reviews"] == {"held": 2, "approved": 1}
    assert (found["ssd_written_bytes"], found["audit_mismatches"]) == (14, 0)
    assert found["rss_bytes"] > 0
