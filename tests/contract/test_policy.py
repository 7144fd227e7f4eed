"""What every eviction policy has to keep, whatever it prefers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvstore.model.reasons import Reason
from kvstore.policy.base import EvictionPolicy
from kvstore.policy.hit_density import HitDensity
from kvstore.policy.lru import Lru
from tests.policy_kit import Block

Policy = EvictionPolicy[Block]
POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru, "hit_density": HitDensity}


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]()


def blocks(count: int) -> list[Block]:
    return [Block(b"%d" % index, depth=index) for index in range(count)]


def evict(policy: Policy) -> Block:
    coldest = policy.coldest()
    assert coldest is not None
    policy.remove(coldest)
    policy.departed(coldest, Reason.MISS_EVICTED, 9)
    return coldest


def test_an_empty_policy_has_no_victim(policy: Policy) -> None:
    assert policy.coldest() is None
    assert (len(policy), list(policy)) == (0, [])


def test_every_candidate_is_evicted_once(policy: Policy) -> None:
    entries = blocks(20)
    policy.insert(entries, 1)
    assert len(policy) == 20
    assert {entry.key for entry in policy} == {entry.key for entry in entries}
    evicted = [evict(policy) for _ in range(20)]
    assert {entry.key for entry in evicted} == {entry.key for entry in entries}
    assert policy.coldest() is None


def test_asking_for_the_coldest_changes_nothing(policy: Policy) -> None:
    policy.insert(blocks(5), 1)
    assert policy.coldest() is policy.coldest()
    assert len(policy) == 5


def test_a_prompt_is_evicted_from_its_tail(policy: Policy) -> None:
    entries = blocks(10)
    policy.insert(entries[::-1], 1)
    for entry in entries:
        entry.hits += 1
        entry.touched_ns = 2
    policy.touch(entries[::-1], 2)
    assert [evict(policy) for _ in range(10)] == entries[::-1]


def test_removing_is_idempotent(policy: Policy) -> None:
    one, two = blocks(2)
    policy.insert([one, two], 1)
    policy.remove(one)
    policy.remove(one)
    assert one not in policy
    assert policy.coldest() is two


def test_a_shelved_entry_is_no_victim_until_it_is_back(policy: Policy) -> None:
    entries = blocks(3)
    policy.insert(entries, 1)
    shelved = policy.coldest()
    assert shelved is not None
    policy.shelve(shelved)
    assert shelved not in policy
    assert evict(policy) is not shelved
    policy.unshelve(shelved)
    policy.unshelve(shelved)
    assert shelved in policy
    assert len(policy) == 2


def test_a_shelved_entry_that_is_touched_is_a_candidate_again(policy: Policy) -> None:
    entries = blocks(3)
    policy.insert(entries, 1)
    shelved = policy.coldest()
    assert shelved is not None
    policy.shelve(shelved)
    policy.touch([shelved], 2)
    assert shelved in policy
    assert len(policy) == 3


def test_answers_about_tiers_are_plain(policy: Policy) -> None:
    (one,) = blocks(1)
    policy.insert([one], 1)
    assert isinstance(policy.admit(one), bool)
    assert isinstance(policy.promote(one, None, 2), bool)
    assert isinstance(policy.promote(one, one, 2), bool)


def test_what_was_asked_for_once_more_is_worth_a_place_that_is_free_or_a_colder_ones(
    policy: Policy,
) -> None:
    """Before anything was learnt."""
    above = policy.beside()
    (cold,) = blocks(1)
    above.insert([cold], 1)
    hot = Block(b"hot", touched_ns=9)
    policy.insert([hot], 9)
    assert above.promote(hot, None, 9)
    assert above.promote(hot, cold, 9)


def test_a_policy_beside_another_has_candidates_of_its_own(policy: Policy) -> None:
    above = policy.beside()
    one, two = blocks(2)
    policy.insert([one], 1)
    above.insert([two], 2)
    assert (list(policy), list(above)) == ([one], [two])
    assert above.coldest() is two


@pytest.mark.parametrize("seed", range(10))
def test_contents_are_what_went_in_and_not_out(policy: Policy, seed: int) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    inside: set[Block] = set()
    shelved: set[Block] = set()
    for step in range(500):
        choice = random.random()
        if choice < 0.4:
            fresh = [Block(b"%d/%d" % (step, i), depth=i) for i in range(random.randint(1, 4))]
            policy.insert(fresh, step)
            inside.update(fresh)
        elif choice < 0.6 and inside:
            used = random.sample(sorted(inside | shelved, key=lambda b: b.key), 1)
            policy.touch(used, step)
            shelved -= set(used)
            inside.update(used)
        elif choice < 0.75 and inside:
            coldest = policy.coldest()
            assert coldest in inside
            policy.shelve(coldest)
            inside.discard(coldest)
            shelved.add(coldest)
        elif choice < 0.85 and shelved:
            back = shelved.pop()
            policy.unshelve(back)
            inside.add(back)
        elif inside:
            inside.discard(evict(policy))
        assert len(policy) == len(inside)
        assert set(policy) == inside
