"""Prompts that are longer than memory: what the archive has of one gives way to the rest of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.core.effects import Copy, Wanted
from kvstore.core.pools import Slot
from kvstore.model.reasons import Reason
from kvstore.model.values import HEAD, CoreLimits, LeaseMode
from kvstore.policy.hit_density import HitDensity
from kvstore.policy.lru import Lru
from tests.unit.core.harness import BLOCK, SECOND, Bench, keys

SLOTS = 16
LONG = keys(40, "long")


class Tight(Bench):
    """A host of 16 slots, the coldest half of which is saved ahead, over a disk."""

    def __init__(self, disk_blocks: int = 160, *, ahead: float = 0.5, disk: bool = True) -> None:
        limits = CoreLimits(staging_bytes=2 * BLOCK, staging_share=0.9, save_ahead_share=ahead)
        super().__init__(
            slots=SLOTS, disk=disk, disk_blocks=disk_blocks, limits=limits, policy=self.policy
        )
        self.writer = self.session()
        self.id = self.space(self.writer)

    policy = Lru

    def push(self, chain: Sequence[bytes], first: int = 0, since: int = 0) -> Reason:
        """Stores a prompt as a client does; why it stopped."""
        before = HEAD._replace(since=since)
        while True:
            reserved = self.reserve(self.writer, self.id, chain, first=first, before=before)
            self.run()
            if not reserved.lease_id:
                return reserved.reason
            self.commit(self.writer, reserved.lease_id)
            self.save_ahead()
            if reserved.reason is Reason.OK:
                return Reason.OK
            first = reserved.wanted[-1] + 1
            before = before._replace(since=before.since or reserved.mark)

    def save_ahead(self) -> None:
        """What a daemon does all the time, for long enough."""
        self.pass_time(SECOND)
        while self.core.save_ahead(False, self.now_ns):
            self.run()
        self.run()

    def here(self, chain: Sequence[bytes]) -> list[bytes]:
        have = self.have(self.writer, self.id, chain)
        return [key for key, there in zip(chain, have, strict=True) if there]

    def on_disk(self, chain: Sequence[bytes]) -> set[bytes]:
        return {key for key in chain if (self.id, key) in self.archived}

    def fetch(self, chain: Sequence[bytes], first: int) -> int:
        """Reads what comes at once of `chain[first:]`; how many lead."""
        rest = chain[first:]
        absent = set(rest) - set(self.here(rest))
        below = dict.fromkeys(self.on_disk(rest) & absent, self.disk)
        lease = self.acquire(self.writer, self.id, rest, mode=LeaseMode.COPY, below=below)
        self.run()
        if not lease.lease_id:
            return 0
        places = self.core.settle(lease.lease_id, self.now_ns).places
        self.core.release(self.writer, [lease.lease_id], self.now_ns)
        self.run()
        return [*places, None].index(None)


class Dense(Tight):
    policy = HitDensity[Slot]


@pytest.mark.parametrize("kind", [Tight, Dense])
def test_a_prompt_longer_than_memory_is_stored_and_read_in_several_goes(kind: type[Tight]) -> None:
    bench = kind()
    assert bench.push(LONG) is Reason.OK
    assert set(bench.here(LONG)) | bench.on_disk(LONG) == set(LONG)
    assert bench.here(LONG[:8]) == LONG[:8], "its head stays: others share it"
    got, goes = 0, 0
    while more := bench.fetch(LONG, got):
        got += more
        goes += 1
    assert got == len(LONG)
    assert goes > 1


def test_what_the_archive_does_not_have_yet_gives_way_to_nothing() -> None:
    """The archive does not keep up: nobody waits for it, and nothing is lost for the rest."""
    bench = Tight(ahead=0.0)
    assert bench.push(LONG) is Reason.NO_SPACE
    assert bench.here(LONG) == LONG[:SLOTS]
    assert not bench.on_disk(LONG)


def test_without_an_archive_as_much_is_stored_as_memory_holds() -> None:
    bench = Tight(disk=False)
    assert bench.push(LONG) is Reason.NO_SPACE
    assert bench.here(LONG) == LONG[:SLOTS]


def test_one_prompt_takes_no_more_than_a_quarter_of_the_archive() -> None:
    assert Tight(160).push(LONG) is Reason.OK
    small = Tight(159)
    assert small.push(LONG) is Reason.NO_SPACE
    assert small.here(LONG) == LONG[:SLOTS]


def test_what_somebody_holds_does_not_give_way() -> None:
    bench = Tight()
    chain = LONG[:SLOTS]
    assert bench.push(chain) is Reason.OK
    assert len(bench.on_disk(chain)) > 4
    lease = bench.acquire(bench.writer, bench.id, chain)
    assert bench.push(LONG, SLOTS) is Reason.NO_SPACE
    assert bench.here(LONG) == chain
    bench.core.release(bench.writer, [lease.lease_id], bench.now_ns)
    bench.push(LONG, SLOTS)
    assert bench.here(LONG)[-2:] == LONG[-2:]


def test_what_another_prompt_used_meanwhile_does_not_give_way() -> None:
    bench = Tight()
    other = keys(6, "other")
    first = bench.reserve(bench.writer, bench.id, LONG)
    bench.commit(bench.writer, first.lease_id)
    bench.push(other)
    bench.push(keys(8, "cold"))
    bench.save_ahead()
    for _ in range(3):
        bench.reserve(bench.writer, bench.id, other)
        bench.save_ahead()
    assert bench.on_disk(other) == set(other)
    assert bench.push(LONG, 2, first.mark) is Reason.OK
    assert bench.here(other) == other, "all of it went through what was left"


def told(bench: Bench) -> list[bytes]:
    return [key for effect in bench.seen if isinstance(effect, Wanted) for key in effect.keys]


def test_the_archive_is_told_once_what_is_used_again_before_memory_drops_it() -> None:
    bench = Tight()
    chain = keys(6)
    bench.push(chain)
    bench.push(keys(8, "others"))
    bench.save_ahead()
    assert bench.on_disk(chain) == set(chain)
    bench.use(bench.writer, bench.id, chain)
    bench.push(keys(8, "more"))
    bench.save_ahead()
    assert set(told(bench)) >= set(chain)
    count = len(told(bench))
    for _ in range(3):
        bench.save_ahead()
    assert len(told(bench)) == count, "it knows"
    saves = [e.key for e in bench.seen if isinstance(e, Copy) and e.why == "save"]
    assert len(saves) == len(set(saves)), "what it has is not written again"


def test_the_archive_is_not_told_of_what_would_not_be_saved() -> None:
    bench = Tight()
    chain = keys(6)
    bench.push(chain)
    bench.push(keys(8, "others"))
    bench.save_ahead()
    bench.core.set_admission(bench.disk, 0.9)
    bench.use(bench.writer, bench.id, chain)
    count = len(told(bench))
    bench.push(keys(8, "more"))
    assert len(told(bench)) == count
