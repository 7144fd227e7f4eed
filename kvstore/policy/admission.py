"""How choosy saving to an archive has to be, by its budget of writes.

A policy has blocks saved from a certain chance on that they are asked for again. Where a device may
take only so many bytes a day, that line rises as the budget runs short, so that what is left of it
goes to the blocks that promise the most, and the stop line is rarely met. Looked at is where use
will be in a few hours if writing goes on as it does: a day's budget that is being spent in three
hours is short long before it is used up. Pure.
"""

from __future__ import annotations

AHEAD_S = 3 * 3_600
CALM_SHARE = 0.75
"""Up to this share of the budget, as foreseen, policies decide alone."""
TIGHT_SHARE = 1.1
"""From this one on only what is certain to be asked for is saved. With even writes that is 98 % of
the budget: 24 hours of them are behind, three ahead."""


def chance_wanted(day_bytes: float, bytes_per_s: float, budget_bytes_per_day: float) -> float:
    """0 to 1: the least chance of another use with which a block is worth a write.

    day_bytes: written in the last 24 hours; bytes_per_s: the rate of late; a budget of 0 is none.
    """
    if budget_bytes_per_day <= 0:
        return 0.0
    share = (day_bytes + AHEAD_S * bytes_per_s) / budget_bytes_per_day
    return min(max((share - CALM_SHARE) / (TIGHT_SHARE - CALM_SHARE), 0.0), 1.0)
