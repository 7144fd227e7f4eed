"""The mover between host memory and a device: what is published, when, and on whose thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore import gather, shm
from kvstore.core.effects import Copy, Why
from kvstore.model.reasons import Reason
from kvstore.model.values import STAGING, Place, Region
from kvstore.mover import CROSS_BYTES_MAX, CROSS_WORKERS, SAVE_BYTES_MAX, Completion, Mover
from kvstore.testing.clock import ManualClock
from kvstore.testing.gpu import RecordingDriver
from kvstore.tiers.base import SavedBlock
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.host import HostTier

DEVICE, HOST, DISK = 0, 1, 2
SLOT, SLOTS = 4096, 8
HUNG_S = 30


class Saves:
    """An archive that is only saved to."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}

    def save_batch(self, blocks: list[SavedBlock]) -> list[bytes]:
        for block in blocks:
            assert block.data.ctypes.data % 4096 == 0, "a disk wants whole pages"
            self.held[block.key] = block.data.tobytes()
        return [gather.digest(block.data) for block in blocks]


class Bench:
    """A mover over a device, host memory and an archive; this thread stands for the loop's."""

    def __init__(self) -> None:
        self.driver = RecordingDriver()
        self.threads = ThreadPoolExecutor(CROSS_WORKERS)
        self.others = ThreadPoolExecutor(2)
        self.host = HostTier(1 << 20, region_bytes=1 << 16, mlock="off")
        self.device = DeviceTier(
            self.driver, 1 << 20, background=self.threads, host_map=self.host.mapped
        )
        header = shm.header_bytes(SLOTS)
        for tier, memory in ((DEVICE, self.device), (HOST, self.host)):
            region_id = 1 + tier
            total = header + SLOTS * SLOT
            memory.assign(Region(region_id, tier, "t", SLOT, SLOTS, header, total))
        self.threads.submit(self.device.open).result()
        self.driver.loop_thread = threading.get_ident()
        self.archive = Saves()
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.done: list[Completion] = []
        self.mover = Mover(
            {HOST: self.host, STAGING: self.host},
            clock=ManualClock(),
            post=self.posted.put,
            on_done=self.done.extend,
            executor=self.others,
            archives={DISK: self.archive},  # type: ignore[dict-item]
            archive_executor=self.others,
            remotes={DEVICE: self.device},
            remote_executor=self.threads,
        )

    def run(self, *copies: Copy) -> list[Completion]:
        """Completions of these copies, in the order of their ids."""
        before = len(self.done)
        self.mover.submit(copies)
        while len(self.done) < before + len(copies):
            self.posted.get(timeout=HUNG_S)()
        return sorted(self.done[before:])

    def close(self) -> None:
        self.mover.close()
        self.threads.submit(self.device.close).result()
        self.threads.shutdown()
        self.others.shutdown()
        self.host.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.close()
    assert one.driver.broken == []


def copy(copy_id: int, why: Why, source: Place, target: Place) -> Copy:
    return Copy(copy_id, why, 5, bytes([copy_id]) * 32, source, target, SLOT)


def at(tier: int, slot: int, generation: int = 1) -> Place:
    return Place(tier, 0 if tier == DISK else 1 + tier, slot, generation, 0)


def test_blocks_come_back_as_they_went_up(bench: Bench) -> None:
    for slot in range(3):
        bench.host.view(at(HOST, slot), SLOT)[:] = 10 + slot
    ups = [copy(i + 1, "promote", at(HOST, i), at(DEVICE, 7 - i, 40 + i)) for i in range(3)]
    assert all(done.ok for done in bench.run(*ups))
    assert [bench.device.generation(1, 7 - i) for i in range(3)] == [40, 41, 42]
    downs = [copy(i + 9, "demote", at(DEVICE, 7 - i), at(HOST, 4 + i, 50 + i)) for i in range(3)]
    assert all(done.ok for done in bench.run(*downs))
    for slot in range(3):
        assert (bench.host.view(at(HOST, 4 + slot), SLOT) == 10 + slot).all()
        assert bench.host.generation(2, 4 + slot) == 50 + slot


def test_a_generation_is_written_before_its_copy_is_begun(bench: Bench) -> None:
    seen: list[int] = []

    def before(call: str) -> None:
        if call == "copy_in":
            seen.append(bench.device.generation(1, 2))

    bench.driver.before = before
    bench.run(copy(1, "promote", at(HOST, 0), at(DEVICE, 2, 77)))
    assert seen == [77]


def test_nothing_is_said_to_be_done_before_its_event_has_ended(bench: Bench) -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def before(call: str) -> None:
        if call == "wait":
            waiting.set()
            assert go_on.wait(HUNG_S)

    bench.run(copy(1, "promote", at(HOST, 0), at(DEVICE, 0)))
    bench.driver.before = before
    bench.mover.submit([copy(2, "promote", at(HOST, 1), at(DEVICE, 1))])
    assert waiting.wait(HUNG_S)
    assert bench.posted.empty()
    assert len(bench.done) == 1
    go_on.set()
    bench.posted.get(timeout=HUNG_S)()
    assert [done.copy_id for done in bench.done] == [1, 2]


def test_a_slot_is_read_before_it_is_filled_again(bench: Bench) -> None:
    bench.host.view(at(HOST, 0), SLOT)[:] = 1
    bench.host.view(at(HOST, 1), SLOT)[:] = 2
    bench.run(copy(1, "promote", at(HOST, 0), at(DEVICE, 0)))
    bench.run(
        copy(2, "demote", at(DEVICE, 0), at(HOST, 2)),
        copy(3, "promote", at(HOST, 1), at(DEVICE, 0, 2)),
        copy(4, "demote", at(DEVICE, 0), at(HOST, 3)),
    )
    assert (bench.host.view(at(HOST, 2), SLOT) == 1).all()
    assert (bench.host.view(at(HOST, 3), SLOT) == 2).all()


def test_a_block_is_saved_out_of_the_device(bench: Bench) -> None:
    bench.host.view(at(HOST, 0), SLOT)[:] = 9
    bench.run(copy(1, "promote", at(HOST, 0), at(DEVICE, 5)))
    (saved,) = bench.run(copy(2, "save", at(DEVICE, 5), at(DISK, 0)))
    assert saved.ok
    assert bench.archive.held == {bytes([2]) * 32: bytes([9]) * SLOT}


def test_saves_out_of_the_device_are_begun_before_one_is_waited_for(bench: Bench) -> None:
    """One at a time they would hold the archive's only writer up for each."""
    for slot in range(4):
        bench.host.view(at(HOST, slot), SLOT)[:] = 10 + slot
        bench.run(copy(slot + 1, "promote", at(HOST, slot), at(DEVICE, slot)))
    bench.driver.log.clear()
    saves = [copy(10 + slot, "save", at(DEVICE, slot), at(DISK, 0)) for slot in range(4)]
    bench.run(*saves, copy(20, "save", at(HOST, 3), at(DISK, 0)))
    calls = [call for call in bench.driver.log if call in ("copy_out", "wait")]
    assert calls == ["copy_out"] * 4 + ["wait"] * 4
    expected = {bytes([10 + slot]) * 32: bytes([10 + slot]) * SLOT for slot in range(4)}
    assert bench.archive.held == {**expected, bytes([20]) * 32: bytes([13]) * SLOT}


def test_a_defect_of_the_device_answers_the_saves_out_of_it(bench: Bench) -> None:
    bench.run(copy(1, "promote", at(HOST, 0), at(DEVICE, 0)))

    def before(call: str) -> None:
        if call == "copy_out":
            raise RuntimeError("no OSError")

    bench.driver.before = before
    saves = [copy(2, "save", at(DEVICE, 0), at(DISK, 0)), copy(3, "save", at(HOST, 0), at(DISK, 0))]
    far, near = bench.run(*saves)
    assert (far.ok, far.reason) == (False, Reason.INTERNAL)
    assert near.ok


def test_a_turn_of_saves_copies_little_out_of_the_device_at_a_time(bench: Bench) -> None:
    save = copy(1, "save", at(DEVICE, 0), at(DISK, 0))
    near = copy(2, "save", at(HOST, 0), at(DISK, 0))
    weigh = bench.mover._weight_bytes
    assert weigh(near) == SLOT
    assert weigh(save) * CROSS_BYTES_MAX == SLOT * SAVE_BYTES_MAX
    assert weigh(copy(3, "demote", at(DEVICE, 0), at(HOST, 0))) == SLOT


def test_a_lost_device_is_an_answer_to_each_copy(bench: Bench) -> None:
    bench.driver.lost_at = 0
    done = bench.run(
        copy(1, "promote", at(HOST, 0), at(DEVICE, 0)),
        copy(2, "demote", at(DEVICE, 1), at(HOST, 1)),
        copy(3, "save", at(DEVICE, 2), at(DISK, 0)),
    )
    assert [(one.ok, one.reason) for one in done] == [(False, Reason.IO_ERROR)] * 3
    assert bench.driver.log == ["open", "stream", "stream"]


def test_a_closed_region_is_an_answer(bench: Bench) -> None:
    bench.device.unassign(1)
    (done,) = bench.run(copy(1, "promote", at(HOST, 0), at(DEVICE, 0)))
    assert (done.ok, done.reason) == (False, Reason.REGION_UNKNOWN)


def test_copies_into_a_full_device_are_counted_not_told(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Another has taken its memory: that may be thousands, as long as it lasts."""
    bench.driver.capacity_bytes = 0
    with caplog.at_level(logging.DEBUG):
        done = bench.run(*(copy(i + 1, "demote", at(HOST, i), at(DEVICE, i)) for i in range(8)))
    assert [one.reason for one in done] == [Reason.NO_SPACE] * 8
    assert [one.getMessage() for one in caplog.records if one.name == "kvstore.mover"] == []
    assert bench.device.stats().copies_failed == 8
