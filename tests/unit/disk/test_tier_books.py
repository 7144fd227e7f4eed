"""The disk tier's books between any two holds of their lock, where other threads look."""

from __future__ import annotations

import threading
from types import TracebackType

import pytest

from kvstore.tiers.disk.ring import Slot
from kvstore.tiers.disk.volume import Volume
from tests.unit.disk.bench import BLOCK, SECOND, SPACE, DiskBench, key, keys, room


class Looking:
    """The lock of a volume's books. Whoever lets it go leaves nothing that a reader who comes then
    could not read.
    """

    def __init__(self, volume: Volume) -> None:
        self.looks = 0
        self._volume = volume
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in range(120):
            entry = self._volume.catalog.get(SPACE, key(number))
            if entry is not None:
                slot = Slot(entry.segment, entry.slot)
                assert slot.segment in self._volume.segments
                self._volume.ring.pin(slot)  # KeyError: it is known, and its slot is nobody's
                self._volume.ring.unpin(slot)
                self.looks += 1
        self._lock.release()


@pytest.fixture
def looked_at() -> DiskBench:
    bench = DiskBench(capacity_bytes=room(40))
    assert bench.tier.volume is not None
    bench.tier.volume.books = Looking(bench.tier.volume)  # type: ignore[assignment]
    return bench


def test_what_makes_room_is_known_no_longer_when_it_is_chosen(looked_at: DiskBench) -> None:
    for number in range(0, 120, 4):
        assert looked_at.save([key(number + at) for at in range(4)]) == [True] * 4
    assert looked_at.count("evictions") > 40


def test_what_a_smaller_capacity_has_no_room_for_is_known_no_longer(looked_at: DiskBench) -> None:
    looked_at.save(keys(30))
    looked_at.tier.capacity_bytes = room(12)
    looked_at.pass_time(SECOND)
    assert 0 < len(looked_at.find(keys(30))) < 16


def test_whole_segments_that_change_hands_are_known_no_longer(looked_at: DiskBench) -> None:
    looked_at.save(keys(60))
    for number in range(4):
        block = looked_at.block(key(number, "long"), length=3 * BLOCK)
        looked_at.tier.save_batch([block])
    looked_at.tier.forget([(SPACE, key(1))])
    assert looked_at.count("evictions") > 0
