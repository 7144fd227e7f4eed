"""One run: a trace through the production core and policy, on the trace's own clock.

Every request is what an engine does: acquire what is there, release it, then put the rest.
What was stored without being asked for is put alone, and not counted.
Bytes are not moved; every copy that the core asks for ends at once. Keys are digests of the ids.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.core.ahead import ABOVE_DISK_SHARE
from kvstore.core.arena import header_bytes
from kvstore.core.core import Core
from kvstore.core.effects import Copy, Forget, Persist, Unassign, UnassignStaging, Wanted
from kvstore.core.pools import Slot
from kvstore.model.fingerprint import (
    ORDER_HEADS,
    Encoding,
    Fingerprint,
    Geometry,
    Identity,
    Placement,
)
from kvstore.model.hits import ABSENT, PENDING
from kvstore.model.reasons import Reason
from kvstore.model.values import (
    HEAD,
    PAGE_BYTES,
    Before,
    CoreLimits,
    LeaseMode,
    TenantSpec,
    TierKind,
    TierSpec,
)
from kvstore.mover import SAVES_MAX
from kvstore.policy.base import EvictionPolicy
from kvstore.simulate.archive import SimulatedArchive
from kvstore.simulate.trace import BLOCK_TOKENS, Request

HOST, DISK = 0, 1
BLOCK_BYTES = PAGE_BYTES
"""The core counts in bytes; what a block really has does not matter to it."""
MODEL = Fingerprint(
    Identity("trace", "1", 0, config_digest="trace"),
    Geometry("gqa", layers=1, kv_heads=1, head_size=2),
    Encoding("float16", BLOCK_TOKENS, element_order=ORDER_HEADS),
    Placement(),
)
"""Of a block of `BLOCK_BYTES`."""
STAGING_BLOCKS_MAX = 256
STEP_NS = 1_000
"""Requests of one millisecond come one after the other."""


def key_of(one: int) -> bytes:
    """The key of a trace's block, by its id."""
    return hashlib.sha256(one.to_bytes(16, "big")).digest()


@dataclass
class Figures:
    """What a run counted; blocks and tokens, from the first counted request on.

    hit_tokens: in the leading run of blocks that were there, by tier. computed: blocks that had to
    be made. disk_writes, disk_reads: blocks written to disk, read from it.
    """

    requests: int = 0
    blocks: int = 0
    input_tokens: int = 0
    hit_tokens: list[int] = field(default_factory=lambda: [0, 0])
    hit_blocks: list[int] = field(default_factory=lambda: [0, 0])
    computed: int = 0
    evictions: int = 0
    disk_writes: int = 0
    disk_reads: int = 0

    @property
    def prefix_token_hit_rate(self) -> float:
        """Fraction of all prompt tokens that were in leading hits."""
        return sum(self.hit_tokens) / self.input_tokens if self.input_tokens else 0.0

    @property
    def writes_per_computed(self) -> float:
        """SSD block writes for each block computed."""
        return self.disk_writes / self.computed if self.computed else 0.0

    @property
    def writes_per_hit(self) -> float | None:
        """SSD block writes for each block read back from SSD; None: none was."""
        return self.disk_writes / self.disk_reads if self.disk_reads else None


class Memory(NamedTuple):
    """The pool of a core: its bytes, staging included, and the core's limits."""

    capacity_bytes: int
    limits: CoreLimits


def memory_of(capacity_blocks: int, *, above_disk: bool = False) -> Memory:
    """Memory with slots for exactly so many blocks; an eighth of them are stored at a time. Above a
    disk its coldest part is saved ahead, as a daemon does it.
    """
    window = max(min(capacity_blocks // 8, STAGING_BLOCKS_MAX), 1)
    slots_bytes = header_bytes(capacity_blocks) + capacity_blocks * BLOCK_BYTES
    limits = CoreLimits(
        keys_per_call_max=2**31,
        staging_bytes=window * BLOCK_BYTES,
        staging_share=0.9,
        region_share=1.0,
        region_slots_min=1,
        copies_in_flight_max=2**31,
        save_ahead_share=ABOVE_DISK_SHARE if above_disk else 0.0,
    )
    return Memory(slots_bytes + window * BLOCK_BYTES, limits)


class Replay:
    """One core of exactly `capacity_blocks`, over a disk of `disk_blocks` if that is not 0."""

    def __init__(
        self,
        policy: Callable[[], EvictionPolicy[Slot]],
        capacity_blocks: int,
        disk_blocks: int = 0,
        *,
        first_counted: int = 0,
        memory: Memory | None = None,
        archive: SimulatedArchive | None = None,
        observe: Callable[[Request, list[int]], None] | None = None,
    ) -> None:
        """memory, archive: those of a certain daemon, whatever the blocks say. observe: told of
        each counted request, with the tier of each block of its leading hit.
        """
        above_disk = archive is not None or disk_blocks > 0
        capacity_bytes, limits = memory or memory_of(capacity_blocks, above_disk=above_disk)
        tiers = [TierSpec("host", TierKind.POOL, capacity_bytes, ingest=True)]
        self.archive = archive
        if archive is None and disk_blocks:
            self.archive = SimulatedArchive(disk_blocks)
        if self.archive is not None:
            tiers.append(TierSpec("disk", TierKind.ARCHIVE, self.archive.capacity_bytes))
        self.core = Core(tiers, [TenantSpec("trace")], limits, policy)
        self.figures = Figures()
        self._first_counted = first_counted
        self._observe = observe
        self._keys: dict[int, bytes] = {}
        self._now_ns = 0
        self._number = 0
        self._attempt = 0
        self._session = self.core.begin_session("trace", b"engine", 0)
        opening = self.core.open(self._session, MODEL, 0)
        assert opening.layout is not None
        assert opening.layout.block_bytes == BLOCK_BYTES
        self._space = opening.space_id
        self._run()

    def serve(self, requests: Iterable[Request]) -> Figures:
        """Serves requests in order; what was counted so far."""
        for request in requests:
            self._serve(request)
        return self.figures

    # ------------------------------------------------------------------ a request

    def _serve(self, request: Request) -> None:
        self._now_ns = max(self._now_ns + STEP_NS, request.at_ns)
        written, read = self._disk_counts()
        if self.core.save_ahead(False, self._now_ns):
            self._run()
        keys = [self._key(one) for one in request.ids]
        evicted = self.core.books.ingest.evictions
        hits = self._get(keys) if request.asked else []
        self._put(keys, len(hits))
        if request.asked and self._number >= self._first_counted:
            self._count(request, hits)
            if self._observe is not None:
                self._observe(request, hits)
            figures = self.figures
            writes, reads = self._disk_counts()
            figures.disk_writes += writes - written
            figures.disk_reads += reads - read
            figures.evictions += self.core.books.ingest.evictions - evicted
        self._number += 1

    def _count(self, request: Request, hits: list[int]) -> None:
        figures = self.figures
        figures.requests += 1
        figures.blocks += len(request.ids)
        figures.input_tokens += request.input_tokens
        figures.computed += len(request.ids) - len(hits)
        for tier, tokens in zip(hits, request.block_tokens, strict=False):
            figures.hit_tokens[tier] += tokens
            figures.hit_blocks[tier] += 1

    def _disk_counts(self) -> tuple[int, int]:
        archive = self.archive
        return (0, 0) if archive is None else (archive.writes, archive.reads)

    def _key(self, one: int) -> bytes:
        key = self._keys.get(one)
        if key is None:
            key = self._keys[one] = key_of(one)
        return key

    def _get(self, keys: list[bytes]) -> list[int]:
        """Acquires the prompt, as many blocks at a time as can be loaded; the tier of each block of
        its leading hits.
        """
        hits: list[int] = []
        while len(hits) < len(keys):
            more = self._get_some(keys, len(hits))
            hits += more
            if not more or self.archive is None:
                break
        return hits

    def _get_some(self, keys: list[bytes], first: int) -> list[int]:
        core = self.core
        rest = keys[first:] if first else keys
        before = core.lookup(self._session, self._space, rest)
        below = None if self.archive is None else self.archive.below(rest, before)
        acquired = core.acquire(
            self._session,
            self._space,
            rest,
            mode=LeaseMode.COPY,
            until_ns=None,
            wait=False,
            below=below or None,
            now_ns=self._now_ns,
        )
        self._run()
        after = core.lookup(self._session, self._space, rest) if below else before
        if self.archive is not None:
            self.archive.touch()
        if acquired.lease_id:
            core.release(self._session, [acquired.lease_id], self._now_ns)
        hits = []
        for was, code in zip(before, after, strict=True):
            if code in (ABSENT, PENDING):
                break
            hits.append(DISK if was == ABSENT else HOST)
        return hits

    def _put(self, keys: list[bytes], first: int) -> None:
        """Stores what is missing of a prompt from its `first` block on, window by window."""
        core, session = self.core, self._session
        before: Before = HEAD
        while True:
            self._attempt += 1
            reserved = core.reserve(
                session,
                self._space,
                keys,
                first,
                0,
                self._attempt,
                self._now_ns + 10**12,
                self._now_ns,
                before,
            )
            self._run()
            if not reserved.lease_id:
                return
            core.commit(session, reserved.lease_id, False, self._now_ns)
            self._run()
            core.settle_commit(reserved.lease_id, self._now_ns)
            if reserved.reason is Reason.OK:
                return
            first = reserved.wanted[-1] + 1
            before = before._replace(since=before.since or reserved.mark)

    # ------------------------------------------------------------------ the world

    def _run(self) -> None:
        """Everything that the core wants done is done at once; saves as a mover does them: so many
        in a batch, and what waits when one ends is the next, before the core hears of its end.
        """
        core = self.core
        waiting: deque[Copy] = deque()
        batch: list[Copy] = []
        while (effects := core.effects()) or batch:
            for effect in effects:
                if isinstance(effect, Copy):
                    if effect.why == "save":
                        waiting.append(effect)
                    else:
                        self._end(effect, self._perform(effect))
                elif isinstance(effect, Unassign | UnassignStaging):
                    core.region_gone(effect.region_id, self._now_ns)
                elif isinstance(effect, Wanted):
                    assert self.archive is not None
                    self.archive.wanted(effect.keys)
                elif isinstance(effect, Persist):
                    core.persisted(effect.ticket, self._now_ns)
                else:
                    assert not isinstance(effect, Forget), "nothing is forgotten in a replay"
            ended = batch or _next_batch(waiting)
            batch = _next_batch(waiting)
            if ended:
                self._save(ended)
            core.save_ahead(False, self._now_ns)

    def _perform(self, copy: Copy) -> Reason:
        if copy.why != "load":
            return Reason.OK
        assert self.archive is not None
        return Reason.OK if self.archive.load(copy.key) else Reason.MISS_EVICTED

    def _save(self, saves: Sequence[Copy]) -> None:
        assert self.archive is not None
        aged = self.archive.save([(one.key, one.parent, one.depth) for one in saves])
        self.core.archive_dropped(DISK, self._space, aged)
        for copy in saves:
            # What was saved may have made room for what came after it.
            there = copy.key in self.archive
            self._end(copy, Reason.OK if there else Reason.NO_SPACE)

    def _end(self, copy: Copy, reason: Reason) -> None:
        self.core.done(copy.copy_id, reason is Reason.OK, reason, None, 1_000, self._now_ns)


def _next_batch(waiting: deque[Copy]) -> list[Copy]:
    """The saves that a mover takes next."""
    return [waiting.popleft() for _ in range(min(len(waiting), SAVES_MAX))]
