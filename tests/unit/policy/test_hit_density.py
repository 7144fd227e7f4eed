"""Hit density: what it learns, whom it evicts for it, what it writes to disk, what it remembers."""

from __future__ import annotations

from bisect import bisect_right
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.reasons import Reason
from kvstore.policy.history import PLACE_BYTES, USES_MAX, History, Past
from kvstore.policy.hit_density import EVIDENCE_MIN, KEEPS_MAX_NS, WATCHED_MIN_NS, HitDensity
from kvstore.policy.reuse import BINS, EDGES_NS, MARKS_MAX, Curve
from tests.policy_kit import Block

SECOND = 10**9


def named(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


class Stand:
    """A policy, and blocks that come, are used and go as the core has it."""

    def __init__(self, policy: HitDensity[Block] | None = None) -> None:
        self.policy: HitDensity[Block] = policy or HitDensity()
        self.now_ns = 0

    def come(self, number: int, tokens: int = 1_000) -> Block:
        block = Block(named(number), prompt_tokens=tokens, touched_ns=self.now_ns)
        self.policy.insert([block], self.now_ns)
        return block

    def use(self, block: Block) -> None:
        self.policy.use([block], self.now_ns)
        block.touched_ns = self.now_ns

    def go(self) -> Block:
        block = self.policy.coldest()
        assert block is not None
        self.policy.departed(block, Reason.MISS_EVICTED, self.now_ns)
        self.policy.remove(block)
        return block

    def teach(self, rounds: int = 400) -> None:
        """Short prompts are asked for again after a second, long ones never."""
        for number in range(rounds):
            self.now_ns += SECOND
            short = self.come(10**6 + number, 1_000)
            self.come(2 * 10**6 + number, 100_000)
            self.now_ns += SECOND
            self.use(short)
            while len(self.policy) > 20:
                self.go()


def test_before_anything_was_learnt_it_is_lru() -> None:
    stand = Stand()
    blocks = []
    for number in range(20):
        stand.now_ns += SECOND
        blocks.append(stand.come(number, 1_000 if number % 2 else 100_000))
    assert [stand.go() for _ in range(20)] == blocks


def test_what_is_never_asked_for_again_goes_first() -> None:
    stand = Stand()
    stand.teach()
    while len(stand.policy):
        stand.go()
    short = stand.come(1, 1_000)
    stand.now_ns += SECOND // 2
    long = stand.come(2, 100_000)
    assert stand.go() is long, "although it is younger"
    assert stand.go() is short


def test_only_what_will_be_asked_for_is_worth_a_write() -> None:
    stand = Stand(HitDensity(reach=10))
    stand.teach(rounds=2 * EVIDENCE_MIN)
    assert stand.policy.admit(stand.come(1, 1_000))
    assert not stand.policy.admit(stand.come(2, 100_000))


def test_of_what_is_not_known_everything_is_written() -> None:
    stand = Stand(HitDensity(reach=10))
    assert stand.policy.admit(stand.come(1))


def test_who_had_no_time_to_ask_again_is_not_refused() -> None:
    """Prompts of many small blocks, all within a minute; after it they were forgotten, it seems."""
    stand = Stand(HitDensity(reach=10))
    for number in range(4 * EVIDENCE_MIN):
        stand.now_ns += SECOND // 40
        assert stand.policy.admit(stand.come(number))
    stand.now_ns += WATCHED_MIN_NS
    assert not stand.policy.admit(stand.come(4 * EVIDENCE_MIN))


def test_a_block_that_returns_is_known_by_its_past() -> None:
    stand = Stand()
    block = stand.come(1)
    stand.use(block)
    stand.now_ns += 10 * SECOND
    assert stand.go() is block
    assert stand.come(1).uses == 3
    assert stand.come(2).uses == 1


def test_touching_is_not_using() -> None:
    stand = Stand()
    block, other = stand.come(1), stand.come(2)
    stand.policy.touch([block], SECOND)
    assert block.uses == 1
    block.touched_ns = SECOND
    assert stand.go() is other


HOURS_LATER_NS = 10**15


@given(st.lists(st.tuples(st.integers(0, BINS - 1), st.integers(1, 50)), max_size=20))
def test_chances_and_densities_are_what_they_say(waits: list[tuple[int, int]]) -> None:
    curve = Curve()
    total = sum(count for _, count in waits)
    for _ in range(2 * total):
        curve.begin(0)
    for bin_, count in waits:
        for _ in range(count):
            curve.end(([0, *EDGES_NS])[bin_])
    curve._refresh(HOURS_LATER_NS)
    assert all(density >= 0 for density in curve.densities(HOURS_LATER_NS))
    wide = [curve.chance(age, 10**15, HOURS_LATER_NS) for age in (0, *EDGES_NS)]
    assert all(0 <= one <= 1 for one in wide)
    if total:
        assert wide[0] == pytest.approx(0.5)
        assert curve.chance(0, 10**9, HOURS_LATER_NS) <= wide[0]


def test_who_began_just_now_says_nothing_of_what_happens_late() -> None:
    curve = Curve()
    for _ in range(100):
        curve.begin(0)
    curve.densities(0)
    for _ in range(50):
        curve.end(100 * SECOND)
    before = curve.chance(80 * SECOND, 1_000 * SECOND, 200 * SECOND)
    for _ in range(900):
        curve.begin(200 * SECOND)
    curve._refresh(200 * SECOND)
    after = curve.chance(80 * SECOND, 1_000 * SECOND, 200 * SECOND)
    assert before == pytest.approx(0.5)
    assert after == pytest.approx(before), "as ten times as many just came"
    assert curve.chance(0, SECOND, 200 * SECOND) == 0


@pytest.mark.parametrize("seed", range(3))
def test_marks_of_a_curve_are_bounded_and_tell_how_many_had_begun(seed: int) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    curve, now_ns = Curve(), 0
    times_ns: list[int] = []
    for _ in range(40_000):
        now_ns += random.randrange(SECOND)
        curve.begin(now_ns)
        times_ns.append(now_ns)
        if random.random() < 0.03:
            curve._refresh(now_ns)
        assert len(curve._times_ns) <= MARKS_MAX + 1
    curve._refresh(now_ns)
    assert curve._times_ns == sorted(set(curve._times_ns))
    for edge_ns in EDGES_NS:
        wanted = bisect_right(times_ns, now_ns - edge_ns)
        assert abs(curve._accesses_until(now_ns - edge_ns) - wanted) < 10 + edge_ns / SECOND / 8


def test_what_is_asked_for_late_is_not_taken_for_rare_while_little_was_watched() -> None:
    """Blocks return after 100 s, half of them; the stream goes on all the time."""
    curve = Curve()
    for second in range(150):
        for _ in range(10):
            curve.begin(second * SECOND)
        if second >= 100:
            for _ in range(5):
                curve.end(100 * SECOND)
        curve.densities(second * SECOND)
    curve._refresh(150 * SECOND)
    assert curve.chance(0, 200 * SECOND, 150 * SECOND) == pytest.approx(0.5, abs=0.15)


def test_history_remembers_the_last_names_in_bounded_room() -> None:
    history = History()
    assert history.take(named(1)) is None
    history.resize(1_000)
    for number in range(1, 5_000):
        history.put(named(number), Past(number * SECOND, number, number % 16))
    assert history.table_bytes <= 1.3 * PLACE_BYTES * 1_000
    assert history.take(named(1)) is None
    past = history.take(named(4_990))
    assert past is not None
    assert abs(past.asked_ns - 4_990 * SECOND) < SECOND // 10
    assert (past.uses, past.grade) == (USES_MAX, 4_990 % 16)
    assert history.take(named(4_990)) is None, "it is taken once"


@pytest.mark.parametrize("turn", [0, 2**32 - 1_000])
def test_history_reaches_back_so_many_departures_and_no_farther(turn: int) -> None:
    """Also where names were taken, so that there would be room for older ones; and where the count
    of departures begins anew.
    """
    history = History()
    history.resize(1_000)
    history._turn = turn
    for number in range(3_000):
        history.put(named(number), Past(number * SECOND, 1, 0))
        if number % 3:
            history.take(named(number))
    known = [number for number in range(0, 3_000, 3) if history.take(named(number)) is not None]
    assert min(known) >= 2_000
    assert len(known) > 0.97 * 333


def test_a_larger_history_still_knows_what_the_smaller_one_knew() -> None:
    history = History()
    history.resize(160)
    history.put(named(7), Past(SECOND, 2, 5))
    history.resize(1_600)
    past = history.take(named(7))
    assert past is not None
    assert past.uses == 2
    for number in range(8, 400):
        history.put(named(number), Past(SECOND, 1, 0))
    assert history.table_bytes == PLACE_BYTES * 2_000, "the old table is gone"


def test_what_goes_to_another_pool_is_no_past() -> None:
    stand = Stand()
    block = stand.come(1)
    stand.policy.departed(block, Reason.OK, SECOND)
    stand.policy.remove(block)
    assert stand.come(1).uses == 1


def test_only_what_is_expected_sooner_than_the_coldest_of_a_faster_pool_rises() -> None:
    stand = Stand()
    stand.teach(rounds=2 * EVIDENCE_MIN)
    above = stand.policy.beside()
    short, long = stand.come(1, 1_000), stand.come(2, 100_000)
    for below, over in ((short, long), (long, short)):
        above.insert([over], stand.now_ns)
        assert above.promote(below, over, stand.now_ns) == (below is short)
        above.remove(over)
    assert above.promote(short, None, stand.now_ns)
    assert not above.promote(long, None, stand.now_ns), "not even into a free place"


def test_policies_beside_each_other_learn_together() -> None:
    stand = Stand(HitDensity(reach=10))
    above = stand.policy.beside()
    stand.teach(rounds=2 * EVIDENCE_MIN)
    assert above.admit(stand.come(1, 1_000))
    assert not above.admit(stand.come(2, 100_000))
    block = stand.come(3)
    stand.policy.departed(block, Reason.OK, stand.now_ns)
    stand.policy.remove(block)
    above.insert([block], stand.now_ns)
    assert above.coldest() is block
    above.departed(block, Reason.MISS_EVICTED, stand.now_ns)
    assert stand.come(3).uses == 2, "whatever pool it left"


def keeps_ns(*, two_pools: bool) -> int:
    """How long the archive is taken to keep a block, where every other one that comes is loaded
    from there, and each leaves for it at the end, out of the only pool or out of the one below.
    """
    policy: HitDensity[Block] = HitDensity(reach=10)
    below = policy.beside() if two_pools else policy
    inside: list[Block] = []
    for number in range(4_000):
        now_ns = number * SECOND
        block = Block(named(number), prompt_tokens=1_000, touched_ns=now_ns, saved=bool(number % 2))
        policy.insert([block], now_ns)
        if two_pools:
            policy.departed(block, Reason.OK, now_ns)
            policy.remove(block)
            below.insert([block], now_ns)
        inside.append(block)
        if len(inside) > 50:
            gone = inside.pop(0)
            below.departed(gone, Reason.MISS_EVICTED, now_ns)
            below.remove(gone)
    return policy._keeps_ns


def test_an_archive_keeps_a_block_as_long_below_two_pools_as_below_one() -> None:
    one, two = keeps_ns(two_pools=False), keeps_ns(two_pools=True)
    assert one < KEEPS_MAX_NS / 2
    assert one / 2 < two < one * 2
