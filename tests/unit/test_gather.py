"""Copies and their checksum: right bytes in the right rows, and nothing else touched."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given
from numpy.typing import NDArray

from kvstore import gather
from kvstore.gather import Source

SLOT = 96
UNTOUCHED = 0xEE


def slots_of(region: int, slots: int) -> NDArray[np.uint8]:
    """[slots, SLOT]: every slot has bytes of its own."""
    return np.random.default_rng(region).integers(0, 256, (slots, SLOT), np.uint8)


REGIONS = {region: slots_of(region, slots) for region, slots in [(1, 4), (2, 7), (3, 1)]}
PLACES = st.lists(
    st.sampled_from([(r, s) for r, slots in REGIONS.items() for s in range(len(slots))]),
    max_size=24,
)


def sources_of(places: list[tuple[int, int]]) -> list[Source]:
    return [(REGIONS[region], slots) for region, slots in gather.region_runs(places)]


@given(
    places=PLACES,
    block_bytes=st.sampled_from([1, 64, SLOT]),
    spare=st.integers(0, 2),
    as_list=st.booleans(),
    strided=st.booleans(),
    threads=st.booleans(),
)
def test_every_block_lands_in_its_row(
    places: list[tuple[int, int]],
    block_bytes: int,
    spare: int,
    as_list: bool,
    strided: bool,
    threads: bool,
) -> None:
    rows = len(places) + spare
    out = np.full((rows, block_bytes * 2), UNTOUCHED, np.uint8)
    target = out[:, :block_bytes] if strided else np.ascontiguousarray(out[:, :block_bytes])
    with ThreadPoolExecutor(1) as pool:
        blocks = gather.copy_blocks(
            sources_of(places),
            list(target) if as_list else target,
            executor=pool if threads else None,
            parallel_bytes=0,
        )
    assert blocks == len(places)
    for row, (region, slot) in zip(target, places, strict=False):
        assert (row == REGIONS[region][slot, :block_bytes]).all()
    assert (target[blocks:] == UNTOUCHED).all()
    assert (out[:, block_bytes:] == UNTOUCHED).all()


def test_runs_keep_order_and_join_neighbours() -> None:
    places = [(1, 3), (1, 0), (2, 5), (1, 1)]
    assert gather.region_runs(places) == [(1, [3, 0]), (2, [5]), (1, [1])]
    assert gather.region_runs([]) == []


@pytest.mark.parametrize(
    "buffer", [bytearray(SLOT), memoryview(bytearray(SLOT)), np.zeros(24, "f4")]
)
def test_buffers_of_any_type_are_filled(buffer: Any) -> None:
    gather.copy_blocks([(REGIONS[1], [2])], [buffer])
    assert bytes(buffer) == REGIONS[1][2].tobytes()


@pytest.mark.parametrize("ids", [[-1], [4], [0, 1, 99], [2**40]])
def test_ids_out_of_range_copy_nothing(ids: list[int]) -> None:
    out = np.full((4, SLOT), UNTOUCHED, np.uint8)
    with pytest.raises(ValueError, match=r"outside 0\.\.3"):
        gather.copy_blocks([(REGIONS[2], [1]), (REGIONS[1], ids)], out)
    assert (out == UNTOUCHED).all()


BAD_OUT: list[tuple[Any, str]] = [
    (np.zeros((1, SLOT), np.uint8), "do not fit in 1 rows"),
    (np.zeros((2, SLOT + 1), np.uint8), "longer than a slot"),
    ([bytearray(SLOT), bytearray(SLOT + 1)], "longer than a slot"),
    (np.zeros((2, SLOT), np.int8), "uint8"),
    (np.zeros(2 * SLOT, np.uint8), "2 dimensions"),
    (np.broadcast_to(np.uint8(0), (2, SLOT)), "writeable"),
    ([bytes(SLOT), bytes(SLOT)], "writable"),
    ([np.zeros((SLOT, 2), np.uint8)[:, 0]] * 2, "C-contiguous"),
]


@pytest.mark.parametrize(("out", "message"), BAD_OUT)
def test_unfit_targets_are_refused(out: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather.copy_blocks([(REGIONS[1], [0, 1])], out)


def test_unfit_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="2 dimensions"):
        gather.copy_blocks([(REGIONS[1][0], [0])], np.zeros((1, 1), np.uint8))
    with pytest.raises(ValueError, match="2 dimensions"):
        gather.copy_blocks([(REGIONS[1], np.zeros((1, 1), int))], np.zeros((1, 1), np.uint8))


class BusyExecutor(Executor):
    """Never starts what it is given, as an executor whose threads are taken."""

    def __init__(self) -> None:
        self.given = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given += 1
        return Future()


def test_a_busy_executor_is_not_waited_for() -> None:
    pool = BusyExecutor()
    out = np.zeros((4, SLOT), np.uint8)
    gather.copy_blocks([(REGIONS[1], [3, 2, 1, 0])], out, executor=pool, parallel_bytes=1)
    assert (out == REGIONS[1][::-1]).all()
    assert pool.given == 1


class SlowFuture(Future[Any]):
    """A call that runs only while somebody waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call

    def cancel(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> Any:
        return self._call()


class SlowExecutor(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return SlowFuture(lambda: fn(*args, **kwargs))


def test_the_other_half_is_waited_for() -> None:
    out = np.zeros((4, SLOT), np.uint8)
    gather.copy_blocks([(REGIONS[1], [3, 2, 1, 0])], out, executor=SlowExecutor(), parallel_bytes=1)
    assert (out == REGIONS[1][::-1]).all()


def test_small_batches_stay_on_the_callers_thread() -> None:
    pool = BusyExecutor()
    out = np.zeros((4, SLOT), np.uint8)
    sources: list[Source] = [(REGIONS[1], [3, 2, 1, 0])]
    gather.copy_blocks(sources, out, executor=pool, parallel_bytes=out.nbytes + 1)
    gather.copy_blocks([(REGIONS[1], [1])], out, executor=pool, parallel_bytes=0)
    assert pool.given == 0


def test_the_digest_is_xxh3_128_of_the_bytes() -> None:
    data = slots_of(9, 3).reshape(-1)[:200]
    assert gather.digest(data) == xxhash.xxh3_128_digest(data.tobytes())
    assert len(gather.digest(data)) == gather.DIGEST_BYTES


def test_copies_of_unlike_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot copy"):
        gather.copy_one(np.zeros(2, np.uint8), np.zeros(3, np.uint8))


def test_copy_one_copies() -> None:
    target = np.zeros(SLOT, np.uint8)
    gather.copy_one(REGIONS[3][0], target)
    assert (target == REGIONS[3][0]).all()


def test_in_halves_does_each_item_once_on_two_threads() -> None:
    done: list[int] = []
    with ThreadPoolExecutor(1) as executor:
        gather.in_halves(done.extend, range(9), executor)
    assert sorted(done) == list(range(9))


def test_in_halves_does_all_of_it_where_nobody_helps() -> None:
    done: list[int] = []
    begun, end = Event(), Event()

    def busy() -> None:
        begun.set()
        end.wait()

    with ThreadPoolExecutor(1) as executor:
        executor.submit(busy)
        begun.wait()
        gather.in_halves(done.extend, range(9), executor)
        assert done == list(range(9))
        end.set()


def test_nothing_holds_the_memory_of_halves_that_failed() -> None:
    seen: list[weakref.ref[NDArray[np.uint8]]] = []
    started = Event()

    def work(part: Sequence[int]) -> None:
        memory = np.zeros(9, np.uint8)
        seen.append(weakref.ref(memory))
        if 0 in part:
            assert started.wait(10)
            return
        started.set()
        raise ZeroDivisionError

    gc.disable()  # a region stays mapped until it would find a circle
    try:
        with ThreadPoolExecutor(1) as executor, contextlib.suppress(ZeroDivisionError):
            gather.in_halves(work, range(9), executor)
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def test_in_halves_raises_what_either_half_raises() -> None:
    def work(part: Sequence[int]) -> None:
        if bad in part:
            raise ValueError(str(bad))

    with ThreadPoolExecutor(1) as executor:
        for bad in (0, 8):
            with pytest.raises(ValueError, match=str(bad)):
                gather.in_halves(work, range(9), executor)


@given(
    places=PLACES,
    spans=st.sampled_from([[(0, 32)], [(32, 64)], [(5, 21)], [(0, 16), (40, 56)], [(0, SLOT)]]),
    spare=st.integers(0, 2),
    form=st.sampled_from(["rows", "strided", "transposed"]),
)
def test_pieces_of_blocks_land_where_an_array_has_them(
    places: list[tuple[int, int]], spans: list[tuple[int, int]], spare: int, form: str
) -> None:
    length, rows = spans[0][1] - spans[0][0], len(places) + spare
    out: NDArray[Any]
    if form == "rows":
        out = np.full((rows, len(spans) * length), UNTOUCHED, np.uint8)
    elif form == "strided":
        out = np.full((rows, len(spans), length * 2), UNTOUCHED, np.uint8)[:, :, :length]
    else:
        whole = np.full((len(spans), length // 2, rows), 0xEEEE, np.uint16)
        out = whole.transpose(2, 0, 1) if not length % 2 else whole
    if form == "transposed" and length % 2:
        return  # no whole elements
    copied = gather.copy_pieces(
        sources_of(places), [slice(*span) for span in spans], out, first_row=spare
    )
    assert copied == len(places)
    got = np.ascontiguousarray(out).reshape(-1).view(np.uint8).reshape(rows, len(spans) * length)
    for row, (region, slot) in enumerate(places, spare):
        expected = [REGIONS[region][slot, first:end] for first, end in spans]
        assert np.array_equal(got[row], np.concatenate(expected))
    assert (got[:spare] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("spans", "shape"),
    [
        ([(0, 32)], (2, 31)),  # rows of another size
        ([(0, 32)], (1, 32)),  # too few
        ([(80, 112)], (2, 32)),  # behind the slot
        ([(0, 16), (16, 48)], (2, 48)),  # spans of two lengths
    ],
)
def test_pieces_that_do_not_fit_copy_nothing(
    spans: list[tuple[int, int]], shape: tuple[int, int]
) -> None:
    out = np.full(shape, UNTOUCHED, np.uint8)
    pieces = [slice(*span) for span in spans]
    with pytest.raises(ValueError, match=r"span|row|fit"):
        gather.copy_pieces([(REGIONS[1], [0, 1])], pieces, out)
    with pytest.raises(ValueError, match="slot id"):
        gather.copy_pieces([(REGIONS[1], [4])], [slice(0, 32)], np.zeros((1, 32), np.uint8))
    assert (out == UNTOUCHED).all()
