"""The archives below the pools: what they hold, whose spaces they keep, when they have forgotten,
and how fast they load. On the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from kvstore.clock import Clock
from kvstore.core.core import Core
from kvstore.core.effects import Copy, Forget, Persist, Wanted
from kvstore.model.hits import ABSENT
from kvstore.model.layout import layout_of
from kvstore.model.values import SpaceRow
from kvstore.policy.links import Link, Meter
from kvstore.tiers.base import Archive, ArchiveStats


class Archives:
    """See the module's docstring. False where there is none."""

    def __init__(
        self,
        core: Core,
        archives: Mapping[int, Archive],
        links: Sequence[Link],
        clock: Clock,
        staged: Collection[int] = (),
    ) -> None:
        """`staged`: pools whose blocks reach readers by way of another, so that it is known here
        how fast they come, too.
        """
        self._core = core
        self._archives = dict(archives)
        self._meters = {tier: Meter(links[tier]) for tier in (*self._archives, *staged)}
        self._clock = clock
        self._loading: dict[int, Copy] = {}
        self._forgetting = 0
        self._not_durable = 0
        self._waiting: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self._archives)

    # ------------------------------------------------------------------ what they hold

    async def find(self, space_id: int, keys: Sequence[bytes]) -> dict[bytes, int]:
        """The tier of each key that an archive holds."""
        found: dict[bytes, int] = {}
        for tier, archive in self._archives.items():
            missing = [key for key in keys if key not in found]
            held: Collection[bytes] = await archive.find(space_id, missing)
            found.update(dict.fromkeys(held, tier))
        return found

    async def below(self, space_id: int, keys: Sequence[bytes], codes: bytes) -> dict[bytes, int]:
        """What is worth loading for a reader of `keys`, of which pools hold what `codes` say: what
        comes before the first key that nobody holds.
        """
        absent = [key for key, code in zip(keys, codes, strict=True) if code == ABSENT]
        found = await self.find(space_id, absent) if absent else {}
        below: dict[bytes, int] = {}
        for key, code in zip(keys, codes, strict=True):
            if code == ABSENT:
                if key not in found:
                    break
                below[key] = found[key]
        return below

    async def held_for(self, tenant: str, space_id: int, keys: Sequence[bytes]) -> dict[bytes, int]:
        """As `find`; nothing for a space that is not this tenant's."""
        its = any(row.space_id == space_id and row.tenant == tenant for row in self._core.spaces())
        return await self.find(space_id, keys) if its and self._archives else {}

    def stats(self) -> dict[str, ArchiveStats]:
        """By the tier's name."""
        return {self._core.tiers[tier].name: one.stats() for tier, one in self._archives.items()}

    # ------------------------------------------------------------------ whose

    def describe_all(self) -> None:
        """Tells of the spaces that were restored."""
        for row in self._core.spaces():
            self._describe(row)

    def note(self, row: Persist) -> None:
        """A space whose blocks may be saved has a durable row; it is told of before any save."""
        if self._archives and row.table == "space" and row.value is not None and row.key.isdigit():
            space_id = int(row.key)
            for space in self._core.spaces():
                if space.space_id == space_id:
                    self._describe(space)

    def _describe(self, space: SpaceRow) -> None:
        for archive in self._archives.values():
            fingerprint = space.fingerprint
            slot_bytes = layout_of(fingerprint).slot_bytes
            archive.describe(space.space_id, space.tenant, fingerprint.digest, slot_bytes)

    # ------------------------------------------------------------------ movement

    def told(self, wanted: Wanted) -> None:
        """Pools use what an archive has."""
        self._archives[wanted.tier].wanted(wanted.space_id, wanted.keys)

    def sent(self, moves: Sequence[Copy | Forget]) -> None:
        """These were handed to the mover."""
        now_ns = self._clock.monotonic_ns()
        for move in moves:
            if isinstance(move, Forget):
                self._forgetting += 1
            elif move.source.tier in self._meters and move.why != "save":
                self._loading[move.copy_id] = move
                self._meters[move.source.tier].begin(move.length, now_ns)

    def copied(self, copy_id: int, ok: bool) -> None:
        """A copy has ended. `measured` follows when all that ended at one time are told."""
        copy = self._loading.pop(copy_id, None)
        if copy is not None:
            self._meters[copy.source.tier].end(copy.length, ok)

    def measured(self, now_ns: int) -> None:
        """Learns how fast loads are from what has ended until now."""
        for meter in self._meters.values():
            meter.settle(now_ns)

    def forgotten(self, count: int, durable: bool) -> None:
        """So many forgettings have ended."""
        self._forgetting -= count
        self._not_durable += not durable
        if not self._forgetting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def until_forgotten(self, wait_ns: int) -> bool:
        """Waits until no archive can give back what was invalidated, also after a restart.

        False: one could not record it, or it is not done within `wait_ns`.
        """
        loop = asyncio.get_running_loop()
        before, until_s = self._not_durable, loop.time() + wait_ns / 1e9
        while self._forgetting or self._core.books.forgetting:
            left_s = until_s - loop.time()
            if left_s <= 0:
                return False
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append(future)
            # A name that is being saved is forgotten once the save has ended: its Forget comes.
            await asyncio.wait((future,), timeout=left_s)
        return self._not_durable == before
