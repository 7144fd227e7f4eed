"""Half-open: a tier that plans pass over, for it was slow, is measured by the daemon itself.

Nobody loads from it any more, so nothing would tell that it has recovered. No request is made to
try: it would pay for what is found out. Instead the daemon loads a few of the very blocks that a
look-up was advised to compute, on its own account, while nobody waits for them. They go into host
memory, where their engine is about to put them anyway. On the event loop's thread.

Bounded: one probe at a time and tier; of what the tier is believed to move in `PROBE_NS`, one block
at least; a twentieth of the time at most. A probe that finds what was believed halves their number,
down to one in `PAUSE_MAX_NS`; one that is surprised brings the shortest pause back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.model.hits import leading_run
from kvstore.model.plan import Plan
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.model.values import LeaseMode, Place
from kvstore.policy.links import Link
from kvstore.store.sessions import Session
from kvstore.store.values import Leased

PROBE_NS = 100_000_000
PROBE_BLOCKS = 32
PROBE_BYTES = 32 << 20
COPY_BYTES = 4 << 20
"""Copied to measure memory: under a millisecond, where memory is what it should be. In another
thread, since it is copied just when memory is believed not to be.
"""
WAIT_NS = 2_000_000_000
"""A lease on what is loaded ends by then; the load goes on, and is measured."""
TTL_NS = 1_000_000_000
SHARE = 20
PAUSE_MIN_NS = 250_000_000
PAUSE_MAX_NS = 10_000_000_000
SURPRISE = 1.25
"""Faster by so much than was predicted: the tier has changed."""
WEIGHED = frozenset({Reason.OK, Reason.DECLINED_RECOMPUTE_FASTER})


class Leases(Protocol):
    """What of the store is needed here."""

    clock: Clock
    links: list[Link]

    @property
    def draining(self) -> bool: ...

    async def acquire(
        self,
        session: Session,
        space_id: int,
        keys: Sequence[bytes],
        *,
        mode: LeaseMode,
        ttl_ns: int | None,
        wait_ns: int,
        load_ns: int = 0,
    ) -> Leased: ...

    def release(self, session: Session, lease_ids: Sequence[int]) -> tuple[int, int]: ...

    def block_view(self, place: Place, length: int) -> NDArray[np.uint8]: ...


@dataclass(slots=True)
class _Tier:
    """When a tier may be probed next."""

    due_ns: int = 0
    pause_ns: int = PAUSE_MIN_NS
    running: asyncio.Task[None] | None = None


class Probes:
    """See the module's docstring. `host_tier`: index of the tier that is measured by a copy."""

    def __init__(self, store: Leases, host_tier: int) -> None:
        self._store = store
        self._host_tier = host_tier
        self._tiers: dict[int, _Tier] = {}
        self._scratch: NDArray[np.uint8] | None = None
        self._begun: dict[int, int] = {}

    def counts(self) -> list[int]:
        """Probes begun, by tier."""
        return [self._begun.get(tier, 0) for tier in range(len(self._store.links))]

    def passed_over(
        self,
        session: Session,
        space_id: int,
        keys: Sequence[bytes],
        codes: bytes,
        block_bytes: int,
        advice: Plan,
    ) -> None:
        """A look-up of these keys was given this advice; codes: a byte a key, as in the reply."""
        if advice.reason not in WEIGHED or self._store.draining:
            return
        for one in advice.tiers:
            if one.load_blocks or not one.found_blocks or not self._due(one.tier):
                continue
            first = codes.find(1 + one.tier, 0, leading_run(codes))
            if first >= 0:
                blocks = self._blocks(self._store.links[one.tier], block_bytes)
                run = codes[first : first + blocks]
                end = first + len(run) - len(run.lstrip(bytes([1 + one.tier])))
                self._start(one.tier, session, space_id, keys[first:end], block_bytes)

    def _due(self, tier: int) -> bool:
        state = self._tiers.setdefault(tier, _Tier())
        now_ns = self._store.clock.monotonic_ns()
        last_ns = self._store.links[tier].last_ns
        fresh = last_ns is not None and now_ns - last_ns < PAUSE_MIN_NS
        return state.running is None and now_ns >= state.due_ns and not fresh

    def _blocks(self, link: Link, block_bytes: int) -> int:
        in_time = int((PROBE_NS - link.latency_ns) / max(link.ideal_ns(block_bytes), 1.0))
        return max(1, min(in_time, PROBE_BLOCKS, PROBE_BYTES // block_bytes))

    def _start(
        self, tier: int, session: Session, space_id: int, keys: Sequence[bytes], block_bytes: int
    ) -> None:
        state = self._tiers[tier]
        self._begun[tier] = self._begun.get(tier, 0) + 1
        probing = self._probe(tier, session, space_id, keys, block_bytes)
        state.running = asyncio.get_running_loop().create_task(probing)

    async def _probe(
        self, tier: int, session: Session, space_id: int, keys: Sequence[bytes], block_bytes: int
    ) -> None:
        store, state = self._store, self._tiers[tier]
        link = store.links[tier]
        begun_ns = store.clock.monotonic_ns()
        before = link.predicted_ns, link.moving_ns
        try:
            leased = await store.acquire(
                session,
                space_id,
                keys,
                mode=LeaseMode.COPY,
                ttl_ns=TTL_NS,
                wait_ns=0,
                load_ns=0 if tier == self._host_tier else WAIT_NS,
            )
            if leased.lease_id:
                try:
                    if tier == self._host_tier:
                        await self._copy(leased, block_bytes)
                finally:
                    store.release(session, (leased.lease_id,))
        except KVStoreError:
            pass  # the session ended, or has no lease left: the next look-up is as good
        finally:
            now_ns = store.clock.monotonic_ns()
            predicted_ns, moving_ns = link.predicted_ns - before[0], link.moving_ns - before[1]
            surprised = moving_ns > 0 and predicted_ns > SURPRISE * moving_ns
            state.pause_ns = PAUSE_MIN_NS if surprised else min(2 * state.pause_ns, PAUSE_MAX_NS)
            state.due_ns = now_ns + max(state.pause_ns, SHARE * (now_ns - begun_ns))
            state.running = None

    async def _copy(self, leased: Leased, block_bytes: int) -> None:
        """Measures host memory as a client would: a copy out of it, and what a call takes."""
        store, link = self._store, self._store.links[self._host_tier]
        views = [store.block_view(place, block_bytes) for place in leased.places if place]
        loop = asyncio.get_running_loop()
        copied, elapsed_ns = await loop.run_in_executor(None, self._copied, views)
        now_ns = store.clock.monotonic_ns()
        link.observe(copied, elapsed_ns + int(link.seed_latency_ns), now_ns)

    def _copied(self, views: Sequence[NDArray[np.uint8]]) -> tuple[int, int]:
        """(bytes, ns). In the executor's thread; the views stay valid if the daemon ends meanwhile,
        and the lease has the blocks stay in them until it does.
        """
        if self._scratch is None:
            self._scratch = np.ones(COPY_BYTES, np.uint8)  # touched, so that no page faults
        clock, scratch, copied = self._store.clock, self._scratch, 0
        started_ns = clock.monotonic_ns()
        for view in views:
            length = min(len(view), COPY_BYTES - copied)
            np.copyto(scratch[copied : copied + length], view[:length])
            copied += length
        return copied, clock.monotonic_ns() - started_ns
