"""Saving before it is needed: what would be evicted next, so that nobody waits for its slot; and
before an end what is worth the most. What an archive has aged out is not saved ahead again before
it is used again: where an archive has less room than all of that, it would be written for ever.
What it has and would be saved again is named to it instead, once for each use: else it might age
out what memory is about to drop.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

from kvstore.core.arena import Arena
from kvstore.core.books import Books
from kvstore.core.effects import Wanted
from kvstore.core.moves import Moves
from kvstore.core.pools import Pool, Slot

ABOVE_DISK_SHARE = 0.25
"""Of a pool above a disk tier. Who puts never waits for the disk: what goes next is saved before,
in bursts of so much; what could not be saved until then is dropped.
"""
COLDEST_MAX = 8_192
"""Blocks of a pool that are looked at in one go: about a millisecond."""
HOTTEST_MAX = 1_024
LOOK_EVERY_NS = 500_000_000
MOVING_NS = 20_000_000
"""While blocks are being stored or loaded, it is looked so often at most: they have taken their
slots already, and what they tell of what is used again is not known before they are there.
"""
REST_NS = 500_000_000
"""After saves that failed, with none in between that did not: an archive that takes nothing refuses
all of them at once, and would be asked again as fast as it can say no.
"""


class Ahead:
    """See the module's docstring."""

    def __init__(self, books: Books, moves: Moves) -> None:
        self.books = books
        self.moves = moves
        self._looked: dict[Pool, tuple[int, int]] = {}
        self._seen_ns = 0
        self._made_room = 0
        self._saved = self._failed = 0
        self._rests_until_ns = 0
        self._ending = False

    def save_coldest(self, now_ns: int) -> int:
        """Where room is scarce, saves what policies would evict next, in so far as they would have
        it saved, as many as may be out; how many were begun.
        """
        begun = self.books.moving
        share = self.books.limits.save_ahead_share
        if share and (self._rests(now_ns) or self._waits(now_ns)):
            return 0
        for arena, archive in self._arenas() if share else ():
            ahead_bytes = int(share * arena.capacity_bytes)
            for pool in arena.pools.values():
                free_bytes = len(pool.free) * pool.slot_bytes + arena.room_bytes(pool)
                wanted = min((ahead_bytes - free_bytes) // pool.slot_bytes, COLDEST_MAX)
                if wanted > 0 and self._is_due(pool, arena.evictions, wanted, now_ns):
                    self._save_coldest(pool, archive, wanted)
        return self.books.moving - begun

    def _waits(self, now_ns: int) -> bool:
        """Whether blocks are on their way in, and no save has made room for another since."""
        books = self.books
        saved = books.counters["saved"]
        coming = len(books.flights) > books.moving
        if coming and saved == self._made_room and now_ns - self._seen_ns < MOVING_NS:
            return True
        self._seen_ns, self._made_room = now_ns, saved
        return False

    def _rests(self, now_ns: int) -> bool:
        """Whether saves have failed of late, and none has succeeded since."""
        counters = self.books.counters
        saved, failed = counters["saved"], counters["saves_failed"]
        if saved != self._saved:
            self._rests_until_ns = 0
        elif failed != self._failed:
            self._rests_until_ns = now_ns + REST_NS
        self._saved, self._failed = saved, failed
        return now_ns < self._rests_until_ns

    def _is_due(self, pool: Pool, evictions: int, wanted: int, now_ns: int) -> bool:
        """Whether another look is worth its time: some went since, or it was a while ago."""
        looked = self._looked.get(pool)
        if looked is not None:
            few = evictions - looked[0] < max(wanted // 8, 1)
            if few and now_ns - looked[1] < LOOK_EVERY_NS:
                return False
        self._looked[pool] = evictions, now_ns
        return True

    def _save_coldest(self, pool: Pool, archive: int, wanted: int) -> None:
        at_least = self.books.admission[archive]
        told: dict[int, list[bytes]] = {}
        for slot in islice(pool.policy, wanted):
            # What it was used for since then, the archive knows or has been told.
            if slot.touched_ns <= slot.aged_ns or not pool.policy.admit(slot, at_least):
                continue
            if slot.saved:
                assert slot.space is not None
                told.setdefault(slot.space.id, []).append(slot.key)
                slot.aged_ns = slot.touched_ns
                continue
            if self.books.moves_full:
                del self._looked[pool]  # it is gone on with as soon as some have ended
                break
            self.moves.save(slot, archive)
        self.books.effects += [Wanted(archive, space_id, keys) for space_id, keys in told.items()]

    def save_hottest(self) -> int:
        """Saves the most recently used blocks that no archive has, as many as may be out; how many
        were begun.
        """
        begun = self.books.moving
        if not self._ending:
            self._ending = True
            self._judge_anew()
        for arena, archive in self._arenas():
            unsaved = (
                slot
                for pool in arena.pools.values()
                for region in pool.regions.values()
                for slot in region.slots
                if slot.key and slot.worth_saving()
            )
            for slot in heapq.nlargest(HOTTEST_MAX, unsaved, key=_touched_ns):
                if self.books.moves_full:
                    break
                self.moves.save(slot, archive)
        return self.books.moving - begun

    def _judge_anew(self) -> None:
        """An archive may have room by now for what it has aged out once; what it ages out from here
        on is not saved again.
        """
        for arena, _ in self._arenas():
            for region in arena.regions.values():
                for slot in region.slots:
                    slot.aged_ns = -1

    def _arenas(self) -> Iterator[tuple[Arena, int]]:
        for arena in self.books.pools:
            archive = self.books.archive_below(arena.tier)
            if archive is not None:
                yield arena, archive


def _touched_ns(slot: Slot) -> int:
    return slot.touched_ns
