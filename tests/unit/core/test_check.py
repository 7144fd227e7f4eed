"""`check` sees damage: each invariant, broken by hand, is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.leases import ReadLease, WriteLease
from kvstore.core.pools import Pool, Slot
from kvstore.core.states import SlotState
from tests.unit.core.harness import Bench, keys


def busy() -> Bench:
    """A core with a bit of everything under way."""
    bench = Bench(slots=24, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(9))
    bench.acquire(session, space, keys(3))
    bench.core.pin(space, keys(1), bench.now_ns)
    bench.reserve(session, space, keys(1, "writing"))
    bench.acquire(session, space, keys(1, "writing"), wait=True)
    bench.hold_copies = True
    bench.reserve(session, space, keys(1, "copying"))
    bench.run()
    return bench


def pool(bench: Bench) -> Pool:
    return next(iter(bench.core.books.ingest.pools.values()))


def slot(bench: Bench, state: SlotState, *, held: bool = False) -> Slot:
    return next(
        slot
        for region in pool(bench).regions.values()
        for slot in region.slots
        if slot.state is state and bool(slot.holds) is held
    )


def lease(bench: Bench, kind: type) -> ReadLease | WriteLease:
    return next(lease for lease in bench.core.books.leases if isinstance(lease, kind))


def hole_lost(bench: Bench) -> None:
    staging = next(iter(bench.core.books.sessions.values())).staging
    assert staging is not None
    staging.extents._holes.pop()


def part_done(bench: Bench) -> None:
    fill = slot(bench, SlotState.FILLING).fill
    assert fill is not None
    fill.done = 1


def waiter_lost(bench: Bench) -> None:
    for region in pool(bench).regions.values():
        for each in region.slots:
            if each.fill is not None:
                each.fill.waiters.clear()


def name_lost(bench: Bench) -> None:
    space = next(iter(bench.core.books.spaces))
    del space.index[keys(9)[5]]


def name_moved(bench: Bench) -> None:
    space = next(iter(bench.core.books.spaces))
    one, two = keys(9)[4:6]
    space.index[one], space.index[two] = space.index[two], space.index[one]


def _set(target: object, name: str, value: object) -> None:
    setattr(target, name, value)


DAMAGE: dict[str, Callable[[Bench], object]] = {
    "used bytes": lambda b: _set(b.core.books.ingest, "used_bytes", 1),
    "tenant bytes": lambda b: b.core.books.ingest.tenant_bytes.update(a=5),
    "a slot is free twice": lambda b: pool(b).free.append(slot(b, SlotState.FREE)),
    "a READY slot is free": lambda b: pool(b).free.append(slot(b, SlotState.READY)),
    "a hold too many": lambda b: _set(slot(b, SlotState.READY), "holds", 1),
    "a hold lost": lambda b: _set(slot(b, SlotState.READY, held=True), "holds", 0),
    "a pin lost": lambda b: b.core.books.pins.clear(),
    "pinned bytes": lambda b: _set(pool(b), "pinned_bytes", 0),
    "blocks": lambda b: _set(pool(b), "blocks", 3),
    "block bytes": lambda b: _set(pool(b), "block_bytes", 3),
    "presence code": lambda b: _set(slot(b, SlotState.READY), "code", 0),
    "a candidate lost": lambda b: pool(b).policy.remove(slot(b, SlotState.READY)),
    "a candidate too many": lambda b: pool(b).policy.insert([slot(b, SlotState.FREE)], 0),
    "index lost a name": name_lost,
    "index mixed two names": name_moved,
    "READY without its parts": part_done,
    "a waiter forgotten": waiter_lost,
    "staging lost": hole_lost,
    "a deadline lost": lambda b: b.core.books.leases._heap.clear(),
    "leases miscounted": lambda b: b.core.books.leases.counts.clear(),
    "a lease without its session": lambda b: b.core.books.sessions.clear(),
    "region touch": lambda b: _set(slot(b, SlotState.READY).region, "touched_ns", 0),
    "copies miscounted": lambda b: _set(b.core.books, "moving", 7),
    "a leaving copy miscounted": lambda b: _set(slot(b, SlotState.READY), "leaving", 1),
    "an extent lost": lambda b: _set(lease(b, WriteLease), "extents", []),
    "visible too soon": lambda b: _set(lease(b, WriteLease), "visible", 1),
}


def test_a_sound_core_passes() -> None:
    busy().core.check()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen(damage: str) -> None:
    bench = busy()
    DAMAGE[damage](bench)
    with pytest.raises(AssertionError):
        bench.core.check()
