"""The fd socket and what is mapped through it: hand-over, closing, hang-up, lies.

The daemon's end of the socket is played by the test itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore import shm
from kvstore.model.reasons import Reason
from kvstore.wire.v1 import fd_pb2
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.channel import CallFailed
from kvstore_client.regions import Memory

SECRET = b"s" * 16
SLOTS = 4
SLOT_BYTES = 8192
WAIT_S = 10.0


class Peer:
    """The daemon's end. A thread of its own answers by what the test has put into `regions`."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.regions: dict[int, tuple[pb.RegionInfo, int]] = {}
        self.staging: tuple[int, int, int] | None = None
        self.welcome: list[int] = []
        self.refusal = Reason.OK
        self.mute = False
        self.asked: list[str] = []
        self.handed: list[int] = []
        self.unmapped: list[int] = []
        self.pidfds = 0
        self.changed = threading.Condition()
        self.hangups = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def memory(self, populate: bool = False, previous: Memory | None = None) -> Memory:
        return Memory.attach(
            self.theirs,
            SECRET,
            WAIT_S,
            populate=populate,
            on_hangup=self.hangups.set,
            previous=previous,
        )

    def add(self, number: int, region: shm.SharedRegion, **wrong: int) -> None:
        info = pb.RegionInfo(
            region_id=number,
            slots=SLOTS,
            slot_bytes=SLOT_BYTES,
            data_offset=shm.header_bytes(SLOTS),
            total_bytes=region.total_bytes,
        )
        for name, value in wrong.items():
            setattr(info, name, value)
        self.regions[number] = info, region.fd

    def unmap(self, region_id: int) -> None:
        event = fd_pb2.FdReply(unmap=fd_pb2.Unmap(region_id=region_id))
        shm.send_frame(self.ours, event.SerializeToString())

    def hang_up(self) -> None:
        self.ours.shutdown(socket.SHUT_RDWR)

    def wait(self, until: Callable[[], object]) -> bool:
        with self.changed:
            return bool(self.changed.wait_for(until, WAIT_S))

    def _serve(self) -> None:
        try:
            while True:
                frame, fds = shm.recv_frame(self.ours)
                self.pidfds += len(fds)
                shm.close_fds(fds)
                request = fd_pb2.FdRequest.FromString(frame)
                reply, fd = self._reply(request)
                if reply is not None and not self.mute:
                    reply.seq = request.seq
                    shm.send_frame(self.ours, reply.SerializeToString(), fd)
                with self.changed:
                    self.changed.notify_all()
        except OSError:
            pass

    def _reply(self, request: fd_pb2.FdRequest) -> tuple[fd_pb2.FdReply | None, int | None]:
        kind = request.WhichOneof("request") or ""
        self.asked.append(kind)
        if kind == "unmapped":
            self.unmapped.append(request.unmapped.region_id)
            return None, None
        if self.refusal is not Reason.OK:
            return fd_pb2.FdReply(reason=pb.Reason.ValueType(self.refusal)), None
        if kind == "hello":
            infos = [pb.RegionInfo(region_id=number) for number in self.welcome]
            welcome = fd_pb2.FdWelcome(regions=infos)
            return fd_pb2.FdReply(reason=pb.REASON_OK, welcome=welcome), None
        if kind == "get_staging" and self.staging is not None:
            number, total, fd = self.staging
            self.handed.append(number)
            info = fd_pb2.StagingInfo(region_id=number, total_bytes=total)
            return fd_pb2.FdReply(reason=pb.REASON_OK, staging=info), fd
        found = self.regions.get(request.get_region.region_id)
        if found is None:
            return fd_pb2.FdReply(reason=pb.REASON_REGION_UNKNOWN), None
        self.handed.append(request.get_region.region_id)
        return fd_pb2.FdReply(reason=pb.REASON_OK, region=found[0]), found[1]


@pytest.fixture
def peer() -> Iterator[Peer]:
    one = Peer()
    yield one
    one.hang_up()
    one._thread.join(WAIT_S)
    one.ours.close()
    one.theirs.close()


@pytest.fixture
def region() -> Iterator[shm.SharedRegion]:
    made = shm.create_region(shm.header_bytes(SLOTS) + SLOTS * SLOT_BYTES, "test-region")
    made.seal(shm.ARENA_SEALS)
    made.map.slots2d(shm.header_bytes(SLOTS), SLOT_BYTES, SLOTS)[:] = np.arange(SLOTS)[:, None]
    made.map.generations(SLOTS)[:] = [5, 6, 7, 8]
    yield made
    made.close()


def mapped(name: str) -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum(name in line for line in maps)


def test_a_region_is_mapped_once_and_read(peer: Peer, region: shm.SharedRegion) -> None:
    peer.add(3, region)
    memory = peer.memory()
    one = memory.region(3, WAIT_S)
    assert memory.region(3, WAIT_S) is one
    assert peer.asked == ["hello", "get_region"]
    assert peer.pidfds == 1  # our own, with the Hello
    assert one.generations.tolist() == [5, 6, 7, 8]
    assert [int(row[-1]) for row in one.slots2d] == [0, 1, 2, 3]
    assert not one.slots2d.flags.writeable
    region.map.generations(SLOTS)[1] = 60
    assert int(one.generations[1]) == 60
    memory.close()


def test_many_threads_ask_for_one_region_together(peer: Peer, region: shm.SharedRegion) -> None:
    peer.add(3, region)
    memory = peer.memory()
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(memory.region(3, WAIT_S))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    memory.close()


def test_regions_of_the_welcome_are_mapped_ahead(peer: Peer, region: shm.SharedRegion) -> None:
    for number in range(1, 8):
        peer.add(number, region)
    peer.welcome = list(range(1, 8))
    memory = peer.memory(populate=True)
    assert peer.wait(lambda: peer.asked.count("get_region") == 7)
    for number in range(1, 8):
        assert memory.region(number, WAIT_S).id == number
    assert peer.asked.count("get_region") == 7
    memory.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_staging_is_written_and_not_inherited(peer: Peer) -> None:
    region = shm.create_region(1 << 20, "test-staging")
    region.seal(shm.STAGING_SEALS)
    peer.staging = (9, region.total_bytes, region.fd)
    memory = peer.memory(populate=True)
    staging = memory.staging(9, WAIT_S)
    staging.memory.u8[100] = 42
    assert int(region.map.u8[100]) == 42
    pid = os.fork()
    if pid == 0:
        os._exit(mapped("test-staging") - 1)  # the maker's own mapping stays
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # The daemon made another one: it is asked for again.
    peer.staging = (10, region.total_bytes, region.fd)
    assert memory.staging(10, WAIT_S).id == 10
    assert peer.wait(lambda: peer.unmapped == [9])
    memory.close()
    region.close()


def test_an_unmap_is_answered_when_nobody_looks_any_more(
    peer: Peer, region: shm.SharedRegion
) -> None:
    peer.add(3, region)
    memory = peer.memory()
    one = memory.region(3, WAIT_S)
    view = one.slots2d[2, :100]
    peer.regions.clear()
    peer.unmap(3)
    peer.unmap(77)  # not ours: nothing to unmap, and said so
    assert peer.wait(lambda: peer.unmapped == [77])
    assert one.gone
    assert int(view[0]) == 2  # in place as long as it is looked at
    with pytest.raises(CallFailed) as caught:
        memory.region(3, WAIT_S)
    assert caught.value.reason is Reason.REGION_UNKNOWN
    del view
    gc.collect()
    assert peer.wait(lambda: peer.unmapped == [77, 3])
    memory.close()


def test_what_is_kept_for_too_long_shows_zeros_and_is_given_back(
    peer: Peer, region: shm.SharedRegion
) -> None:
    before = mapped("test-region")
    peer.add(3, region)
    memory = peer.memory()
    one = memory.region(3, WAIT_S)
    kept, generations = one.slots2d, one.generations
    peer.unmap(3)
    peer.unmap(77)  # not ours: answered when 3 was looked at
    assert peer.wait(lambda: peer.unmapped == [77])
    assert int(kept[2, 0]) == 2
    memory._kept_until[3] = 0.0
    assert peer.wait(lambda: peer.unmapped == [77, 3])
    assert mapped("test-region") == before
    assert not kept.any(), "in place, but not the daemon's memory"
    assert not generations.any(), "and no generation is right"
    memory.close()


def test_close_gives_back_what_is_still_viewed(peer: Peer, region: shm.SharedRegion) -> None:
    before = mapped("test-region")
    staging = shm.create_region(8192, "test-region")
    staging.seal(shm.STAGING_SEALS)
    peer.add(3, region)
    peer.staging = (9, staging.total_bytes, staging.fd)
    memory = peer.memory()
    kept = memory.region(3, WAIT_S).slots2d
    written = memory.staging(9, WAIT_S).memory.u8
    written[:] = 7
    memory.close()
    assert peer.wait(lambda: sorted(peer.unmapped) == [3, 9])
    assert mapped("test-region") == before + 1, "only the daemon's own"
    assert not kept.any()
    written[:] = 1  # a slow writer
    assert (staging.map.u8 == 7).all()
    staging.close()


def test_hang_up_drops_everything_by_itself(peer: Peer, region: shm.SharedRegion) -> None:
    before = mapped("test-region")
    peer.add(3, region)
    memory = peer.memory()
    one = memory.region(3, WAIT_S)
    assert mapped("test-region") == before + 1
    peer.hang_up()
    assert peer.hangups.wait(WAIT_S)
    assert not memory.alive
    assert one.gone
    assert mapped("test-region") == before
    assert memory.left_behind() == {3: []}
    with pytest.raises(CallFailed) as caught:
        memory.region(3, WAIT_S)
    assert caught.value.outage
    memory.close()


def test_after_a_hang_up_close_writes_into_nobody_elses_file(peer: Peer) -> None:
    memory = peer.memory()
    number = memory._wake_fd
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
    peer.hang_up()
    assert peer.hangups.wait(WAIT_S)
    os.dup2(write_fd, number)  # what the process opens next may get the number
    try:
        memory.close()
        with pytest.raises(BlockingIOError):
            os.read(read_fd, 64)
        assert os.fstat(number).st_ino == os.fstat(write_fd).st_ino
    finally:
        for fd in (read_fd, write_fd, number):
            os.close(fd)


def test_views_outlive_a_hang_up_and_the_next_session_tells_of_them(
    peer: Peer, region: shm.SharedRegion
) -> None:
    before = mapped("test-region")
    for number in (3, 4):
        peer.add(number, region)
    memory = peer.memory()
    memory.region(4, WAIT_S)
    view = memory.region(3, WAIT_S).slots2d[1]
    peer.hang_up()
    assert peer.hangups.wait(WAIT_S)
    assert int(view[0]) == 1
    again = Peer()
    after = again.memory(previous=memory)
    assert again.wait(lambda: again.unmapped == [4])
    assert int(view[0]) == 1
    del view
    gc.collect()
    assert again.wait(lambda: again.unmapped == [4, 3])
    assert mapped("test-region") == before
    after.close()
    memory.close()
    again.ours.close()


def test_close_tells_the_daemon_what_it_unmapped(peer: Peer, region: shm.SharedRegion) -> None:
    peer.add(3, region)
    memory = peer.memory()
    memory.region(3, WAIT_S)
    memory.close()
    memory.close()
    assert peer.wait(lambda: peer.unmapped == [3])
    assert not peer.hangups.is_set()  # that was no hang-up


@pytest.mark.parametrize(
    "wrong",
    [
        {"region_id": 4},
        {"slots": 0},
        {"slots": 1_000_000},
        {"slot_bytes": 0},
        {"slot_bytes": 1 << 40},
        {"data_offset": 8},
        {"total_bytes": 0},
        {"total_bytes": 1 << 40},
    ],
)
def test_impossible_layouts_are_refused(
    peer: Peer, region: shm.SharedRegion, wrong: dict[str, int]
) -> None:
    peer.add(3, region, **wrong)
    memory = peer.memory()
    with pytest.raises(CallFailed) as caught:
        memory.region(3, WAIT_S)
    assert caught.value.reason is Reason.REGION_UNKNOWN
    assert memory.alive
    assert peer.wait(lambda: peer.unmapped == [3]), "the daemon counted it as mapped"
    memory.close()


def test_memory_that_could_shrink_under_us_is_refused(peer: Peer) -> None:
    unsealed = shm.create_region(shm.header_bytes(SLOTS) + SLOTS * SLOT_BYTES, "test-unsealed")
    peer.add(3, unsealed)
    memory = peer.memory()
    with pytest.raises(CallFailed):
        memory.region(3, WAIT_S)
    memory.close()
    unsealed.close()


def test_close_disowns_what_was_asked_for_and_never_came(peer: Peer) -> None:
    memory = peer.memory()
    peer.mute = True
    with pytest.raises(CallFailed):
        memory.region(3, 0.01)
    memory.close()
    assert peer.wait(lambda: peer.unmapped == [3])


def test_close_disowns_what_was_on_its_way(region: shm.SharedRegion) -> None:
    """Whatever the daemon has handed over by then, mapped or not, staging too."""
    for _ in range(50):
        one = Peer()
        for number in (3, 4, 5, 6):
            one.add(number, region)
        one.welcome = [3, 4, 5, 6]
        staging = shm.create_region(SLOT_BYTES, "test-staging")
        staging.seal(shm.STAGING_SEALS)
        one.staging = (9, SLOT_BYTES, staging.fd)
        memory = one.memory(populate=True)
        asking = threading.Thread(target=asked_in_vain, args=(memory,))
        asking.start()
        memory.close()
        asking.join()
        one._thread.join(WAIT_S)
        assert sorted(one.unmapped) == sorted(one.handed), "each of them is told, once"
        one.ours.close()
        staging.close()


def asked_in_vain(memory: Memory) -> None:
    with contextlib.suppress(CallFailed):
        memory.staging(9, WAIT_S)


def test_no_answer_ends_with_the_deadline(peer: Peer, region: shm.SharedRegion) -> None:
    memory = peer.memory()
    peer.mute = True
    with pytest.raises(CallFailed) as caught:
        memory.region(3, 0.05)
    assert (caught.value.reason, caught.value.outage) == (Reason.DEADLINE_EXCEEDED, True)
    memory.close()


def test_a_refused_hello_is_a_permission_error(peer: Peer) -> None:
    peer.refusal = Reason.PERMISSION_DENIED
    with pytest.raises(PermissionError, match="PERMISSION_DENIED"):
        peer.memory()
    assert peer.theirs.fileno() == -1


def test_garbage_instead_of_a_welcome(peer: Peer) -> None:
    peer.mute = True
    shm.send_frame(peer.ours, b"\xff\xff")
    with pytest.raises(ConnectionError, match="garbage"):
        peer.memory()


def test_garbage_later_is_a_hang_up(peer: Peer) -> None:
    memory = peer.memory()
    shm.send_frame(peer.ours, b"\xff\xff")
    assert peer.hangups.wait(WAIT_S)
    assert not memory.alive
    memory.close()


def test_nothing_leaks_over_many_sessions(region: shm.SharedRegion) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors(), threading.active_count(), mapped("test-region")
    for number in range(20):
        one = Peer()
        one.add(3, region)
        memory = one.memory()
        memory.region(3, WAIT_S)
        if number % 2:
            one.hang_up()
            assert one.hangups.wait(WAIT_S)
        memory.close()
        one.hang_up()
        one._thread.join(WAIT_S)
        one.ours.close()
        one.theirs.close()
    assert (descriptors(), threading.active_count(), mapped("test-region")) == before
