"""Two tenants share memory and disk, and one of them asks ten times as much: what the other loses.

    python -m tests.simulation.fairness            prints hit rates and losses, by policy and tiers
    python -m tests.simulation.fairness --json

The production core, policies and disk ring, on a virtual clock. Both tenants hold conversations: a
turn asks for all that was said before and adds to it. `flood` turns of the second tenant come
between two of the first; in a scan its prompts never come again. A loss is relative: of the hit
rate that the first tenant has when both ask alike.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.arena import header_bytes
from kvstore.core.core import Core
from kvstore.core.effects import Copy, Persist, Unassign, UnassignStaging
from kvstore.core.pools import Slot as Block
from kvstore.model.hits import ABSENT, PENDING
from kvstore.model.reasons import Reason
from kvstore.model.values import PAGE_BYTES, CoreLimits, LeaseMode, TenantSpec, TierKind, TierSpec
from kvstore.policy.base import EvictionPolicy
from kvstore.policy.choice import NAMES, policy_maker
from kvstore.testing.workload import fingerprint
from kvstore.tiers.disk.ring import NO_SEGMENT, Ring, Slot

LOSS_MAX = 0.05
MEMORY_BLOCKS = 400
DISK_BLOCKS = 1_000
SESSIONS = 16
"""Conversations that a tenant holds at one time."""
TURNS = 8
BLOCKS_A_TURN = (1, 5)
TURN_NS = 2_000_000_000
REQUESTS = 300
WARM_REQUESTS = 100
"""Of the first tenant, before hits are counted."""
WINDOW = 8


class Figures(NamedTuple):
    """The first tenant's rates, and what it loses to the flood."""

    policy: str
    disk: bool
    scan: bool
    alike: float
    flooded: float

    @property
    def loss(self) -> float:
        return 1 - self.flooded / self.alike if self.alike else 0.0


# ---------------------------------------------------------------------- what is asked for


def chats(seed: str) -> Iterator[list[bytes]]:
    """Prompts, as keys: turns of `SESSIONS` conversations, each of `TURNS` turns on average."""
    rng = random.Random(seed)
    count = 0

    def key(parent: bytes) -> bytes:
        nonlocal count
        count += 1
        return hashlib.sha256(b"%s/%d/%s" % (seed.encode(), count, parent)).digest()

    sessions: list[list[bytes]] = [[] for _ in range(SESSIONS)]
    while True:
        number = rng.randrange(SESSIONS)
        if rng.random() < 1 / TURNS:
            sessions[number] = []
        prompt = sessions[number]
        for _ in range(rng.randint(*BLOCKS_A_TURN)):
            prompt.append(key(prompt[-1] if prompt else b""))
        yield list(prompt)


def scan(seed: str) -> Iterator[list[bytes]]:
    """Prompts that never come again."""
    rng = random.Random(seed)
    number = 0
    while True:
        number += 1
        base = b"%s/%d" % (seed.encode(), number)
        yield [hashlib.sha256(b"%s/%d" % (base, i)).digest() for i in range(rng.randint(4, 24))]


# ---------------------------------------------------------------------- the machine


class Disk:
    """The disk tier without a device: the production ring decides who goes, by tenant."""

    def __init__(self, blocks: int) -> None:
        self._ring = Ring(blocks * PAGE_BYTES, lambda _: 0, stock_slots=0)
        self._places: dict[bytes, Slot] = {}
        self._keys: list[bytes] = []

    def held(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        return {key: 1 for key in keys if key in self._places}

    def load(self, key: bytes) -> bool:
        place = self._places.get(key)
        if place is not None:
            self._ring.touch(np.array([place[0]], np.uint32), np.array([place[1]], np.uint32))
        return place is not None

    def save(self, tenant: bytes, copy: Copy) -> list[bytes] | None:
        """Keys that were aged out for it; None: it has no room."""
        aged: list[bytes] = []
        while copy.key not in self._places:
            placement = self._ring.place(tenant, PAGE_BYTES, 1)
            for victim in placement.victims:
                aged.append(self._keys[victim.row])
                del self._places[aged[-1]]
            self._ring.release(placement.victims)
            for one in placement.retired_segments:
                self._ring.unlinked(one.segment)
            if placement.slots:
                self._keys.append(copy.key)
                self._places[copy.key] = placement.slots[0]
                above = self._places.get(copy.parent, (NO_SEGMENT, 0))
                row, depth = np.array([len(self._keys) - 1]), np.array([copy.depth])
                self._ring.settle(placement.slots, row, depth, np.array([above]))
            elif not (placement.victims or placement.retired_segments):
                return None
        return aged


class Town:
    """One core with the tenants `a` and `b`, an engine each, and a disk if it is given blocks."""

    def __init__(
        self, policy: Callable[[], EvictionPolicy[Block]], disk_blocks: int, *, apart: bool = True
    ) -> None:
        """apart: two tenants; else both engines are one tenant's, and nothing keeps them apart."""
        staging = 2 * WINDOW * PAGE_BYTES
        host_bytes = header_bytes(MEMORY_BLOCKS) + MEMORY_BLOCKS * PAGE_BYTES + staging
        tiers = [TierSpec("host", TierKind.POOL, host_bytes, ingest=True)]
        self.disk = Disk(disk_blocks) if disk_blocks else None
        if disk_blocks:
            tiers.append(TierSpec("disk", TierKind.ARCHIVE, disk_blocks * PAGE_BYTES))
        limits = CoreLimits(
            staging_bytes=WINDOW * PAGE_BYTES, region_share=1 / 64, copies_in_flight_max=1 << 20
        )
        names = {"a": "a", "b": "b" if apart else "a"}
        tenants = [TenantSpec(name) for name in sorted(set(names.values()))]
        self.core = Core(tiers, tenants, limits, policy)
        self.now_ns = 0
        begin = self.core.begin_session
        self.sessions = {name: begin(tenant, b"engine", 0) for name, tenant in names.items()}
        opened = [self.core.open(one, fingerprint(), 0) for one in self.sessions.values()]
        self.spaces = dict(zip("ab", (opening.space_id for opening in opened), strict=True))
        self._attempt = 0
        self._run()

    def ask(self, tenant: str, keys: list[bytes]) -> int:
        """What an engine does with a prompt: takes what is there, stores the rest; leading hits."""
        session, space, core = self.sessions[tenant], self.spaces[tenant], self.core
        hits = 0
        while hits < len(keys):
            more = self._get(session, space, keys[hits:])
            hits += more
            if not more or self.disk is None:
                break
        while True:
            self._attempt += 1
            until_ns = self.now_ns + 10**12
            reserved = core.reserve(
                session, space, keys, 0, 0, self._attempt, until_ns, self.now_ns
            )
            self._run()
            if not reserved.lease_id:
                break
            core.commit(session, reserved.lease_id, False, self.now_ns)
            self._run()
            core.settle_commit(reserved.lease_id, self.now_ns)
            if reserved.reason is Reason.OK:
                break
        core.tick(self.now_ns)
        core.save_ahead(False, self.now_ns)
        self._run()
        return hits

    def _get(self, session: int, space: int, keys: list[bytes]) -> int:
        core = self.core
        below = None if self.disk is None else self.disk.held(keys)
        acquired = core.acquire(
            session,
            space,
            keys,
            mode=LeaseMode.COPY,
            until_ns=None,
            wait=False,
            below=below,
            now_ns=self.now_ns,
        )
        self._run()
        codes = core.lookup(session, space, keys)
        if acquired.lease_id:
            core.release(session, [acquired.lease_id], self.now_ns)
        gone = [index for index, code in enumerate(codes) if code in (ABSENT, PENDING)]
        return gone[0] if gone else len(keys)

    def _run(self) -> None:
        """Everything that the core wants done is done at once."""
        while effects := self.core.effects():
            for effect in effects:
                if isinstance(effect, Copy):
                    self._copy(effect)
                elif isinstance(effect, Unassign | UnassignStaging):
                    self.core.region_gone(effect.region_id, self.now_ns)
                elif isinstance(effect, Persist):
                    self.core.persisted(effect.ticket, self.now_ns)

    def _copy(self, copy: Copy) -> None:
        reason = Reason.OK
        if copy.why == "load":
            assert self.disk is not None
            reason = Reason.OK if self.disk.load(copy.key) else Reason.MISS_EVICTED
        elif copy.why == "save":
            assert self.disk is not None
            aged = self.disk.save(b"%16d" % copy.space_id, copy)
            reason = Reason.NO_SPACE if aged is None else Reason.OK
            for space in self.spaces.values():
                self.core.archive_dropped(1, space, aged or ())
        self.core.done(copy.copy_id, reason is Reason.OK, reason, None, 1_000, self.now_ns)


def hit_rate(
    policy: str,
    *,
    disk: bool,
    flood: int,
    scanning: bool = False,
    seed: int = 1,
    apart: bool = True,
) -> float:
    """Share of its blocks that the first tenant found, with `flood` requests of the second beside
    each of its own.
    """
    disk_blocks = DISK_BLOCKS if disk else 0
    town = Town(policy_maker(policy, MEMORY_BLOCKS, disk_blocks), disk_blocks, apart=apart)
    own, others = chats(f"own {seed}"), (scan if scanning else chats)(f"other {seed}")
    asked = found = 0
    for number in range(REQUESTS):
        for _ in range(flood):
            town.now_ns += TURN_NS // (flood + 1)
            town.ask("b", next(others))
        town.now_ns += TURN_NS // (flood + 1)
        keys = next(own)
        hits = town.ask("a", keys)
        if number >= WARM_REQUESTS:
            asked += len(keys)
            found += hits
    town.core.check()
    return found / asked


def figures(
    policy: str,
    *,
    disk: bool,
    scanning: bool,
    flood: int = 10,
    seed: int = 1,
    apart: bool = True,
) -> Figures:
    """Both runs of one combination."""
    how: dict[str, Any] = {"disk": disk, "scanning": scanning, "seed": seed, "apart": apart}
    alike, flooded = (hit_rate(policy, flood=times, **how) for times in (1, flood))
    return Figures(policy, disk, scanning, alike, flooded)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.fairness")
    parser.add_argument("--flood", type=int, default=10, help="requests beside each one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="both as one tenant")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = []
    for policy in NAMES:
        for disk in (False, True):
            for scanning in (False, True):
                row = figures(
                    policy,
                    disk=disk,
                    scanning=scanning,
                    flood=options.flood,
                    seed=options.seed,
                    apart=not options.together,
                )
                rows.append(row)
                if not options.json:
                    print(
                        f"{policy:12} {'host + disk' if disk else 'host':12} "
                        f"{'scan' if scanning else 'chats':6} hit rate {row.alike:7.2%} beside "
                        f"an equal, {row.flooded:7.2%} beside a flood: loss {row.loss:6.2%}",
                        flush=True,
                    )
    if options.json:
        print(json.dumps([{**row._asdict(), "loss": row.loss} for row in rows], indent=2))
    return int(any(row.loss > LOSS_MAX for row in rows))


if __name__ == "__main__":
    sys.exit(main())
