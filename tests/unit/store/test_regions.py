"""Regions: closed ones wait for who holds them; what cannot be made now is made later."""

from __future__ import annotations

import os

import pytest

from kvstore.model.reasons import Reason
from kvstore.store.holders import Holders
from kvstore.testing.workload import fingerprint
from tests.unit.store.stand import BLOCK, STAGING_BLOCKS, Stand, keys

CHAIN = keys(8)


def test_a_region_without_holders_is_gone_when_it_is_closed() -> None:
    gone: list[int] = []
    asked: list[int] = []
    holders = Holders(gone.append)
    holders.unmap_listeners.append(asked.append)
    holders.close(7)
    assert (gone, asked) == ([7], [])


def test_a_closed_region_is_gone_with_its_last_holder() -> None:
    gone: list[int] = []
    asked: list[int] = []
    holders = Holders(gone.append)
    holders.unmap_listeners.append(asked.append)
    for _ in range(3):
        holders.added(7)
    holders.gone(7)
    holders.close(7)
    assert (gone, asked) == ([], [7])
    holders.gone(7)
    assert gone == []
    holders.gone(7)
    assert gone == [7]


def test_a_region_that_all_have_left_is_not_gone_before_it_is_closed() -> None:
    gone: list[int] = []
    holders = Holders(gone.append)
    holders.added(7)
    holders.gone(7)
    assert gone == []
    holders.close(7)
    assert gone == [7]


def test_staging_counts_as_used_until_its_process_has_let_go(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    reserved = stand.reserve(session, space, CHAIN)
    staging = stand.store.staging_fd(session.id)
    assert staging is not None
    region_id, total_bytes, fd = staging
    assert region_id == reserved.staging_region
    assert os.fstat(fd).st_size == total_bytes
    stand.store.holder_added(region_id)
    asked: list[int] = []
    stand.store.unmap_listeners.append(asked.append)
    used_bytes = stand.core.stats().pools[0].used_bytes
    stand.store.end_session(session.id)
    assert stand.core.stats().pools[0].used_bytes == used_bytes
    assert asked == [region_id]
    assert stand.host.stats().closing_bytes == total_bytes
    assert stand.core.stats().pools[0].closing_bytes == total_bytes
    stand.store.holder_gone(region_id)
    assert stand.host.stats().closing_bytes == 0
    assert stand.core.stats().pools[0].used_bytes == used_bytes - total_bytes


def test_memory_goes_from_one_model_to_another_only_when_it_was_let_go(stand: Stand) -> None:
    """A full pool: regions of the first model are closed for the second one, which waits until
    the process that has them mapped has unmapped them.
    """
    session = stand.attach()
    small = stand.open(session)
    first = 0
    while stand.core.stats().pools[0].evictions == 0:
        stand.put(session, small, keys(STAGING_BLOCKS, f"prompt {first}"))
        first += 1
    asked: list[int] = []
    stand.store.unmap_listeners.append(asked.append)
    regions = {region.id for region in stand.store.regions_of("a")}
    for region_id in regions:
        stand.store.holder_added(region_id)
    large = stand.open(session, fingerprint(block_tokens=64))
    refused = stand.reserve(session, large, CHAIN[:1])
    assert refused.lease_id == 0
    assert refused.reason in (Reason.NO_SPACE, Reason.STAGING_BUSY)
    assert asked
    assert set(asked) <= regions
    for region_id in list(asked):
        assert stand.store.region_fd(region_id, "a") is None
        stand.store.holder_gone(region_id)
    stand.settle()
    reserved = stand.reserve(session, large, CHAIN[:1])
    assert reserved.wanted == [0]
    assert reserved.part_bytes == 4 * BLOCK
    for region_id in regions - set(asked):
        stand.store.holder_gone(region_id)


def test_a_region_that_cannot_be_made_is_made_by_a_later_tick(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    session = stand.attach()
    space = stand.open(session)
    stand.host.broken = True
    reserved = stand.reserve(session, space, CHAIN)
    assert reserved.lease_id
    assert stand.store.staging_fd(session.id) is None
    regions = stand.store.regions_of("a")
    assert regions
    assert [stand.store.region_fd(region.id, "a") for region in regions] == [None] * len(regions)
    stand.pass_time(1)
    assert len([r for r in caplog.records if "cannot be made yet" in r.message]) == 1 + len(regions)
    stand.host.broken = False
    stand.pass_time(1)
    assert stand.store.staging_fd(session.id) is not None
    assert all(stand.store.region_fd(region.id, "a") is not None for region in regions)
    stand.fill(reserved, CHAIN)
    assert stand.run(stand.commit(session, reserved.lease_id)).visible == 8
    stand.assert_right(stand.run(stand.acquire(session, space, CHAIN)), CHAIN)


def test_a_region_that_was_never_made_can_be_closed(stand: Stand) -> None:
    session = stand.attach()
    space = stand.open(session)
    stand.host.broken = True
    reserved = stand.reserve(session, space, CHAIN)
    stand.store.end_session(session.id)
    stand.host.broken = False
    stand.pass_time(1)
    assert stand.host.stats().staging_regions == 0
    assert not stand.core.is_reserved(session.id, reserved.lease_id)
