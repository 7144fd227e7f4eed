"""A tenant that asks ten times as much takes little from another: by the production core, on memory
alone and with a disk below it, with both policies. `python -m tests.simulation.fairness` prints the
figures, and those of a scan above a disk, which take longest.
"""

from __future__ import annotations

import pytest

from kvstore.policy.choice import NAMES
from tests.simulation.fairness import LOSS_MAX, figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disk", "scanning"),
    [
        pytest.param(False, False, id="host-chats"),
        pytest.param(False, True, id="host-scan"),
        pytest.param(True, False, id="disk-chats"),
    ],
)
@pytest.mark.parametrize("policy", NAMES)
def test_a_flood_costs_another_tenant_five_percent_at_most(
    policy: str, disk: bool, scanning: bool
) -> None:
    row = figures(policy, disk=disk, scanning=scanning)
    assert row.alike > 0.2, "there is something to lose"
    assert row.loss <= LOSS_MAX, row


@pytest.mark.slow
def test_what_is_one_tenants_is_not_kept_apart() -> None:
    row = figures("lru", disk=False, scanning=False, apart=False)
    assert row.loss > 4 * LOSS_MAX, "a flood is one that takes, where nothing stands against it"
