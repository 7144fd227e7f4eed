"""A core on a bench: one call a verb, and effects that run at once or when a test says so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from kvstore.core.core import Core
from kvstore.core.effects import (
    Assign,
    Copy,
    Effect,
    Forget,
    Persist,
    Ready,
    Unassign,
    UnassignStaging,
)
from kvstore.core.pools import Slot
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.reasons import Reason
from kvstore.model.values import (
    HEAD,
    Acquired,
    Before,
    CommitResult,
    CoreLimits,
    LeaseMode,
    Opening,
    Reserved,
    TenantSpec,
    TierKind,
    TierSpec,
)
from kvstore.policy.base import EvictionPolicy
from kvstore.policy.lru import Lru
from kvstore.testing.workload import fingerprint

MS = 10**6
SECOND = 10**9
KIB = 1024
BLOCK = 4 * KIB
"""Bytes of a block of 16 tokens of `workload.fingerprint`."""

HOST = "host"
DEVICE = "device"
DISK = "disk"
STEP_NS = 1_000
"""Between two verbs."""


def keys(count: int, name: str = "prompt", first: int = 0) -> list[bytes]:
    """Keys of a prompt, from block `first` on."""
    return [
        hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(first, first + count)
    ]


def region_bytes(slots: int, slot_bytes: int = BLOCK) -> int:
    """Bytes of a region of so many slots, its header page included."""
    return 4 * KIB + slots * slot_bytes


def pool_bytes(slots: int, slot_bytes: int = BLOCK) -> int:
    """Bytes of a pool of exactly so many slots, in regions of four."""
    whole, rest = divmod(slots, 4)
    return whole * region_bytes(4, slot_bytes) + (region_bytes(rest, slot_bytes) if rest else 0)


def _staging_blocks(slots: int, sessions: int) -> int:
    """How many blocks of staging each session gets, so that nothing is left over."""
    for blocks in (4, 3, 2):
        if (pool_bytes(slots) + sessions * blocks * BLOCK) // 8 >= blocks * BLOCK:
            return blocks
    return 1


class Bench:
    """A core with a host pool of `slots` blocks of 4 KiB beside staging for `sessions` writers of
    up to 4 blocks each, and what else a test asks for.

    device_below: whether the device's pool is the lower one.

    checks: whether `run` checks all invariants. copies: those that are out; `run` ends them unless
    `hold_copies`. closing: regions that are closed; `run` lets them go unless `hold_regions`.
    """

    def __init__(
        self,
        slots: int = 32,
        *,
        sessions: int = 1,
        capacity_bytes: int | None = None,
        device_slots: int = 0,
        device_below: bool = False,
        disk: bool = False,
        disk_blocks: int = 2**18,
        tenants: Sequence[TenantSpec] = (TenantSpec("a"),),
        limits: CoreLimits | None = None,
        policy: Callable[[], EvictionPolicy[Slot]] = Lru,
        core_type: type[Core] = Core,
    ) -> None:
        self.window = _staging_blocks(slots, sessions)
        capacity = capacity_bytes or pool_bytes(slots) + sessions * self.window * BLOCK
        tiers = [TierSpec(HOST, TierKind.POOL, capacity, ingest=True)]
        if device_slots:
            device = TierSpec(DEVICE, TierKind.POOL, pool_bytes(device_slots))
            tiers.insert(1 if device_below else 0, device)
        if disk:
            tiers.append(TierSpec(DISK, TierKind.ARCHIVE, disk_blocks * BLOCK))
        limits = limits or CoreLimits(staging_bytes=self.window * BLOCK, staging_share=0.9)
        self.core = core_type(tiers, tenants, limits, policy)
        self.host = [tier.name for tier in tiers].index(HOST)
        self.disk = len(tiers) - 1
        self.now_ns = 100 * SECOND
        self.hold_copies = False
        self.hold_regions = False
        self.hold_rows = False
        self.checks = True
        self.copies: list[Copy] = []
        self.closing: list[int] = []
        self.seen: list[Effect] = []
        self.ready: list[int] = []
        self.rows: dict[tuple[str, bytes], bytes] = {}
        self.archived: set[tuple[int, bytes]] = set()
        self._attempt = 0

    # ------------------------------------------------------------------ the world

    def run(self) -> list[Effect]:
        """Runs effects until there is nothing to do, checks the core; gives what came out."""
        first = len(self.seen)
        while effects := self.core.effects():
            for effect in effects:
                self.seen.append(effect)
                self._apply(effect)
            if not self.hold_copies:
                self.finish_all()
        if self.checks:
            self.core.check()
        return self.seen[first:]

    def _apply(self, effect: Effect) -> None:
        if isinstance(effect, Copy):
            self.copies.append(effect)
        elif isinstance(effect, Ready):
            self.ready.append(effect.lease_id)
        elif isinstance(effect, Unassign | UnassignStaging):
            if self.hold_regions:
                self.closing.append(effect.region_id)
            else:
                self.core.region_gone(effect.region_id, self.now_ns)
        elif isinstance(effect, Persist):
            if effect.value is None:
                self.rows.pop((effect.table, effect.key), None)
            else:
                self.rows[effect.table, effect.key] = effect.value
            if not self.hold_rows:
                self.core.persisted(effect.ticket, self.now_ns)
        elif isinstance(effect, Forget):
            self.archived = {
                name
                for name in self.archived
                if name[0] != effect.space_id or effect.key not in (b"", name[1])
            }

    def finish(self, copy: Copy, reason: Reason = Reason.OK) -> None:
        """Ends one copy."""
        self.copies.remove(copy)
        if copy.why == "save" and reason is Reason.OK:
            self.archived.add((copy.space_id, copy.key))
        self.core.done(copy.copy_id, reason is Reason.OK, reason, None, 1_000, self.now_ns)

    def finish_all(self, why: str | None = None) -> None:
        """Ends all copies that are out, or those of one kind."""
        for copy in [copy for copy in self.copies if why in (None, copy.why)]:
            self.finish(copy)

    def settle_all(self) -> None:
        """Ends all copies, those too that wait for others."""
        self.run()
        while self.copies:
            self.finish_all()
            self.run()

    def out(self, why: str) -> list[Copy]:
        """Copies of one kind that are out."""
        self.run()
        return [copy for copy in self.copies if copy.why == why]

    def let_go(self) -> None:
        """Every closed region is unmapped by the last process."""
        closing, self.closing = self.closing, []
        for region_id in closing:
            self.core.region_gone(region_id, self.now_ns)
        self.run()

    def pass_time(self, elapsed_ns: int) -> int | None:
        """Time goes on; what is due expires."""
        self.now_ns += elapsed_ns
        due = self.core.tick(self.now_ns)
        self.run()
        return due

    # ------------------------------------------------------------------ verbs

    def session(self, tenant: str = "a", group: bytes = b"engine") -> int:
        """A new session."""
        return self.core.begin_session(tenant, group, self.now_ns)

    def open(self, session: int, offered: Fingerprint | None = None) -> Opening:
        """Opens a space, of blocks of 4 KiB unless told otherwise."""
        return self.core.open(session, offered or fingerprint(), self.now_ns)

    def space(self, session: int, **fields: object) -> int:
        """Opens a space that must be granted; its id."""
        opening = self.open(session, fingerprint(**fields))  # type: ignore[arg-type]
        assert opening.space_id, opening
        return opening.space_id

    def reserve(
        self,
        session: int,
        space: int,
        chain: Sequence[bytes],
        *,
        first: int = 0,
        part: int = 0,
        attempt: int | None = None,
        ttl_ns: int = 10 * SECOND,
        before: Before = HEAD,
        durable: bool = False,
    ) -> Reserved:
        """Reserves; every call is an attempt of its own unless told otherwise."""
        self.now_ns += STEP_NS
        self._attempt += 1
        return self.core.reserve(
            session,
            space,
            chain,
            first,
            part,
            self._attempt if attempt is None else attempt,
            self.now_ns + ttl_ns,
            self.now_ns,
            before,
            durable,
        )

    def commit(self, session: int, lease_id: int, *, durable: bool = False) -> CommitResult:
        """Commits, lets the world run, settles."""
        committed = self.core.commit(session, lease_id, durable, self.now_ns)
        assert committed.reason is Reason.OK, committed
        self.run()
        return self.core.settle_commit(lease_id, self.now_ns)

    def put(self, session: int, space: int, chain: Sequence[bytes], first: int = 0) -> int:
        """Stores blocks, window by window; how many became visible."""
        visible = 0
        while True:
            reserved = self.reserve(session, space, chain, first=first)
            self.run()
            if not reserved.lease_id:
                return visible
            visible += self.commit(session, reserved.lease_id).visible

    def acquire(
        self,
        session: int,
        space: int,
        wanted: Sequence[bytes],
        *,
        mode: LeaseMode = LeaseMode.COPY,
        wait: bool = False,
        all_or_nothing: bool = False,
        below: Mapping[bytes, int] | None = None,
        reach: frozenset[int] | None = None,
        ttl_ns: int = 10 * SECOND,
        prompt_tokens: int = 0,
    ) -> Acquired:
        """Acquires."""
        self.now_ns += STEP_NS
        return self.core.acquire(
            session,
            space,
            wanted,
            mode=mode,
            until_ns=self.now_ns + ttl_ns,
            wait=wait,
            all_or_nothing=all_or_nothing,
            below=below,
            reach=reach,
            prompt_tokens=prompt_tokens,
            now_ns=self.now_ns,
        )

    def use(self, session: int, space: int, wanted: Sequence[bytes]) -> int:
        """Acquires and releases at once; how many blocks were there."""
        acquired = self.acquire(session, space, wanted)
        if not acquired.lease_id:
            return 0
        leased = self.core.settle(acquired.lease_id, self.now_ns).leased
        self.core.release(session, [acquired.lease_id], self.now_ns)
        return leased

    def have(self, session: int, space: int, wanted: Sequence[bytes]) -> list[bool]:
        """Which keys can be read."""
        return [code not in (0, 255) for code in self.core.lookup(session, space, wanted)]

    def assigned(self) -> list[Assign]:
        """All regions that were ever assigned."""
        return [effect for effect in self.seen if isinstance(effect, Assign)]
