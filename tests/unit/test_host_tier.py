"""The host tier's own affairs: stock, capacity, staging, locking, closing."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import shm
from kvstore.model.reasons import KVStoreError, StartError
from kvstore.model.values import STAGING, CoreLimits, Place, Region
from kvstore.shm import HUGE_PAGE_BYTES as HUGE
from kvstore.shm import MappedRegion
from kvstore.tiers.host import HUGE_FAILURES_MAX, HostTier
from kvstore.tiers.stock import NAME, WARM_BYTES

PAGE = shm.PAGE_BYTES
CHUNK = 16 * PAGE
CAPACITY = 4 * CHUNK
HUNG_S = 30


def region_of(region_id: int, total_bytes: int = CHUNK) -> Region:
    slots = (total_bytes - shm.header_bytes(total_bytes // PAGE)) // PAGE
    return Region(region_id, 0, "default", PAGE, slots, shm.header_bytes(slots), total_bytes)


@pytest.fixture
def tier(only_our_own_maps: None) -> Iterator[HostTier]:
    made = HostTier(CAPACITY, region_bytes=CHUNK, mlock="off")
    yield made
    made.close()


def warm(tier: HostTier) -> None:
    while tier.work():
        pass


class Maps:
    """This process's mappings, without those that other tests have left to the collector."""

    strangers: frozenset[str] = frozenset()

    @classmethod
    def read(cls) -> list[str]:
        return [line for line in cls._all() if line not in cls.strangers]

    @classmethod
    def forget_strangers(cls) -> None:
        cls.strangers = frozenset(cls._all())

    @staticmethod
    def _all() -> list[str]:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if f"/memfd:{NAME}" in line]


@pytest.fixture(autouse=True)
def only_our_own_maps() -> None:
    Maps.forget_strangers()


def mappings() -> int:
    return len(Maps.read())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(holds: Callable[[], bool]) -> None:
    """Polls without sleeping: the tier's thread has work of its own to do."""
    deadline = time.monotonic() + HUNG_S
    while not holds():
        assert time.monotonic() < deadline, "hung"
        os.sched_yield()


# ---------------------------------------------------------------- stock


def test_the_stock_fills_the_capacity_and_no_more(tier: HostTier) -> None:
    warm(tier)
    stats = tier.stats()
    assert stats.stock_bytes == stats.prefaulted_bytes == CAPACITY
    assert mappings() == 4


def test_assigning_takes_from_the_stock(tier: HostTier) -> None:
    warm(tier)
    made = mappings()
    tier.assign(region_of(1))
    stats = tier.stats()
    assert (stats.assigned_from_stock, stats.assigned_on_the_spot) == (1, 0)
    assert (stats.assigned_bytes, stats.stock_bytes) == (CHUNK, 3 * CHUNK)
    assert mappings() == made
    assert not tier.work()


def test_a_smaller_region_is_cut_from_the_stock(tier: HostTier) -> None:
    warm(tier)
    tier.assign(region_of(1, CHUNK - 3 * PAGE))
    assert os.fstat(tier.fd(1)).st_size == CHUNK - 3 * PAGE
    assert os.fstat(tier.fd(1)).st_blocks * 512 == CHUNK - 3 * PAGE
    assert tier.stats().prefaulted_bytes == CAPACITY - 3 * PAGE


@pytest.mark.parametrize("total_bytes", [CHUNK + PAGE, CHUNK // 2])
def test_what_does_not_fit_is_made_on_the_spot(tier: HostTier, total_bytes: int) -> None:
    warm(tier)
    tier.assign(region_of(1, total_bytes))
    stats = tier.stats()
    assert stats.assigned_on_the_spot == 1
    assert stats.prefaulted_bytes == CAPACITY
    warm(tier)
    stats = tier.stats()
    assert stats.prefaulted_bytes == stats.assigned_bytes + stats.stock_bytes
    assert stats.assigned_bytes + stats.stock_bytes <= CAPACITY


def test_the_stock_learns_the_size_of_regions(tier: HostTier) -> None:
    tier.assign(region_of(1, 2 * CHUNK))
    warm(tier)
    assert tier.stats().stock_bytes == 2 * CHUNK
    tier.assign(region_of(2, 2 * CHUNK))
    assert tier.stats().assigned_from_stock == 1


def test_small_regions_do_not_fill_the_stock_with_descriptors(tier: HostTier) -> None:
    tier.assign(region_of(1, 2 * PAGE))
    warm(tier)
    assert mappings() == 4  # one assigned, three in stock


def test_memory_of_an_ordinary_region_suits_the_core() -> None:
    limits = CoreLimits()
    capacity = 2**28
    total = limits.region_bytes(capacity)
    tier = HostTier(capacity, region_bytes=total, mlock="off")
    while not tier.stats().stock_bytes:
        assert tier.work()
    tier.assign(region_of(1, total))
    assert tier.stats().assigned_from_stock == 1
    tier.close()


def test_an_open_region_is_faulted_in_beside_its_use(tier: HostTier) -> None:
    tier.assign(region_of(1))
    tier.view(Place(0, 1, 3, 1, 0), PAGE)[:] = 5
    warm(tier)
    assert os.fstat(tier.fd(1)).st_blocks * 512 == CHUNK
    assert (tier.view(Place(0, 1, 3, 1, 0), PAGE) == 5).all()


def test_big_memory_is_faulted_in_by_steps() -> None:
    total = WARM_BYTES + PAGE
    tier = HostTier(total, region_bytes=total, mlock="off")
    assert tier.work()
    assert tier.stats().prefaulted_bytes == WARM_BYTES
    assert tier.stats().stock_bytes == 0
    assert tier.work()
    assert tier.stats().stock_bytes == total
    assert not tier.work()
    tier.close()


# ---------------------------------------------------------------- capacity


def test_a_closed_regions_bytes_count_until_released(tier: HostTier) -> None:
    for region_id in range(4):
        tier.assign(region_of(region_id))
    client = shm.map_region(tier.fd(0), CHUNK, writable=False, populate=False)
    tier.unassign(0)
    warm(tier)
    stats = tier.stats()
    assert (stats.assigned_bytes, stats.closing_bytes, stats.stock_bytes) == (3 * CHUNK, CHUNK, 0)
    assert client.close()
    tier.released(0)
    warm(tier)
    stats = tier.stats()
    assert (stats.closing_bytes, stats.stock_bytes) == (0, CHUNK)


def test_stock_gives_way_to_regions_of_another_size(tier: HostTier) -> None:
    warm(tier)
    tier.assign(region_of(1, 3 * CHUNK))
    warm(tier)
    stats = tier.stats()
    assert stats.assigned_bytes == 3 * CHUNK
    assert stats.stock_bytes <= CHUNK
    assert mappings() == 1 + stats.stock_bytes // CHUNK


def test_memory_in_the_making_gives_way_too() -> None:
    total = WARM_BYTES + PAGE
    tier = HostTier(total, region_bytes=total, mlock="off")
    tier.work()
    tier.assign(region_of(1, total))
    tier.work()
    assert mappings() == 1
    warm(tier)
    stats = tier.stats()
    assert (stats.assigned_bytes, stats.stock_bytes) == (total, 0)
    assert mappings() == 1
    tier.close()


def test_growing(tier: HostTier) -> None:
    warm(tier)
    tier.grow(CAPACITY + CHUNK)
    tier.grow(CHUNK)
    warm(tier)
    assert tier.stats().stock_bytes == tier.stats().capacity_bytes == CAPACITY + CHUNK


# ---------------------------------------------------------------- staging


def test_a_client_writes_staging_and_the_tier_reads_it(tier: HostTier) -> None:
    tier.assign_staging(9, 2 * CHUNK)
    client = shm.map_region(
        tier.fd(9), 2 * CHUNK, writable=True, populate=True, require=shm.STAGING_SEALS
    )
    client.u8[PAGE + 3 :][:5] = 8
    assert (tier.view(Place(STAGING, 9, 0, 0, PAGE + 3), 5) == 8).all()
    assert (tier.staging_view(9, PAGE + 3, 5) == 8).all()
    assert tier.stats().staging_bytes == 2 * CHUNK
    with pytest.raises(PermissionError):
        os.ftruncate(tier.fd(9), 0)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (CHUNK, 1), (0, CHUNK + 1)])
def test_nothing_outside_staging_is_given(tier: HostTier, offset: int, length: int) -> None:
    tier.assign_staging(9, CHUNK)
    with pytest.raises(ValueError, match="are not in staging"):
        tier.staging_view(9, offset, length)


def test_staging_comes_out_of_the_capacity(tier: HostTier) -> None:
    warm(tier)
    tier.assign_staging(9, 2 * CHUNK)
    warm(tier)
    assert tier.stats().stock_bytes == 2 * CHUNK
    tier.unassign(9)
    with pytest.raises(KVStoreError):
        tier.staging_view(9, 0, 1)
    tier.released(9)
    warm(tier)
    assert tier.stats().stock_bytes == CAPACITY


def test_staging_begins_all_zero_though_it_came_from_the_stock(tier: HostTier) -> None:
    warm(tier)
    tier.assign_staging(9, CHUNK)
    assert not tier.staging_view(9, 0, CHUNK).any()
    with pytest.raises(ValueError, match="already"):
        tier.assign_staging(9, CHUNK)


# ---------------------------------------------------------------- closing


def test_closing_returns_everything() -> None:
    before = descriptors()
    tier = HostTier(CAPACITY, region_bytes=CHUNK, mlock="off")
    warm(tier)
    tier.assign(region_of(1))
    tier.assign(region_of(2, CHUNK + PAGE))
    tier.assign_staging(3, CHUNK)
    tier.unassign(1)
    tier.close()
    tier.close()
    assert mappings() == 0
    assert descriptors() == before


def test_unassigning_unmaps_in_the_background(tier: HostTier) -> None:
    tier.assign(region_of(1))
    before = descriptors()
    tier.unassign(1)
    assert descriptors() == before - 1
    (mapping,) = Maps.read()
    assert tier.work()
    assert mapping not in Maps.read()


def test_a_view_that_lives_is_the_last_to_unmap(tier: HostTier) -> None:
    tier.assign(region_of(1))
    view = tier.view(Place(0, 1, 0, 1, 0), PAGE)
    tier.unassign(1)
    warm(tier)
    assert not view.any()
    kept = mappings()
    del view
    assert mappings() == kept - 1


# ---------------------------------------------------------------- start, thread, lock


def test_a_started_tier_has_one_region_at_once_and_fills_itself() -> None:
    tier = HostTier(CAPACITY, region_bytes=CHUNK, mlock="off")
    threads = threading.active_count()
    tier.start()
    assert tier.stats().stock_bytes >= CHUNK
    until(lambda: tier.stats().stock_bytes == CAPACITY)
    tier.assign(region_of(1))
    tier.unassign(1)
    tier.released(1)
    until(lambda: tier.stats().stock_bytes == CAPACITY)
    tier.close()
    assert threading.active_count() == threads
    assert mappings() == 0


class Joining:
    """In the kernel's place. failing: numbers of the attempts that fail."""

    def __init__(self, failing: Collection[int] = ()) -> None:
        self.ranges: list[tuple[int, int]] = []
        self._failing = failing

    def __call__(self, region: MappedRegion, start: int, length: int) -> tuple[int, str]:
        whole = -(-start // HUGE) * HUGE, (start + length) // HUGE * HUGE
        if whole[1] <= whole[0]:
            return 0, ""
        self.ranges.append(whole)
        failed = len(self.ranges) - 1 in self._failing
        return (0, "too scattered") if failed else (whole[1] - whole[0], "")


def huge_tier(joining: Joining, pages: int, **more: Any) -> HostTier:
    """One region of so many huge pages and one small one."""
    total = pages * HUGE + PAGE
    return HostTier(total, region_bytes=total, mlock="off", join=joining, **more)


def test_each_huge_page_is_joined_once_when_it_is_there(only_our_own_maps: None) -> None:
    joining = Joining()
    tier = huge_tier(joining, 3)
    warm(tier)
    assert joining.ranges == [(n * HUGE, (n + 1) * HUGE) for n in range(3)]
    assert (tier.stats().huge_bytes, tier.stats().huge_reason) == (3 * HUGE, "")
    tier.assign(region_of(1, 2 * HUGE + PAGE))
    assert tier.stats().huge_bytes == 2 * HUGE
    tier.close()


def test_huge_pages_are_given_up_after_failures_in_a_row(only_our_own_maps: None) -> None:
    often = Joining({*range(HUGE_FAILURES_MAX - 1), *range(HUGE_FAILURES_MAX, 40)})
    tier = huge_tier(often, 2 * HUGE_FAILURES_MAX + 3)
    warm(tier)
    assert len(often.ranges) == 2 * HUGE_FAILURES_MAX
    stats = tier.stats()
    assert (stats.huge_bytes, stats.huge_reason) == (HUGE, "too scattered")
    assert stats.prefaulted_bytes == stats.capacity_bytes
    tier.close()


def test_no_huge_pages_if_they_are_off(only_our_own_maps: None) -> None:
    joining = Joining()
    tier = huge_tier(joining, 2, huge_pages="off")
    warm(tier)
    assert joining.ranges == []
    assert (tier.stats().huge_bytes, tier.stats().huge_reason) == (0, "host.huge_pages is off")
    tier.close()


def test_while_it_is_paused_nothing_is_faulted_in(tier: HostTier) -> None:
    tier.assign(region_of(1))
    tier.pause(True)
    while tier.work():
        pass
    assert (tier.stats().prefaulted_bytes, tier.stats().stock_bytes) == (0, 0)
    tier.pause(False)
    while tier.work():
        pass
    assert tier.stats().prefaulted_bytes == CAPACITY


def no_rights(path: str) -> str | None:
    return "CapEff:\t0000000000000000\n" if path == "/proc/self/status" else None


def test_memory_that_may_not_be_locked_is_used_unlocked() -> None:
    tier = HostTier(
        CAPACITY, region_bytes=CHUNK, mlock="auto", read=no_rights, memlock=lambda: CAPACITY - 1
    )
    tier.start()
    stats = tier.stats()
    assert stats.locked_bytes == 0
    assert "RLIMIT_MEMLOCK" in stats.lock_reason
    tier.close()


def test_memory_that_must_be_locked_and_may_not_stops_the_start() -> None:
    tier = HostTier(
        CAPACITY, region_bytes=CHUNK, mlock="require", read=no_rights, memlock=lambda: 0
    )
    with pytest.raises(StartError, match="RLIMIT_MEMLOCK") as refused:
        tier.start()
    assert refused.value.setting == "host.mlock"
    assert mappings() == 0


def test_locked_memory_is_counted_or_the_reason_is_told() -> None:
    tier = HostTier(CAPACITY, region_bytes=CHUNK, mlock="auto", memlock=lambda: None)
    tier.start()
    until(lambda: tier.stats().stock_bytes == CAPACITY)
    stats = tier.stats()
    assert (stats.locked_bytes == CAPACITY) == (stats.lock_reason == "")
    tier.close()


def test_off_does_not_lock(tier: HostTier) -> None:
    tier.start()
    assert tier.stats().locked_bytes == 0
    assert tier.stats().lock_reason == "host.mlock is off"


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_that_cannot_be_had_stops_the_start(tier: HostTier) -> None:
    with no_more_descriptors(), pytest.raises(StartError, match="Too many open files") as refused:
        tier.start()
    assert refused.value.setting == "host.capacity_bytes"
    assert mappings() == 0


def test_a_stock_that_cannot_be_filled_says_so_and_regions_still_come(tier: HostTier) -> None:
    with no_more_descriptors():
        warm(tier)
    assert "Too many open files" in tier.stats().prefault_error
    tier.assign(region_of(1))
    assert tier.stats().assigned_on_the_spot == 1
    assert not tier.work()


def test_a_thread_that_hangs_in_unmapping_does_not_keep_the_tier_from_closing() -> None:
    """As in a GPU that never answers, when a region's memory is to be unpinned."""
    tier = HostTier(CAPACITY, region_bytes=CHUNK, mlock="off")
    hung, go_on = threading.Event(), threading.Event()

    def unmapping(region_id: int) -> None:
        hung.set()
        go_on.wait(HUNG_S)

    tier.unmapping = unmapping
    tier.start()
    tier.assign(region_of(1))
    tier.unassign(1)
    assert hung.wait(HUNG_S)
    thread = tier._thread
    assert thread is not None
    tier.close(patience_s=0.01)
    assert thread.is_alive()
    go_on.set()
    thread.join(HUNG_S)
    assert not thread.is_alive()
