"""An archive behind guards: counts how its uses ended, and lets none, a few or all of them through.

Any archive: it is given to the mover and to look-ups in place of the one it stands for. Outcomes
are noted by the mover's threads and taken by the event loop's, which also sets the gates. `find`
never waits, as the archive's own does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from kvstore.model.reasons import BlockCorrupt, KVStoreError, Reason
from kvstore.policy.admission import chance_wanted
from kvstore.policy.guards import UNLIMITED
from kvstore.tiers.base import Archive, ArchiveStats, ArchiveUsage, Bytes, Saved, SavedBlock


class Gate:
    """How many uses are let through: all, none, or so many as are left."""

    def __init__(self) -> None:
        self._left = UNLIMITED
        self._lock = threading.Lock()

    def open_for(self, uses: int) -> None:
        """From now on; UNLIMITED: for all."""
        with self._lock:
            self._left = uses

    @property
    def left(self) -> int:
        return self._left

    def take(self, uses: int) -> int:
        """How many of them go through."""
        if self._left == UNLIMITED:
            return uses
        with self._lock:
            taken = min(uses, self._left)
            self._left -= taken
            return taken


@dataclass(slots=True)
class Outcomes:
    """What has ended since they were taken last. loads: [all that read the device, damaged] by
    space; failed ones are the device's.
    """

    loads: dict[int, list[int]] = field(default_factory=dict)
    loads_failed: int = 0
    saves: int = 0
    saves_failed: int = 0

    def loaded(self, space_id: int, *, corrupt: bool = False, failed: bool = False) -> None:
        counts = self.loads.setdefault(space_id, [0, 0])
        counts[0] += 1
        counts[1] += corrupt
        self.loads_failed += failed

    @property
    def loads_ended(self) -> int:
        return sum(count for count, _ in self.loads.values())

    @property
    def loads_corrupt(self) -> int:
        return sum(corrupt for _, corrupt in self.loads.values())


class GuardedArchive:
    """See the module's docstring. Implements kvstore.tiers.base.Archive."""

    def __init__(self, inner: Archive) -> None:
        self.inner = inner
        self.reading = Gate()
        self.writing = Gate()
        self._outcomes = Outcomes()
        self._lock = threading.Lock()

    def take_outcomes(self) -> Outcomes:
        """What has ended since the last time."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, Outcomes()
        return outcomes

    # ------------------------------------------------------------------ archive

    @property
    def on_dropped(self) -> Callable[[int, list[bytes]], None]:
        return self.inner.on_dropped

    @on_dropped.setter
    def on_dropped(self, tell: Callable[[int, list[bytes]], None]) -> None:
        self.inner.on_dropped = tell

    async def find(self, space_id: int, keys: Sequence[bytes]) -> Collection[bytes]:
        left = self.reading.left
        if not left:
            return ()
        return await self.inner.find(space_id, keys if left == UNLIMITED else keys[:left])

    def load(self, space_id: int, key: bytes, into: Bytes) -> bytes:
        if not self.reading.take(1):
            raise KVStoreError(Reason.DECLINED_GUARD, "a guard has stopped reading")
        try:
            checksum = self.inner.load(space_id, key, into)
        except BlockCorrupt:
            self._loaded(space_id, corrupt=True)
            raise
        except OSError:
            self._loaded(space_id, failed=True)
            raise
        self._loaded(space_id)
        return checksum

    def _loaded(self, space_id: int, *, corrupt: bool = False, failed: bool = False) -> None:
        with self._lock:
            self._outcomes.loaded(space_id, corrupt=corrupt, failed=failed)

    def save_batch(self, blocks: Sequence[SavedBlock]) -> list[Saved]:
        allowed = self.writing.take(len(blocks))
        saved = self.inner.save_batch(blocks[:allowed]) if allowed else []
        failed = sum(isinstance(one, OSError) for one in saved)
        with self._lock:
            # A refusal, as for want of room, is neither.
            self._outcomes.saves += failed + sum(isinstance(one, bytes) for one in saved)
            self._outcomes.saves_failed += failed
        if allowed < len(blocks):
            refusal = KVStoreError(Reason.DECLINED_GUARD, "a guard has stopped writing")
            saved += [refusal] * (len(blocks) - allowed)
        return saved

    def wanted(self, space_id: int, keys: Sequence[bytes]) -> None:
        self.inner.wanted(space_id, keys)

    def forget(self, names: Sequence[tuple[int, bytes]]) -> None:
        self.inner.forget(names)

    def describe(
        self, space_id: int, tenant: str, fingerprint_digest: bytes, slot_bytes: int
    ) -> None:
        self.inner.describe(space_id, tenant, fingerprint_digest, slot_bytes)

    def usage(self) -> ArchiveUsage:
        return self.inner.usage()

    def stats(self) -> ArchiveStats:
        """With the line that its budget of writes draws for what is saved."""
        stats = self.inner.stats()
        gauges = dict(stats.gauges)
        chance = gauges["save_chance_wanted"] = chance_wanted(
            gauges.get("written_day_bytes", 0.0),
            gauges.get("write_bytes_per_second", 0.0),
            gauges.get("endurance_day_bytes", 0.0),
        )
        state = stats.state
        if chance and state == "ok":
            state = f"ok (writes are short: saved from a chance of another use of {chance:.0%} on)"
        return replace(stats, gauges=gauges, state=state)
