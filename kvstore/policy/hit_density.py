"""Hit density: keeps what promises the most uses for the time that it takes up room.

Blocks are sorted into 16 classes by how often they were asked for (once, 2-3, 4-8, more; also while
they were not here) and by the length of the prompt that asked last (to 2,048 tokens, 8,192, 32,768,
more). Each class learns how its blocks are used again (`reuse`), and is kept in the order of last
use, tail first. The victim is the one of the 16 oldest blocks whose density at its age is lowest;
only blocks that no block here hangs on count, so what is left of a prompt is a prefix. With one
class, or before anything was learnt, this is LRU.

Asked for is what a reader acquires and what comes in anew; a writer who offers a prompt again only
keeps it warm. What is needed: 16 histograms, an order entry a block (about 130 bytes beside the
slot itself), 128 bytes a block of history (`history`), the archive's blocks included. Evicting
looks at 16 blocks; using one is O(1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import merge
from math import inf
from typing import Generic

from kvstore.model.reasons import Reason
from kvstore.policy.base import E
from kvstore.policy.history import USES_MAX, History, Past
from kvstore.policy.reuse import EDGES_NS, Curve

CLASSES = 16
HISTORY_SHARE = 6.0
"""Departures that the history reaches back, for each block that can be had. Chat gains up to 8,
agents in small pools lose from 2 on."""
HISTORY_MIN = 1 << 12
"""For a small pool, too: 87 kB."""
RESIZE_EVERY = 256
EVIDENCE_MIN = 256
"""Accesses of a class, before its chances say anything."""
WATCHED_MIN_NS = 60 * 10**9
"""Since the first of them, before a write is refused: one long prompt of small blocks is evidence
enough by number, and nobody had the time to ask again.
"""
ESTIMATE_AFTER = 512
"""Writes between two estimates of how long the archive keeps a block."""
KEEPS_MAX_NS = 4_096 * 10**9
RANK_NS = 50_000_000
"""Densities are looked up anew for all classes when so much time went by."""
_NOBODY = (inf, 0, 0)
ADMIT_CHANCE = 0.2
"""A block is worth a write to the archive if at least so many of its like are asked for again."""
PROMOTE_CHANCE = 0.2
"""A block is worth a copy into a free place of a faster pool if at least so many of its like are
asked for again."""
PROMOTE_GAIN = 1.25
"""How much denser than its victim it has to be: an exchange is two copies. More saves little."""
HALVE_AFTER = 1 << 20
"""Accesses, and 16 for each block that is here: then all counts are halved."""
_GRADE_OF_USES = [0, 0, 4, 4, 8, 8, 8, 8, 8] + [12] * (USES_MAX - 8)


class HitDensity(Generic[E]):
    """An `EvictionPolicy`. See the module's docstring.

    reach: blocks that can be had, of which the pool holds one: 11 over an archive of ten times its
    size. admit_chance: 0 has everything written to the archive.
    """

    def __init__(self, reach: float = 1.0, admit_chance: float = ADMIT_CHANCE) -> None:
        self._orders: list[OrderedDict[E, None]] = [OrderedDict() for _ in range(CLASSES)]
        self._curves = [Curve() for _ in range(CLASSES)]
        self._history = History()
        self._history_share = HISTORY_SHARE * reach
        self._admit_chance = admit_chance
        self._family = [self]
        """Itself, and the policies of the same blocks in other tiers, which learn together."""
        self._accesses = 0
        """In the whole family; counted in its first member."""
        self._departures = 0
        self._inside = 0
        """Blocks that came and have not departed, candidates or not."""
        self._now_ns = 0
        self._ranks: list[tuple[float, int, int]] = [_NOBODY] * CLASSES
        """(density, last use, class) of the oldest of each class, where nothing is `changed`."""
        self._changed = bytearray(b"\1" * CLASSES)
        self._ranked_ns = 0
        self._below = reach - 1
        self._written = 0
        """Blocks that left for the archive, less those that had come from there; as the two below,
        of the whole family, in its first member."""
        self._estimated_ns = 0
        self._keeps_ns = KEEPS_MAX_NS

    # ------------------------------------------------------------------ use

    def insert(self, entries: Sequence[E], now_ns: int) -> None:
        """See `EvictionPolicy`."""
        self._now_ns = max(self._now_ns, now_ns)
        self._inside += len(entries)
        for entry in entries:
            if not entry.uses:
                past = self._history.take(entry.key)
                if past is not None:
                    self._curves[past.grade].end(now_ns - past.asked_ns)
                    entry.uses = past.uses
                self._begin(entry, now_ns)
                self._family[0]._written -= entry.saved
            self._place(entry)
        self._age(len(entries))

    def use(self, entries: Sequence[E], now_ns: int) -> None:
        """See `EvictionPolicy`."""
        self._now_ns = max(self._now_ns, now_ns)
        curves = self._curves
        for entry in entries:
            curves[entry.grade].end(now_ns - entry.touched_ns)
            self.remove(entry)
            self._begin(entry, now_ns)
            self._orders[entry.grade][entry] = None
            self._changed[entry.grade] = 1
        self._age(len(entries))

    def touch(self, entries: Sequence[E], now_ns: int) -> None:
        """See `EvictionPolicy`."""
        self._now_ns = max(self._now_ns, now_ns)
        orders = self._orders
        for entry in entries:
            try:
                orders[entry.grade].move_to_end(entry)
                self._changed[entry.grade] = 1
            except KeyError:
                self._place(entry)

    def _begin(self, entry: E, now_ns: int) -> None:
        """It was asked for: one use more, in the class that follows from it."""
        uses = entry.uses = min(entry.uses + 1, USES_MAX)
        tokens = entry.prompt_tokens
        length = (tokens > 2_048) + (tokens > 8_192) + (tokens > 32_768)
        grade = entry.grade = _GRADE_OF_USES[uses] + length
        self._curves[grade].begin(now_ns)

    def _place(self, entry: E) -> None:
        """At the warm end of its class."""
        order = self._orders[entry.grade]
        order[entry] = None
        order.move_to_end(entry)
        self._changed[entry.grade] = 1

    def _age(self, accesses: int) -> None:
        first = self._family[0]
        first._accesses += accesses
        if first._accesses >= HALVE_AFTER + 16 * self._of_family():
            first._accesses = 0
            for curve in self._curves:
                curve.halve()

    # ------------------------------------------------------------------ who goes

    def coldest(self) -> E | None:
        """See `EvictionPolicy`."""
        self._catch_up()
        if self._now_ns - self._ranked_ns > RANK_NS:
            self._ranked_ns = self._now_ns
            self._changed = bytearray(b"\1" * CLASSES)
        grade = self._changed.find(1)
        while grade >= 0:
            self._changed[grade] = 0
            entry = next(iter(self._orders[grade]), None)
            self._ranks[grade] = (
                _NOBODY if entry is None else (self._density(grade, entry), entry.touched_ns, grade)
            )
            grade = self._changed.find(1, grade)
        best = min(self._ranks)
        return None if best is _NOBODY else next(iter(self._orders[best[2]]))

    def _density(self, grade: int, entry: E) -> float:
        age_ns = self._now_ns - entry.touched_ns
        return self._curves[grade].densities(self._now_ns)[bisect_right(EDGES_NS, age_ns)]

    def remove(self, entry: E) -> None:
        """See `EvictionPolicy`."""
        self._orders[entry.grade].pop(entry, None)
        self._changed[entry.grade] = 1

    def shelve(self, entry: E) -> None:
        """See `EvictionPolicy`."""
        del self._orders[entry.grade][entry]
        self._changed[entry.grade] = 1

    def unshelve(self, entry: E) -> None:
        """See `EvictionPolicy`."""
        order = self._orders[entry.grade]
        if entry not in order:
            order[entry] = None
            order.move_to_end(entry, last=False)
            self._changed[entry.grade] = 1

    # ------------------------------------------------------------------ tiers

    def admit(self, entry: E, at_least: float = 0.0) -> bool:
        """See `EvictionPolicy`. By the chance that it is asked for again while the archive will
        have it, which is as long as it takes to fill it at the pace of late. Of a class that is
        hardly known everything is written, unless more is asked than usual.
        """
        self._catch_up()
        curve = self._curves[entry.grade]
        watched_ns = self._now_ns - curve.since_ns
        if curve.accesses < EVIDENCE_MIN or watched_ns < WATCHED_MIN_NS:
            return at_least <= self._admit_chance
        age_ns = self._now_ns - entry.touched_ns
        return curve.chance(age_ns, self._family[0]._keeps_ns, self._now_ns) >= max(
            self._admit_chance, at_least
        )

    def _estimate_keeping(self) -> None:
        """How long the archive keeps a block: blocks go there from one pool and come from there
        into another.
        """
        first = self._family[0]
        if first._below <= 0:
            return
        elapsed_ns = self._now_ns - first._estimated_ns
        if first._written < ESTIMATE_AFTER and elapsed_ns < first._keeps_ns:
            return
        fills_ns = elapsed_ns * first._below * self._of_family() / max(first._written, 1)
        first._keeps_ns = int((first._keeps_ns + min(fills_ns, KEEPS_MAX_NS)) / 2)
        first._estimated_ns, first._written = self._now_ns, 0

    def _of_family(self) -> int:
        return sum(one._inside for one in self._family)

    def promote(self, entry: E, over: E | None, now_ns: int) -> bool:
        """See `EvictionPolicy`. Of a class that is hardly known everything rises, as with LRU."""
        self._now_ns = max(self._now_ns, now_ns)
        curve = self._curves[entry.grade]
        if curve.accesses < EVIDENCE_MIN:
            return True
        if over is None:
            age_ns = self._now_ns - entry.touched_ns
            return curve.chance(age_ns, KEEPS_MAX_NS, self._now_ns) >= PROMOTE_CHANCE
        gain = PROMOTE_GAIN * self._density(over.grade, over)
        return self._density(entry.grade, entry) > gain

    def beside(self) -> HitDensity[E]:
        """See `EvictionPolicy`. Curves and history are one."""
        other: HitDensity[E] = HitDensity(self._below + 1, self._admit_chance)
        other._curves, other._history = self._curves, self._history
        other._history_share = self._history_share
        other._family = self._family
        self._family.append(other)
        return other

    def _catch_up(self) -> None:
        """Where nothing has come lately it is as late as in the pools beside."""
        if len(self._family) > 1:
            self._now_ns = max(one._now_ns for one in self._family)

    def departed(self, entry: E, why: Reason, now_ns: int) -> None:
        """See `EvictionPolicy`."""
        self._now_ns = max(self._now_ns, now_ns)
        if not self._departures % RESIZE_EVERY:
            self._estimate_keeping()
            most = int(self._history_share * self._of_family())
            self._history.resize(max(most, HISTORY_MIN))
        self._departures += 1
        self._inside -= 1
        if why is Reason.OK:
            return
        self._family[0]._written += why is Reason.MISS_EVICTED
        self._history.put(entry.key, Past(entry.touched_ns, entry.uses, entry.grade))

    # ------------------------------------------------------------------ candidates

    def __len__(self) -> int:
        return sum(map(len, self._orders))

    def __iter__(self) -> Iterator[E]:
        ways = [self._by_density(grade) for grade in range(CLASSES)]
        return (entry for _, _, entry in merge(*ways, key=lambda one: one[:2]))

    def _by_density(self, grade: int) -> Iterator[tuple[float, int, E]]:
        for entry in self._orders[grade]:
            yield self._density(grade, entry), entry.touched_ns, entry

    def __contains__(self, entry: object) -> bool:
        return any(entry in order for order in self._orders)
