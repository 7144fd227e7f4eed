"""Nobody can tell by the clock what another tenant has: for his keys the same lines run, as often
and in the same order, as for keys that nobody has. For own keys others do, so that this sees
something.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

import kvstore
from tests.unit.store.stand import TTL_NS, Stand, keys

PRODUCT = kvstore.__path__[0]
Line = tuple[str, int]


def lines_of(work: Callable[[], Any]) -> list[Line]:
    """The lines of the product that `work` runs, one after the other."""
    seen: list[Line] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        if event == "line":
            seen.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return seen


def lookup(stand: Stand, session: Any, space: int, chain: Sequence[bytes]) -> None:
    stand.codes(session, space, chain)


def acquire(stand: Stand, session: Any, space: int, chain: Sequence[bytes]) -> None:
    leased = stand.run(stand.acquire(session, space, chain))
    stand.store.release(session, [leased.lease_id])


def view(stand: Stand, session: Any, space: int, chain: Sequence[bytes]) -> None:
    leased = stand.run(stand.acquire(session, space, chain, view=True))
    stand.store.release(session, [leased.lease_id])


def all_or_nothing(stand: Stand, session: Any, space: int, chain: Sequence[bytes]) -> None:
    stand.run(stand.acquire(session, space, chain, all_or_nothing=True))


def explain(stand: Stand, session: Any, space: int, chain: Sequence[bytes]) -> None:
    for key in chain:
        stand.core.explain(session.tenant, space, key, stand.clock.monotonic_ns())


def reserve(stand: Stand, session: Any, space: int, chain: Sequence[bytes]) -> None:
    reserved = stand.reserve(session, space, chain, ttl_ns=TTL_NS)
    stand.store.release(session, [reserved.lease_id])


@pytest.mark.parametrize("verb", [lookup, acquire, view, all_or_nothing, explain, reserve])
@pytest.mark.parametrize("blocks", [1, 8])
def test_for_keys_of_another_the_same_is_done_as_for_keys_of_nobody(
    verb: Callable[[Stand, Any, int, Sequence[bytes]], None], blocks: int
) -> None:
    with Stand(tenants=("a", "b")) as stand:
        a, b = stand.attach(tenant="a"), stand.attach(tenant="b")
        foreign, never, own = (keys(blocks, name) for name in ("foreign", "never", "own"))
        stand.put(a, stand.open(a), foreign)
        space = stand.open(b)
        stand.put(b, space, own)
        verb(stand, b, space, keys(blocks, "first"))  # what is done once is done now
        verb(stand, b, space, own)

        def done(chain: Sequence[bytes]) -> list[Line]:
            stand.settle()
            return lines_of(lambda: verb(stand, b, space, chain))

        miss = done(never)
        assert len(miss) > 10
        assert done(foreign) == miss
        assert done(keys(blocks, "again")) == miss
        assert done(own) != miss
