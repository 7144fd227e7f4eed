"""Sealed memory, mappings that last as long as their views, and the hand-over of descriptors."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import shm
from kvstore.shm import ARENA_SEALS, STAGING_SEALS, MappedRegion, Seal, SharedRegion

TOTAL = 4 * shm.PAGE_BYTES
PATTERN = 0xA5

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


def checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.fixture
def region(request: pytest.FixtureRequest) -> Iterator[SharedRegion]:
    made = shm.create_region(TOTAL, name_of(request))
    made.map.u8[:] = PATTERN
    yield made
    made.close()


def name_of(request: pytest.FixtureRequest) -> str:
    return "t-" + re.sub(r"\W", "", request.node.name)[:40]


def maps(name: str) -> str:
    """The entries of this process's mappings of the memfd `name`, as in /proc/PID/smaps."""
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)
    return "".join(entry for entry in entries if f"/memfd:{name} " in entry)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------- what a client cannot do


def write(fd: int) -> None:
    os.pwrite(fd, b"x", 0)


def shrink(fd: int) -> None:
    os.ftruncate(fd, shm.PAGE_BYTES)


def grow(fd: int) -> None:
    os.ftruncate(fd, 2 * TOTAL)


def punch_hole(fd: int) -> None:
    checked(_libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, 0, shm.PAGE_BYTES))


def map_writable(fd: int) -> None:
    mapped = shm.map_region(fd, TOTAL, writable=True, populate=False)
    mapped.u8[0] = 0


def make_map_writable(fd: int) -> None:
    mapped = shm.map_region(fd, TOTAL, writable=False, populate=False)
    checked(_libc.mprotect(mapped.address, TOTAL, mmap.PROT_READ | mmap.PROT_WRITE))
    ctypes.memset(mapped.address, 0, 1)


def remove_through_map(fd: int) -> None:
    mapped = shm.map_region(fd, TOTAL, writable=False, populate=False)
    checked(_libc.madvise(mapped.address, shm.PAGE_BYTES, mmap.MADV_REMOVE))


def splice_in(fd: int) -> None:
    source = os.memfd_create("source", os.MFD_CLOEXEC)
    try:
        os.write(source, b"x" * 64)
        os.sendfile(fd, source, 0, 64)
    finally:
        os.close(source)


def reopened(attack: Callable[[int], None]) -> Callable[[int], None]:
    def run(fd: int) -> None:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            attack(own)
        finally:
            os.close(own)

    run.__name__ = f"reopened_{attack.__name__}"
    return run


DIRECT = [
    write,
    shrink,
    grow,
    punch_hole,
    map_writable,
    make_map_writable,
    remove_through_map,
    splice_in,
]
REFUSED = r"not permitted|Permission denied|Bad file descriptor|Invalid argument"
ATTACKS = DIRECT + [reopened(attack) for attack in DIRECT]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_client_cannot_change_a_sealed_region(
    region: SharedRegion, attack: Callable[[int], None]
) -> None:
    region.seal(ARENA_SEALS)
    fd = shm.open_readonly_fd(region.fd)
    try:
        with pytest.raises(OSError, match=REFUSED):
            attack(fd)
        assert os.fstat(fd).st_size == TOTAL
        assert (region.map.u8 == PATTERN).all()
    finally:
        os.close(fd)


# Older kernels refuse to punch holes through any mapping that is not writable.
@pytest.mark.parametrize(
    "attack", [a for a in DIRECT if a is not remove_through_map], ids=lambda attack: attack.__name__
)
def test_the_attacks_would_succeed_without_seals(
    region: SharedRegion, attack: Callable[[int], None]
) -> None:
    reopened(attack)(region.fd)
    size = os.fstat(region.fd).st_size
    assert size != TOTAL or os.pread(region.fd, 1, 0) != bytes([PATTERN])


def test_the_maker_goes_on_writing_after_sealing(region: SharedRegion) -> None:
    region.seal(ARENA_SEALS)
    fd = shm.open_readonly_fd(region.fd)
    client = shm.map_region(fd, TOTAL, writable=False, populate=True, require=ARENA_SEALS)
    os.close(fd)
    region.map.u8[7] = 1
    assert client.u8[7] == 1


def test_seals_are_for_good(region: SharedRegion) -> None:
    region.seal(ARENA_SEALS)
    assert shm.seals_of(region.fd) & ARENA_SEALS == ARENA_SEALS
    with pytest.raises(PermissionError):
        region.seal(Seal.WRITE)


def test_a_read_only_descriptor_cannot_add_seals(region: SharedRegion) -> None:
    fd = shm.open_readonly_fd(region.fd)
    try:
        with pytest.raises(PermissionError):
            SharedRegion(fd, region.map).seal(Seal.SHRINK)
    finally:
        os.close(fd)


@pytest.mark.parametrize("attack", [shrink, grow], ids=lambda attack: attack.__name__)
def test_staging_keeps_its_size(region: SharedRegion, attack: Callable[[int], None]) -> None:
    region.seal(STAGING_SEALS)
    with pytest.raises(PermissionError):
        attack(region.fd)


def test_a_hole_in_staging_reads_as_zeros(region: SharedRegion) -> None:
    region.seal(STAGING_SEALS)
    client = shm.map_region(region.fd, TOTAL, writable=True, populate=False, require=STAGING_SEALS)
    client.u8[shm.PAGE_BYTES] = 3
    punch_hole(region.fd)
    assert region.map.u8[: shm.PAGE_BYTES].max() == 0
    assert region.map.u8[shm.PAGE_BYTES] == 3


# ---------------------------------------------------------------- mappings


def test_close_unmaps_at_once(region: SharedRegion, request: pytest.FixtureRequest) -> None:
    name = name_of(request)
    assert maps(name)
    assert region.close()
    assert not maps(name)
    assert region.close()


VIEWS: list[Callable[[MappedRegion], Any]] = [
    lambda r: r.u8,
    lambda r: r.u8[3:5],
    lambda r: r.u8[8:16].view(np.uint64),
    lambda r: r.slots2d(0, 64, 2)[1].data,
    lambda r: r.generations(2),
]


@pytest.mark.parametrize("view_of", VIEWS)
def test_a_view_keeps_the_mapping(
    region: SharedRegion, request: pytest.FixtureRequest, view_of: Callable[[MappedRegion], Any]
) -> None:
    view = view_of(region.map)
    assert not region.close()
    assert maps(name_of(request))
    assert PATTERN in bytes(view)
    del view
    assert not maps(name_of(request))
    assert region.close()


@pytest.mark.parametrize("writable", [False, True])
def test_a_withdrawn_region_lets_go_under_its_views(
    region: SharedRegion, request: pytest.FixtureRequest, writable: bool
) -> None:
    other = shm.map_region(region.fd, TOTAL, writable=writable, populate=True)
    if writable:
        shm.dontfork(other)
    view, name = other.u8[5:], name_of(request)
    assert len(re.findall(name, maps(name))) == 2
    for _ in range(2):
        other.withdraw()
        assert len(re.findall(name, maps(name))) == 1
    assert not view.any()
    if writable:
        view[:] = 1
    else:
        assert not view.flags.writeable
    assert (region.map.u8 == PATTERN).all()
    assert not other.close(), "the zeros go with the last view"
    with pytest.raises(ValueError, match="closed"):
        _ = other.u8
    del view
    gc.collect()
    assert other.close()
    other.withdraw()  # nothing is left: another mapping may be at its address


def test_a_closed_region_gives_no_views(region: SharedRegion) -> None:
    kept = region.map.u8
    region.close()
    with pytest.raises(ValueError, match="closed"):
        region.map.slots2d(0, 64, 1)
    assert kept[0] == PATTERN


def test_a_dropped_region_unmaps_itself(request: pytest.FixtureRequest) -> None:
    name = name_of(request)
    fd = shm.create_region(TOTAL, name).fd
    gc.collect()
    assert not maps(name)
    os.close(fd)


def test_a_mapping_holds_no_descriptor(region: SharedRegion) -> None:
    before = descriptors()
    mapped = shm.map_region(region.fd, TOTAL, writable=False, populate=False)
    assert descriptors() == before
    region.close()
    assert mapped.u8[0] == PATTERN
    assert descriptors() == before - 1


def test_a_read_only_mapping_cannot_be_written(region: SharedRegion) -> None:
    view = shm.map_region(region.fd, TOTAL, writable=False, populate=False).u8[:8]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.setflags(write=True)
    assert view.data.readonly


def test_shapes_of_views(region: SharedRegion) -> None:
    region.map.generations(4)[:] = [1, 2, 3, 1 << 63]
    slots = region.map.slots2d(shm.PAGE_BYTES, 1024, 8)
    slots[7] = 9
    assert slots.shape == (8, 1024)
    assert slots.flags.c_contiguous
    assert region.map.u8[:32].tobytes() == struct.pack("<4Q", 1, 2, 3, 1 << 63)
    assert (region.map.u8[shm.PAGE_BYTES + 7 * 1024 :][:1024] == 9).all()


@pytest.mark.parametrize(
    ("offset", "slot_bytes", "slots"), [(0, TOTAL, 2), (1, TOTAL, 1), (-1, 8, 1), (0, 0, 1)]
)
def test_slots_must_fit(region: SharedRegion, offset: int, slot_bytes: int, slots: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        region.map.slots2d(offset, slot_bytes, slots)


@pytest.mark.parametrize("total_bytes", [0, -1, TOTAL + 1])
def test_what_is_mapped_must_exist(region: SharedRegion, total_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot map"):
        shm.map_region(region.fd, total_bytes, writable=False, populate=False)


def test_required_seals_must_be_there(region: SharedRegion, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SHRINK"):
        shm.map_region(region.fd, TOTAL, writable=False, populate=False, require=Seal.SHRINK)
    (tmp_path / "file").write_bytes(bytes(TOTAL))
    with (tmp_path / "file").open("rb") as file, pytest.raises(ValueError, match="SHRINK"):
        shm.map_region(file.fileno(), TOTAL, writable=False, populate=False, require=Seal.SHRINK)


def test_shrink_gives_pages_back(region: SharedRegion) -> None:
    region.shrink(shm.PAGE_BYTES + 1)
    region.seal(ARENA_SEALS)
    assert region.total_bytes == len(region.map.u8) == os.fstat(region.fd).st_size
    assert os.fstat(region.fd).st_blocks * 512 == 2 * shm.PAGE_BYTES
    assert (region.map.u8 == PATTERN).all()


@pytest.mark.parametrize(
    ("slots", "expected"), [(0, 0), (1, 4096), (512, 4096), (513, 8192), (1024, 8192)]
)
def test_header_is_whole_pages(slots: int, expected: int) -> None:
    assert shm.header_bytes(slots) == expected


# ---------------------------------------------------------------- pages


def allocated(region: SharedRegion) -> int:
    return os.fstat(region.fd).st_blocks * 512


def no_populate(address: int, length: int, advice: int) -> None:
    raise OSError(errno.EINVAL, "an older kernel")


def out_of_memory(address: int, length: int, advice: int) -> None:
    raise OSError(errno.ENOMEM, "no page left")


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("old_kernel", [False, True])
def test_prefault_allocates_exactly_the_range(
    request: pytest.FixtureRequest, write: bool, old_kernel: bool
) -> None:
    region = shm.create_region(TOTAL, name_of(request))
    region.map.u8[shm.PAGE_BYTES] = PATTERN
    start, length = shm.PAGE_BYTES + 5, shm.PAGE_BYTES
    if old_kernel:
        assert not shm.prefault(region.map, start, length, write=write, advise=no_populate)
    else:
        shm.prefault(region.map, start, length, write=write)
    assert allocated(region) == 2 * shm.PAGE_BYTES
    assert region.map.u8.sum() == PATTERN
    region.close()


def test_prefault_stops_at_the_end(region: SharedRegion) -> None:
    shm.prefault(region.map, TOTAL - 1, 1 << 30, write=True)
    assert shm.prefault(region.map, TOTAL, 1, write=True)
    assert allocated(region) == TOTAL


def test_prefault_tells_other_errors(region: SharedRegion) -> None:
    with pytest.raises(OSError, match="no page left"):
        shm.prefault(region.map, 0, TOTAL, write=True, advise=out_of_memory)


# ---------------------------------------------------------------- huge pages

HUGE = shm.HUGE_PAGE_BYTES


@pytest.fixture
def large(request: pytest.FixtureRequest) -> Iterator[SharedRegion]:
    made = shm.create_region(2 * HUGE + shm.PAGE_BYTES, name_of(request))
    yield made
    made.close()


def address_bytes() -> int:
    """Of this process's mappings."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * shm.PAGE_BYTES


def test_a_huge_page_may_begin_where_a_map_does(large: SharedRegion) -> None:
    before = address_bytes()
    mapped = [
        shm.map_region(large.fd, large.total_bytes, writable=True, populate=False)
        for _ in range(50)
    ]
    assert [one.address % HUGE for one in mapped] == [0] * 50
    # What was reserved to find such an address is given back: all that is not a map of them.
    assert address_bytes() - before < 50 * large.total_bytes + HUGE
    assert all(one.close() for one in mapped)


def test_what_cannot_be_mapped_reserves_nothing(large: SharedRegion) -> None:
    large.seal(ARENA_SEALS)
    before = address_bytes()
    for _ in range(50):
        with pytest.raises(PermissionError):
            shm.map_region(large.fd, large.total_bytes, writable=True, populate=False)
    assert address_bytes() - before < HUGE


def test_only_whole_huge_pages_of_the_range_are_joined(large: SharedRegion) -> None:
    asked = []

    def advise(address: int, length: int, advice: int) -> None:
        asked.append((address - large.map.address, length))

    assert shm.join(large.map, 0, large.total_bytes, advise=advise) == (2 * HUGE, "")
    assert shm.join(large.map, shm.PAGE_BYTES, 2 * HUGE, advise=advise) == (HUGE, "")
    assert shm.join(large.map, HUGE, HUGE - 1, advise=advise) == (0, "")
    assert asked == [(0, HUGE), (HUGE, HUGE), (HUGE, HUGE)]


def test_what_does_not_join_is_left_and_told(large: SharedRegion) -> None:
    def advise(address: int, length: int, advice: int) -> None:
        if address > large.map.address:
            out_of_memory(address, length, advice)

    assert shm.join(large.map, 0, large.total_bytes, advise=advise) == (
        HUGE,
        "[Errno 12] no page left",
    )


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EBUSY])
def test_what_a_device_is_at_is_passed_over_and_no_failure(
    large: SharedRegion, number: int
) -> None:
    def advise(address: int, length: int, advice: int) -> None:
        if address == large.map.address:
            raise OSError(number, "in use")

    assert shm.join(large.map, 0, large.total_bytes, advise=advise) == (HUGE, "")


def test_contents_stay_when_pages_are_joined(large: SharedRegion) -> None:
    client = shm.map_region(large.fd, large.total_bytes, writable=False, populate=False)
    large.map.u8[:] = pattern = np.random.default_rng(3).integers(0, 256, large.total_bytes, "u1")
    joined, why_not = shm.join(large.map, 0, large.total_bytes)
    assert np.array_equal(client.u8, pattern)
    large.map.u8[5] += 1
    assert client.u8[5] == large.map.u8[5] != pattern[5]
    assert (joined == 2 * HUGE) == (not why_not), why_not
    print(f"{joined} bytes joined {why_not}")


def test_populate_makes_pages_resident(
    region: SharedRegion, request: pytest.FixtureRequest
) -> None:
    fd = os.dup(region.fd)
    region.close()
    mapped = shm.map_region(fd, TOTAL, writable=False, populate=True)
    os.close(fd)
    assert re.search(rf"(?m)^Rss:\s+{TOTAL >> 10} kB", maps(name_of(request)))
    assert mapped.close()


def test_mappings_stay_out_of_dumps_and_children(
    region: SharedRegion, request: pytest.FixtureRequest
) -> None:
    flags = re.findall(r"VmFlags:(.*)", maps(name_of(request)))
    assert len(flags) == 1
    assert "dd" in flags[0].split()
    assert "dc" not in flags[0].split()
    shm.dontfork(region.map)
    assert "dc" in re.findall(r"VmFlags:(.*)", maps(name_of(request)))[0].split()


@pytest.mark.process
def test_a_forked_child_neither_touches_nor_unmaps() -> None:
    program = textwrap.dedent("""
        import ctypes, mmap, os
        from kvstore import shm
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        kept, inherited = (shm.create_region(1 << 16, n) for n in ("kept", "inherited"))
        inherited.map.u8[0] = 5
        shm.dontfork(kept.map)
        pid = os.fork()
        if pid == 0:
            maps = open("/proc/self/maps").read()
            good = "memfd:kept" not in maps and "memfd:inherited" in maps
            try:
                kept.map.u8
                good = False
            except ValueError:
                pass
            # What the child has at that address by now is none of the region's business.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
            where = ctypes.c_void_p(kept.map.address)
            assert libc.mmap(where, ctypes.c_size_t(1 << 16), 3, flags, -1, 0) == where.value
            ctypes.memset(where, 1, 1 << 16)
            good = good and inherited.map.u8[0] == 5 and kept.close()
            good = good and ctypes.string_at(where, 1) == bytes([1])
            os._exit(0 if good and inherited.close() else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        kept.map.u8[0] = 1
        raise SystemExit(status)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, env=environment, check=False).returncode == 0


def test_lock_locks_or_says_why(region: SharedRegion, request: pytest.FixtureRequest) -> None:
    done, why = shm.lock(region.map)
    flags = re.findall(r"VmFlags:(.*)", maps(name_of(request)))[0].split()
    assert done == ("lo" in flags)
    assert done == (why == "")
    assert done or "RLIMIT_MEMLOCK" in why


# ---------------------------------------------------------------- hand-over


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    right.settimeout(5)
    with left, right:
        yield left, right


def test_descriptors_arrive_with_their_frame(
    region: SharedRegion, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    shm.send_frame(left, b"first")
    shm.send_frame(left, b"second", region.fd)
    shm.send_frame(left, b"")
    assert shm.recv_frame(right) == (b"first", [])
    payload, fds = shm.recv_frame(right)
    assert payload == b"second"
    assert len(fds) == 1
    assert os.fstat(fds[0]).st_ino == os.fstat(region.fd).st_ino
    assert not os.get_inheritable(fds[0])
    shm.close_fds(fds)
    assert fds == []
    assert shm.recv_frame(right) == (b"", [])


def test_a_frame_may_come_in_pieces(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    right.settimeout(0.001)
    data = struct.pack("<I", 5) + b"whole"
    left.sendall(data[:2])
    with pytest.raises(TimeoutError):
        shm.recv_frame(right)
    right.settimeout(5)
    left.sendall(data[:2])
    left.sendall(data[2:6])
    left.sendall(data[6:])
    right.recv(0)
    assert shm.recv_frame(right) == (b"whole", [])


def test_frames_have_a_limit(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    with pytest.raises(ValueError, match="over 65536"):
        shm.send_frame(left, bytes(shm.FRAME_BYTES_MAX + 1))
    left.sendall(struct.pack("<I", shm.FRAME_BYTES_MAX + 1))
    with pytest.raises(ConnectionError, match="65537 bytes"):
        shm.recv_frame(right)


@pytest.mark.parametrize("sent", [b"", b"\x05\0", b"\x05\0\0\0wh"])
def test_a_hang_up_is_told_and_leaks_nothing(
    region: SharedRegion, pair: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    left, right = pair
    before = descriptors()
    if sent:
        socket.send_fds(left, [sent], [region.fd])
    left.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="hung up"):
        shm.recv_frame(right)
    assert descriptors() == before


def test_too_many_descriptors_are_refused_and_leak_nothing(
    region: SharedRegion, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    before = descriptors()
    fds = [region.fd] * (shm.FDS_PER_FRAME_MAX + 1)
    socket.send_fds(left, [struct.pack("<I", 2) + b"ok"], fds)
    with pytest.raises(ConnectionError, match="more descriptors"):
        shm.recv_frame(right)
    assert descriptors() == before
