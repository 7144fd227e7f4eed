"""Between tiers: who goes down, what is saved, in what order bytes may move."""

from __future__ import annotations

from kvstore.core.effects import Copy, Forget
from kvstore.core.pools import Slot
from kvstore.model.reasons import Reason
from kvstore.model.values import CoreLimits, LeaseMode
from kvstore.policy.hit_density import HitDensity
from kvstore.policy.lru import Lru
from tests.unit.core.harness import BLOCK, SECOND, Bench, keys


def saved(bench: Bench) -> list[bytes]:
    """Keys of the saves that came out, in order."""
    return [e.key for e in bench.seen if isinstance(e, Copy) and e.why == "save"]


def test_the_tail_of_a_prompt_goes_first() -> None:
    bench = Bench(slots=6)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(6))
    bench.put(session, space, keys(2, "new"))
    assert bench.have(session, space, keys(6)) == [True] * 4 + [False] * 2
    assert bench.core.why_absent(session, space, keys(6)[5]).reason is Reason.MISS_EVICTED


def test_a_used_prompt_outlives_an_unused_one() -> None:
    bench = Bench(slots=8)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4, "used"))
    bench.put(session, space, keys(4, "unused"))
    bench.use(session, space, keys(4, "used"))
    bench.put(session, space, keys(4, "new"))
    assert bench.have(session, space, keys(4, "used")) == [True] * 4
    assert bench.have(session, space, keys(4, "unused")) == [False] * 4


def test_the_head_stays_warmer_than_the_tail_over_acquire_and_commit() -> None:
    bench = Bench(slots=6)
    session = bench.session()
    space = bench.space(session)
    chain = keys(6)
    bench.put(session, space, chain[:3])
    bench.use(session, space, chain[:3])
    bench.put(session, space, chain, first=3)
    bench.put(session, space, keys(3, "new"))
    assert bench.have(session, space, chain) == [True] * 3 + [False] * 3


def test_a_victim_is_saved_with_its_ancestors_first() -> None:
    bench = Bench(slots=4, disk=True)
    session = bench.session()
    space = bench.space(session)
    chain = keys(4)
    bench.put(session, space, chain)
    bench.put(session, space, keys(1, "new"))
    assert saved(bench) == chain
    copies = [effect for effect in bench.seen if isinstance(effect, Copy) and effect.why == "save"]
    assert [(copy.parent, copy.depth) for copy in copies] == [
        (b"", 0),
        *((chain[index - 1], index) for index in (1, 2, 3)),
    ]
    bench.put(session, space, keys(4, "new"))
    assert saved(bench)[:4] == chain
    assert chain[0] not in saved(bench)[4:], "what is saved is not saved again"


def test_what_an_archive_has_aged_out_is_saved_again() -> None:
    bench = Bench(slots=4, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4))
    bench.put(session, space, keys(1, "new"))
    head = keys(4)[0]
    bench.core.archive_dropped(bench.disk, space, [head])
    bench.put(session, space, keys(4, "new"))
    assert saved(bench).count(head) == 2


def test_a_loaded_block_is_not_saved_again() -> None:
    bench = Bench(slots=4, disk=True)
    session = bench.session()
    space = bench.space(session)
    below = {keys(1)[0]: bench.disk}
    lease = bench.acquire(session, space, keys(1), below=below, wait=True).lease_id
    bench.run()
    bench.core.release(session, [lease], bench.now_ns)
    bench.put(session, space, keys(4, "new"))
    assert saved(bench) == []


def test_the_hottest_are_saved_before_an_end_ancestors_first() -> None:
    limits = CoreLimits(staging_bytes=4 * BLOCK, staging_share=0.9, copies_in_flight_max=4)
    bench = Bench(slots=16, disk=True, limits=limits)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(3, "cold"))
    bench.put(session, space, keys(3, "hot"))
    bench.hold_copies = True
    assert bench.core.save_ahead(True, bench.now_ns) == 4
    bench.run()
    assert saved(bench)[:3] == keys(3, "hot")
    assert bench.core.save_ahead(True, bench.now_ns) == 0, "as many are out as may be"
    bench.hold_copies = False
    bench.settle_all()
    while bench.core.save_ahead(True, bench.now_ns):
        bench.run()
    assert set(saved(bench)) == {*keys(3, "hot"), *keys(3, "cold")}
    assert len(saved(bench)) == 6


class Ahead(Bench):
    """A host of 16 slots, the coldest half of which is saved ahead."""

    def __init__(self, **bounds: int) -> None:
        limits = CoreLimits(
            staging_bytes=4 * BLOCK, staging_share=0.9, save_ahead_share=0.5, **bounds
        )
        super().__init__(slots=16, disk=True, limits=limits)
        self.writer = self.session()
        self.id = self.space(self.writer)

    def fill(self) -> None:
        for index in range(7):
            self.put(self.writer, self.id, keys(2, f"prompt {index}"))


def test_what_goes_next_is_saved_before_it_has_to_go() -> None:
    bench = Ahead()
    bench.put(bench.writer, bench.id, keys(2, "prompt 0"))
    assert bench.core.save_ahead(False, bench.now_ns) == 0, "there is room"
    bench.fill()
    assert bench.core.save_ahead(False, bench.now_ns) > 4
    bench.run()
    assert saved(bench)[:4] == keys(2, "prompt 0") + keys(2, "prompt 1")
    assert keys(2, "prompt 6")[0] not in saved(bench)
    ahead = len(saved(bench))
    bench.hold_copies = True
    reserved = bench.reserve(bench.writer, bench.id, keys(3, "new"))
    bench.core.commit(bench.writer, reserved.lease_id, False, bench.now_ns)
    assert len(bench.out("commit")) == 3, "nobody waits for a save"
    assert len(saved(bench)) == ahead


def test_while_blocks_come_in_it_is_not_decided_anew_with_each_of_their_copies() -> None:
    bench = Ahead()
    bench.fill()
    while bench.core.save_ahead(False, bench.now_ns):
        bench.run()
    bench.hold_copies = True
    reserved = bench.reserve(bench.writer, bench.id, keys(4, "new"))
    bench.core.commit(bench.writer, reserved.lease_id, False, bench.now_ns)
    assert bench.out("commit")
    assert bench.core.save_ahead(False, bench.now_ns) == 0, "their commit will tell more"
    assert bench.core.save_ahead(False, bench.now_ns + SECOND) > 0, "but not for long"


def refuse_from(bench: Bench, first: int) -> int:
    """The saves that are out end; from that one on they are refused. How many were."""
    out = bench.out("save")
    for index, copy in enumerate(out):
        bench.finish(copy, Reason.OK if index < first else Reason.DECLINED_GUARD)
    bench.run()
    return len(out) - first


def test_an_archive_that_refuses_all_saves_is_asked_again_after_a_while_only() -> None:
    bench = Ahead(copies_in_flight_max=2, copies_in_flight_bytes=0)
    bench.fill()
    bench.hold_copies = True
    assert bench.core.save_ahead(False, bench.now_ns) == 2, "as many as may be out"
    refused = refuse_from(bench, 0)
    for _ in range(50):  # each completion leads to another look
        bench.core.save_ahead(False, bench.now_ns)
        refused += refuse_from(bench, 0)
    assert refused == 2, "time stands still"
    bench.pass_time(SECOND)
    assert bench.core.save_ahead(False, bench.now_ns) == 2, "it may take some by now"
    refuse_from(bench, 1)
    assert bench.core.save_ahead(False, bench.now_ns) == 2, "one went well: on with it at once"
    refuse_from(bench, 0)
    assert bench.core.save_ahead(False, bench.now_ns) == 0


def test_refused_saves_of_victims_are_one_a_victim() -> None:
    bench = Bench(slots=8, disk=True)
    session = bench.session()
    space = bench.space(session)
    for index in range(4):
        bench.put(session, space, keys(2, f"prompt {index}"))
    bench.hold_copies = True
    bench.reserve(session, space, keys(1, "new"))
    refused = refuse_from(bench, 0)
    for _ in range(50):
        bench.core.save_ahead(False, bench.now_ns)
        refused += refuse_from(bench, 0)
    assert 1 <= refused <= 2, "the victim, and what it is a continuation of"


def test_what_an_archive_ages_out_is_not_saved_ahead_for_ever() -> None:
    bench = Ahead()
    bench.fill()
    first, second = keys(2, "prompt 0"), keys(2, "prompt 1")
    while bench.core.save_ahead(False, bench.now_ns):
        bench.run()
    begun = len(saved(bench))
    bench.core.archive_dropped(bench.disk, bench.id, [*first, *second])
    for _ in range(5):
        bench.pass_time(SECOND)
        assert bench.core.save_ahead(False, bench.now_ns) == 0, "an archive with less room churns"
    bench.run()
    assert len(saved(bench)) == begun
    bench.use(bench.writer, bench.id, second)
    bench.use(bench.writer, bench.id, keys(2, "prompt 2"))
    for _ in range(5):
        bench.put(bench.writer, bench.id, keys(2, "new"))
        bench.pass_time(SECOND)
        bench.core.save_ahead(False, bench.now_ns)
        bench.run()
    assert saved(bench).count(first[1]) == 1


def test_at_the_end_what_was_aged_out_is_saved_once_more_and_not_for_ever() -> None:
    bench = Ahead()
    bench.fill()
    first = keys(2, "prompt 0")
    while bench.core.save_ahead(False, bench.now_ns):
        bench.run()
    bench.core.archive_dropped(bench.disk, bench.id, first)
    for _ in range(8):
        bench.core.save_ahead(True, bench.now_ns)
        bench.settle_all()
        bench.core.archive_dropped(bench.disk, bench.id, first)
    assert [saved(bench).count(key) for key in first] == [2, 2]


def test_what_was_used_since_it_was_aged_out_is_saved_ahead_again() -> None:
    bench = Ahead()
    bench.fill()
    first = keys(2, "prompt 0")
    while bench.core.save_ahead(False, bench.now_ns):
        bench.run()
    bench.core.archive_dropped(bench.disk, bench.id, first)
    bench.use(bench.writer, bench.id, first)
    for index in range(1, 7):  # and then all others were
        bench.use(bench.writer, bench.id, keys(2, f"prompt {index}"))
    bench.pass_time(SECOND)
    bench.core.save_ahead(False, bench.now_ns)
    bench.settle_all()
    assert [saved(bench).count(key) for key in first] == [2, 2]


def test_what_could_not_be_saved_in_time_is_dropped_and_counted() -> None:
    bench = Ahead()
    bench.fill()
    bench.hold_copies = True
    bench.reserve(bench.writer, bench.id, keys(3, "new"))
    assert bench.out("save") == []
    assert bench.core.stats().counters["dropped_unsaved"] >= 2
    reason = bench.core.why_absent(bench.writer, bench.id, keys(2, "prompt 0")[1]).reason
    assert reason is Reason.MISS_NOT_ADMITTED


def test_a_victim_that_is_being_saved_is_passed_by() -> None:
    bench = Ahead()
    bench.fill()
    bench.hold_copies = True
    begun = bench.core.save_ahead(False, bench.now_ns)
    assert 4 < begun < 14
    reserved = bench.reserve(bench.writer, bench.id, keys(3, "new"))
    bench.core.commit(bench.writer, reserved.lease_id, False, bench.now_ns)
    assert len(bench.out("commit")) == 3, "their slots were free at once"
    assert bench.have(bench.writer, bench.id, keys(2, "prompt 0")) == [True] * 2
    bench.finish_all("save")
    bench.run()
    bench.hold_copies = False
    before = bench.core.stats().counters["dropped_unsaved"]
    bench.put(bench.writer, bench.id, keys(2, "newer"))
    assert bench.core.stats().counters["dropped_unsaved"] == before, "they go next"


def test_if_all_are_being_saved_one_of_them_goes() -> None:
    bench = Ahead()
    bench.fill()
    bench.hold_copies = True
    while bench.core.save_ahead(True, bench.now_ns):
        pass
    assert len(bench.out("save")) == 14
    reserved = bench.reserve(bench.writer, bench.id, keys(3, "new"))
    assert len(reserved.wanted) == 3
    bench.core.commit(bench.writer, reserved.lease_id, False, bench.now_ns)
    assert 0 < len(bench.out("commit")) < 3, "some wait for the save of what was there"
    bench.settle_all()
    assert bench.have(bench.writer, bench.id, keys(3, "new")) == [True] * 3


def test_small_saves_may_be_many() -> None:
    limits = CoreLimits(
        staging_bytes=4 * BLOCK,
        staging_share=0.9,
        copies_in_flight_max=2,
        copies_in_flight_bytes=3 * BLOCK,
    )
    bench = Bench(slots=16, disk=True, limits=limits)
    session = bench.session()
    space = bench.space(session)
    for index in range(8):
        bench.put(session, space, keys(1, f"alone {index}"))
    bench.hold_copies = True
    while bench.core.save_ahead(True, bench.now_ns):
        pass
    assert len(bench.out("save")) == 3


def test_copies_in_flight_take_a_share_of_the_pool_at_most() -> None:
    limits = CoreLimits(
        staging_bytes=4 * BLOCK, staging_share=0.9, copies_in_flight_share=2 * BLOCK / 2**20
    )
    bench = Bench(capacity_bytes=2**20, disk=True, limits=limits)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4))
    bench.hold_copies = True
    assert bench.core.save_ahead(True, bench.now_ns) == 2
    bench.acquire(session, space, keys(4, "old"), below=dict.fromkeys(keys(4, "old"), bench.disk))
    assert len(bench.out("load")) == 2


class Picky(Lru[Slot]):
    """Admits nothing."""

    def admit(self, entry: Slot, at_least: float = 0.0) -> bool:
        return False


def test_what_is_not_admitted_is_dropped_and_explained() -> None:
    bench = Bench(slots=4, disk=True, policy=Picky)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4))
    bench.put(session, space, keys(4, "new"))
    assert saved(bench) == []
    reason = bench.core.why_absent(session, space, keys(4)[0]).reason
    assert reason is Reason.MISS_NOT_ADMITTED


def test_past_the_bound_victims_are_dropped_unsaved_and_counted() -> None:
    limits = CoreLimits(staging_bytes=4 * BLOCK, staging_share=0.9, copies_in_flight_max=2)
    bench = Bench(slots=32, disk=True, limits=limits)
    session = bench.session()
    space = bench.space(session)
    for index in range(32):
        bench.put(session, space, keys(1, f"alone {index}"))
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(4, "new"))
    assert len(reserved.wanted) == 4, "a put does not wait for the disk"
    assert len(bench.out("save")) == 2
    bench.settle_all()
    counters = bench.core.stats().counters
    assert (counters["saved"], counters["dropped_unsaved"]) == (2, 2)


def test_the_next_fill_of_a_slot_waits_for_the_save_of_its_victim() -> None:
    bench = Bench(slots=4, disk=True)
    session = bench.session()
    space = bench.space(session)
    for index in range(4):
        bench.put(session, space, keys(1, f"alone {index}"))
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(1, "new"))
    assert reserved.wanted == [0], "the slot is taken at once"
    committed = bench.core.commit(session, reserved.lease_id, False, bench.now_ns)
    assert committed.reason is Reason.OK
    assert [copy.why for copy in bench.copies] == []
    (save,) = bench.out("save")
    assert bench.out("commit") == []
    bench.finish(save)
    (fill,) = bench.out("commit")
    assert (fill.target.region, fill.target.slot) == (save.source.region, save.source.slot)
    assert fill.target.generation == save.source.generation + 1


def test_a_block_that_is_being_saved_as_an_ancestor_may_be_evicted_meanwhile() -> None:
    bench = Bench(slots=32, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(32))
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(4, "new"))
    assert len(reserved.wanted) == 4, "the first victim's save took its ancestors along"
    assert len(bench.out("save")) == 32
    bench.core.commit(session, reserved.lease_id, False, bench.now_ns)
    assert bench.out("commit") == []
    bench.settle_all()
    assert bench.core.settle_commit(reserved.lease_id, bench.now_ns).visible == 4


def test_a_failed_save_is_a_lost_block_and_no_more() -> None:
    bench = Bench(slots=4, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    bench.put(session, space, keys(3, "others"))
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(1, "new"))
    bench.core.commit(session, reserved.lease_id, False, bench.now_ns)
    (save,) = bench.out("save")
    bench.finish(save, Reason.IO_ERROR)
    bench.run()
    bench.finish_all()
    bench.run()
    assert bench.core.settle_commit(reserved.lease_id, bench.now_ns).visible == 1
    assert bench.core.stats().counters["saves_failed"] == 1


def test_a_name_is_forgotten_behind_its_running_save() -> None:
    bench = Bench(slots=4, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    bench.put(session, space, keys(3, "others"))
    bench.hold_copies = True
    bench.reserve(session, space, keys(1, "new"))
    (save,) = bench.out("save")
    bench.core.invalidate(space_id=space, keys=keys(1), now_ns=bench.now_ns)
    assert not [e for e in bench.run() if isinstance(e, Forget)]
    bench.finish(save)
    assert bench.run() == [Forget(bench.disk, space, save.key)]
    assert bench.archived == set()


def test_a_closed_space_is_forgotten_and_so_is_what_is_still_being_saved() -> None:
    bench = Bench(slots=4, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    bench.put(session, space, keys(3, "others"))
    bench.hold_copies = True
    bench.reserve(session, space, keys(1, "new"))
    (save,) = bench.out("save")
    bench.core.invalidate(space_id=space, now_ns=bench.now_ns)
    assert Forget(bench.disk, space, b"") in bench.run()
    bench.finish(save)
    assert bench.run() == [Forget(bench.disk, space, save.key)]


def test_a_durable_commit_waits_for_the_archive() -> None:
    bench = Bench(slots=16, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(2))
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(4))
    bench.core.commit(session, reserved.lease_id, True, bench.now_ns)
    bench.run()
    bench.finish_all("commit")
    assert bench.have(session, space, keys(4)) == [True] * 4
    bench.ready.clear()
    saves = bench.out("save")
    assert [copy.key for copy in saves] == keys(4), "with the ancestors that are not saved"
    assert bench.ready == []
    for copy in saves:
        bench.finish(copy)
    bench.run()
    assert bench.ready == [reserved.lease_id]
    assert bench.core.settle_commit(reserved.lease_id, bench.now_ns) == (2, 0, 0, Reason.OK)


def test_a_durable_commit_tells_when_the_archive_failed() -> None:
    bench = Bench(slots=8, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.hold_copies = True
    reserved = bench.reserve(session, space, keys(1))
    bench.core.commit(session, reserved.lease_id, True, bench.now_ns)
    bench.run()
    bench.finish_all("commit")
    bench.finish(bench.out("save")[0], Reason.DISK_FULL)
    result = bench.core.settle_commit(reserved.lease_id, bench.now_ns)
    assert (result.visible, result.reason) == (1, Reason.DISK_FULL)


def test_what_is_present_and_to_be_durable_is_saved_and_waited_for() -> None:
    bench = Bench(slots=16, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(3))
    bench.hold_copies = True
    assert not bench.reserve(session, space, keys(3)).lease_id
    reserved = bench.reserve(session, space, keys(3), durable=True)
    assert reserved.lease_id
    assert (reserved.wanted, reserved.present) == ([], 3)
    bench.run()
    bench.ready.clear()
    committed = bench.core.commit(session, reserved.lease_id, True, bench.now_ns)
    assert committed == (False, Reason.OK), "it is waited for"
    for copy in bench.out("save"):
        assert bench.ready == []
        bench.finish(copy)
    bench.run()
    assert bench.ready == [reserved.lease_id]
    assert bench.core.settle_commit(reserved.lease_id, bench.now_ns) == (0, 0, 0, Reason.OK)
    assert not bench.reserve(session, space, keys(3), durable=True).lease_id, "they are on disk"


def test_saves_of_what_is_present_may_end_before_the_commit_or_without_one() -> None:
    bench = Bench(slots=16, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(2))
    bench.hold_copies = True
    committed, aborted = (bench.reserve(session, space, keys(2), durable=True) for _ in range(2))
    bench.run()
    bench.core.release(session, [aborted.lease_id], bench.now_ns)
    for copy in bench.out("save"):
        bench.finish(copy, Reason.DISK_FULL)
    bench.run()
    said = bench.core.commit(session, committed.lease_id, True, bench.now_ns)
    assert said == (True, Reason.OK), "nothing is left to wait for"
    result = bench.core.settle_commit(committed.lease_id, bench.now_ns)
    assert result == (0, 0, 0, Reason.DISK_FULL)


def test_a_durable_commit_is_refused_without_an_archive() -> None:
    bench = Bench()
    session = bench.session()
    space = bench.space(session)
    reserved = bench.reserve(session, space, keys(1))
    committed = bench.core.commit(session, reserved.lease_id, True, bench.now_ns)
    assert committed == (False, Reason.NO_DURABLE_TIER)
    assert bench.commit(session, reserved.lease_id).visible == 1, "it may still be committed"
    again = bench.reserve(session, space, keys(1), durable=True)
    said = bench.core.commit(session, again.lease_id, True, bench.now_ns)
    assert said == (False, Reason.NO_DURABLE_TIER), "present is not durable"


# ---------------------------------------------------------------- two pools


def test_a_hit_lifts_a_block_into_the_faster_pool() -> None:
    bench = Bench(slots=8, device_slots=4)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(2))
    assert bench.core.lookup(session, space, keys(2)) == bytes([2, 2])
    bench.use(session, space, keys(2))
    bench.run()
    assert bench.core.lookup(session, space, keys(2)) == bytes([1, 1])
    pools = bench.core.stats().pools
    assert [pool.blocks for pool in pools] == [2, 0]


def test_a_block_is_not_lifted_for_one_who_cannot_reach_it() -> None:
    bench = Bench(slots=8, device_slots=4)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    for _ in range(3):
        lease = bench.acquire(session, space, keys(1), reach=frozenset({1})).lease_id
        bench.core.release(session, [lease], bench.now_ns)
        bench.run()
    assert bench.core.lookup(session, space, keys(1)) == bytes([2])


def lifted(slots: int = 8, device_slots: int = 4) -> tuple[Bench, int, int]:
    """A bench whose device is full of the prompt `keys(device_slots)`."""
    bench = Bench(slots=slots, device_slots=device_slots)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(device_slots))
    for _ in range(2):
        bench.use(session, space, keys(device_slots))
        bench.run()
    assert bench.core.lookup(session, space, keys(device_slots)) == bytes([1]) * device_slots
    return bench, session, space


def test_what_is_evicted_above_moves_to_the_pool_below() -> None:
    bench, session, space = lifted()
    bench.put(session, space, keys(1, "hot"))
    for _ in range(2):
        bench.use(session, space, keys(1, "hot"))
        bench.run()
    assert bench.core.lookup(session, space, keys(1, "hot")) == bytes([1])
    assert bench.core.lookup(session, space, keys(4)) == bytes([1, 1, 1, 2])


def test_who_cannot_reach_the_faster_pool_gets_the_block_moved_down() -> None:
    bench, session, space = lifted()
    host = frozenset({1})
    assert not bench.acquire(session, space, keys(1), reach=host).lease_id
    waiting = bench.acquire(session, space, keys(1), reach=host, wait=True)
    bench.run()
    settled = bench.core.settle(waiting.lease_id, bench.now_ns)
    assert settled.places[0] is not None
    assert settled.places[0].tier == 1


def test_a_reader_above_keeps_its_bytes_while_the_block_moves_down() -> None:
    bench, session, space = lifted()
    held = bench.acquire(session, space, keys(1), mode=LeaseMode.VIEW).lease_id
    (place,) = bench.core.settle(held, bench.now_ns).places
    bench.acquire(session, space, keys(1), reach=frozenset({1}), wait=True)
    bench.run()
    assert bench.core.settle(held, bench.now_ns).places == [place]
    free = bench.core.stats().pools[0].free_slots
    bench.core.release(session, [held], bench.now_ns)
    assert bench.core.stats().pools[0].free_slots == free + 1


def test_a_promotion_that_fails_leaves_the_block_where_it_was() -> None:
    bench = Bench(slots=8, device_slots=4)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    bench.hold_copies = True
    bench.use(session, space, keys(1))
    bench.finish(bench.out("promote")[0], Reason.COPY_FAILED)
    bench.run()
    assert bench.core.lookup(session, space, keys(1)) == bytes([2])
    assert bench.core.stats().pools[0].free_slots == 4


def test_a_policy_is_told_of_every_block_that_leaves_its_pool_however_it_goes() -> None:
    policies: list[HitDensity[Slot]] = []

    def make() -> HitDensity[Slot]:
        policies.append(HitDensity())
        return policies[-1]

    bench = Bench(slots=6, device_slots=3, policy=make)
    session = bench.session()
    space = bench.space(session)
    for name in ("one", "two", "one", "three", "two"):
        bench.put(session, space, keys(3, name))
        bench.use(session, space, keys(3, name))
        bench.use(session, space, keys(3, name))
    counters = bench.core.books.counters
    assert counters["promoted"] > 3
    assert sum(arena.evictions for arena in bench.core.books.pools) > 3
    pools = [pool for arena in bench.core.books.pools for pool in arena.pools.values()]
    assert len(policies) == 1, "what is learnt is learnt for both pools"
    assert [pool.blocks for pool in pools if pool.policy is policies[0]] == [pools[0].blocks]
    assert all(pool.policy._inside == pool.blocks for pool in pools)  # type: ignore[attr-defined]


def test_an_invalidation_during_a_promotion_leaves_nothing() -> None:
    bench = Bench(slots=8, device_slots=4)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(1))
    bench.hold_copies = True
    bench.use(session, space, keys(1))
    assert len(bench.out("promote")) == 1
    bench.core.invalidate(space_id=space, keys=keys(1), now_ns=bench.now_ns)
    bench.finish_all()
    bench.run()
    assert bench.core.lookup(session, space, keys(1)) == bytes(1)
    assert sum(pool.blocks for pool in bench.core.stats().pools) == 0


def test_the_fill_of_a_slot_above_waits_for_its_victims_way_down() -> None:
    bench, session, space = lifted()
    bench.put(session, space, keys(1, "hot"))
    bench.hold_copies = True
    bench.use(session, space, keys(1, "hot"))
    (demote,) = bench.out("demote")
    assert bench.out("promote") == []
    bench.finish(demote)
    (promote,) = bench.out("promote")
    assert promote.target.slot == demote.source.slot


def test_a_block_that_an_archive_aged_out_is_known_as_such_where_it_moves_to() -> None:
    """Else it would be saved anew after each move, though nobody asked for it since."""
    bench = Bench(slots=4, device_slots=8, device_below=True, disk=True)
    session = bench.session()
    space = bench.space(session)
    bench.put(session, space, keys(4, "old"))
    assert bench.core.save_ahead(True, bench.now_ns) == 4
    bench.settle_all()
    bench.core.archive_dropped(bench.disk, space, keys(4, "old"))
    opened = bench.core.books.spaces.get(space)
    assert opened is not None
    assert not any(opened.index[key].worth_saving() for key in keys(4, "old"))
    bench.put(session, space, keys(4, "new"))
    old = [opened.index[key] for key in keys(4, "old")]
    assert [slot.pool.tier for slot in old] == [1] * 4
    assert not any(slot.saved or slot.worth_saving() for slot in old)
