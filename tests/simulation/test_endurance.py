"""A budget of writes is spent on the best blocks: a part of a real trace, taken for days."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvstore.core.effects import Copy
from kvstore.core.pools import Slot
from kvstore.model.reasons import Reason
from kvstore.policy.admission import chance_wanted
from kvstore.policy.base import EvictionPolicy
from kvstore.policy.choice import policy_maker
from kvstore.simulate.replay import BLOCK_BYTES, DISK, Replay
from kvstore.simulate.trace import Request
from kvstore.tiers.disk.guard import DAY_HOURS, HOUR_S, Endurance
from tests.simulation.traces import needs_traces, requests

PART = slice(0, 2_500)
"""With fewer, the first minute, in which nothing is refused, is too much of such a day."""
SIZE = (200, 2_000)
DAY_BLOCKS = 3_400
"""Half of what is written without a budget."""
DAYS = 2


class Budgeted(Replay):
    """Over a disk that may take so many blocks a day, and says so, or only stops then.

    choosy: as a daemon does it. share: the largest part of the budget that was used in a day.
    stopped: blocks that were refused.
    """

    def __init__(
        self,
        policy: Callable[[], EvictionPolicy[Slot]],
        day_blocks: int,
        day_ns: int,
        *,
        choosy: bool = True,
    ) -> None:
        self._endurance = Endurance(day_blocks * BLOCK_BYTES)
        self._day_ns = day_ns
        self._choosy = choosy
        self.share = 0.0
        self.stopped = 0
        super().__init__(policy, *SIZE)

    @property
    def _wall_s(self) -> float:
        return self._now_ns / self._day_ns * DAY_HOURS * HOUR_S

    def _serve(self, request: Request) -> None:
        if self._choosy:
            endurance, wall_s = self._endurance, self._wall_s
            day_bytes, rate = endurance.day_bytes(wall_s), endurance.bytes_per_s(wall_s)
            chance = chance_wanted(day_bytes, rate, endurance.budget_bytes_per_day)
            self.core.set_admission(DISK, chance)
        super()._serve(request)

    def _save(self, saves: Sequence[Copy]) -> None:
        assert self.archive is not None
        if self._endurance.stop_reason(self._wall_s):
            self.stopped += len(saves)
            for copy in saves:
                self._end(copy, Reason.DECLINED_GUARD)
            return
        before = self.archive.writes
        super()._save(saves)
        self._endurance.wrote((self.archive.writes - before) * BLOCK_BYTES, self._wall_s)
        budget = self._endurance.budget_bytes_per_day
        if budget:
            self.share = max(self.share, self._endurance.day_bytes(self._wall_s) / budget)


@pytest.mark.slow
@needs_traces
def test_a_budget_goes_further_if_it_is_spent_on_the_best_than_if_it_just_ends() -> None:
    """Fewer writes, more hits, and the stop line is not met."""
    trace = requests("mooncake_conversation")[PART]
    day_ns = (trace[-1].at_ns - trace[0].at_ns) // DAYS
    chosen, ended = (
        Budgeted(policy_maker("hit_density", *SIZE), DAY_BLOCKS, day_ns, choosy=choosy)
        for choosy in (True, False)
    )
    for one in (chosen, ended):
        one.serve(trace)
        rate = one.figures.prefix_token_hit_rate
        print(f"{one.share:.2f} of the budget, {one.stopped} refused, {rate:.2%} hit")
    assert 0.7 < chosen.share < 1
    assert chosen.stopped == 0
    assert ended.stopped > 1_000
    assert chosen.figures.disk_writes < ended.figures.disk_writes
    assert chosen.figures.prefix_token_hit_rate > ended.figures.prefix_token_hit_rate
