"""Pages of an engine that waits in threads of its own: moved byte by byte, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.model.reasons import Reason
from kvstore_client import Client, ClientConfig, PrefillCost
from kvstore_client.engines.model_spaces import ModelSpaces
from kvstore_client.engines.page_store import Page, PageStore
from kvstore_client.engines.sglang_facts import key_of
from kvstore_client.engines.tier_values import OUTCOMES, Deadlines
from kvstore_client.testing import NEVER, FakeClock, FakeStore, FakeTransport, refusal
from tests.client_kit import model, rows

PAGE_BYTES = 4096
KEYS = [f"{number:064x}" for number in range(1, 13)]


class Stage:
    """One engine's store, and the pages that it would have."""

    def __init__(
        self,
        store: FakeStore,
        answer: Callable[[str, Any], Any] | None = None,
        *,
        config: ClientConfig | None = None,
        fingerprint: Any = None,
    ) -> None:
        self.clock = FakeClock()
        if answer is None:
            client = Client("/fake", config=config, transport=store.transport)
        else:
            transport = FakeTransport.factory(answer, store.dial, self.clock)
            client = Client("/fake", config=config, transport=transport, clock=self.clock)
        spaces = ModelSpaces(client, fingerprint or model())
        self.pages = PageStore(
            spaces,
            PAGE_BYTES,
            key_of,
            deadlines=Deadlines(lookup_ms=2_000, load_ms=2_000, store_ms=2_000),
            clock_ns=self.clock,
        )


def cut(data: Any, pieces: int) -> list[Page]:
    """Each row as so many pieces, which do not follow one another in memory."""
    return [
        [piece.copy() for piece in np.array_split(row, pieces)] if pieces > 1 else [row]
        for row in data
    ]


def joined(pages: list[Page]) -> list[bytes]:
    return [b"".join(piece.tobytes() for piece in page) for page in pages]


def empty(pages: int, pieces: int) -> list[Page]:
    return cut(np.zeros((pages, PAGE_BYTES), np.uint8), pieces)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_pages_come_back_whatever_their_pieces_are(pieces: int, shared_memory: bool) -> None:
    store = FakeStore(shared_memory=shared_memory)
    data = rows(4, PAGE_BYTES)
    writer, reader = Stage(store), Stage(store)
    assert writer.pages.store(KEYS[:4], cut(data, pieces))
    assert reader.pages.exists(KEYS[:6]) == 4
    into = empty(6, pieces)
    assert reader.pages.load(KEYS[:6], into) == 4
    assert joined(into)[:4] == [row.tobytes() for row in data]
    assert joined(into)[4:] == [bytes(PAGE_BYTES)] * 2
    assert dict(writer.pages.counted()) == {"store_stored": 4}
    assert dict(reader.pages.counted()) == {
        "lookup_hit": 4,
        "lookup_miss": 2,
        "load_loaded": 4,
        "load_failed": 2,
    }
    for stage in (writer, reader):
        stage.pages.close()


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_missing_page_ends_the_run(pieces: int) -> None:
    store = FakeStore()
    stage = Stage(store)
    data = rows(5, PAGE_BYTES)
    assert stage.pages.store(KEYS[:5], cut(data, pieces))
    store.drop([key_of(KEYS[2])])
    assert stage.pages.exists(KEYS[:5]) == 2
    assert stage.pages.exists(KEYS[3:5]) == 2
    into = empty(5, pieces)
    assert stage.pages.load(KEYS[:5], into) == 2
    assert joined(into)[:2] == [row.tobytes() for row in data[:2]]


def test_what_others_have_stored_is_stored() -> None:
    store = FakeStore()
    first, second = Stage(store), Stage(store)
    assert first.pages.store(KEYS[:3], cut(rows(3, PAGE_BYTES), 2))
    assert second.pages.store(KEYS[:4], cut(rows(4, PAGE_BYTES, seed=1), 2))
    assert dict(second.pages.counted()) == {"store_present": 3, "store_stored": 1}


def test_the_prompt_before_the_pages_is_named_and_not_stored() -> None:
    store = FakeStore()
    stage = Stage(store)
    assert stage.pages.store(KEYS[2:4], cut(rows(2, PAGE_BYTES), 2), prefix=KEYS[:2])
    assert stage.pages.exists(KEYS[:1]) == 0
    assert stage.pages.exists(KEYS[2:4]) == 2


def test_a_part_of_the_pages_is_not_success() -> None:
    store = FakeStore(capacity_blocks=2)
    stage = Stage(store)
    assert not stage.pages.store(KEYS[:4], cut(rows(4, PAGE_BYTES), 2))
    counted = stage.pages.counted()
    assert counted["store_dropped"] == 4 - counted.get("store_stored", 0)
    assert counted["store_dropped"] >= 2


@pytest.mark.parametrize(
    "answer",
    [
        NEVER,
        grpc.StatusCode.UNAVAILABLE,
        refusal(Reason.DRAINING, "going"),
        b"garbage",
        OSError("no"),
    ],
    ids=str,
)
def test_a_daemon_that_does_not_answer_is_a_miss_in_time(answer: Any) -> None:
    store = FakeStore()
    stage = Stage(store, lambda method, request: answer)
    begun = stage.clock.now_ns
    assert stage.pages.exists(KEYS[:2]) == 0
    assert stage.pages.load(KEYS[:2], empty(2, 2)) == 0
    assert not stage.pages.store(KEYS[:2], cut(rows(2, PAGE_BYTES), 2))
    assert stage.clock.now_ns - begun <= (20 + 50 + 100 + 10) * 1_000_000


class Late(list[Any]):
    """A page while whose bytes are copied the store gives the memory of the first block away."""

    store: FakeStore
    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        if self.passes == 2:  # the first time its size is looked at
            self.store.drop([key_of(KEYS[0])])
        return super().__iter__()


def test_bytes_that_change_while_they_are_copied_are_a_miss() -> None:
    store = FakeStore()
    assert Stage(store).pages.store(KEYS[:4], cut(rows(4, PAGE_BYTES), 2))
    stage = Stage(store)
    into = [Late(page) for page in empty(4, 2)]
    into[3].store = store
    into[0].passes = into[1].passes = into[2].passes = 10
    assert stage.pages.load(KEYS[:4], into) == 0
    assert store.wait(lambda store: not store.leases)


def test_pages_that_are_slower_to_load_are_declined() -> None:
    store = FakeStore()
    assert Stage(store).pages.store(KEYS[:4], cut(rows(4, PAGE_BYTES), 2))

    def declining(method: str, request: Any) -> Any:
        answer = store.answer(method, request)
        if method == "Lookup":
            assert request.prefill.a_us_per_token == 2.0, "the cost goes with the question"
            answer.plan.load_blocks = 1
        return answer

    stage = Stage(store, declining, config=ClientConfig(prefill=PrefillCost(2.0, 0.0)))
    assert stage.pages.exists(KEYS[:4]) == 1
    assert dict(stage.pages.counted()) == {"lookup_hit": 1, "lookup_declined": 3}


def test_a_reset_forgets_what_was_stored() -> None:
    store = FakeStore()
    stage, other = Stage(store), Stage(store)
    data = rows(2, PAGE_BYTES)
    assert stage.pages.store(KEYS[:2], cut(data, 2))
    stage.pages.reset()
    assert stage.pages.exists(KEYS[:2]) == 0
    assert stage.pages.load(KEYS[:2], empty(2, 2)) == 0
    assert other.pages.exists(KEYS[:2]) == 2
    assert stage.pages.counted()["reset"] == 1


def test_another_model_under_the_same_keys_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    store = FakeStore()
    assert Stage(store).pages.store(KEYS[:2], cut(rows(2, PAGE_BYTES), 2))
    other = Stage(store, fingerprint=model(revision="r2"))
    assert [other.pages.exists(KEYS[:2]) for _ in range(3)] == [0, 0, 0]
    assert caplog.text.count("a lookup found nothing") <= 1


@pytest.mark.parametrize("sizes", [[], [PAGE_BYTES - 1], [PAGE_BYTES, 1], [0]], ids=str)
def test_pages_that_do_not_fit_are_refused(sizes: list[int]) -> None:
    stage = Stage(FakeStore())
    wrong: list[Page] = [[np.zeros(size, np.uint8) for size in sizes]] if sizes else []
    with pytest.raises(ValueError, match="page"):
        stage.pages.load(KEYS[:1], wrong)
    with pytest.raises(ValueError, match="page"):
        stage.pages.store(KEYS[:1], wrong)


def test_nothing_is_asked_for_no_pages() -> None:
    store = FakeStore()
    stage = Stage(store)
    assert stage.pages.exists([]) == 0
    assert stage.pages.load([], []) == 0
    assert stage.pages.store([], [])
    assert not store.requests


def test_outcomes_are_those_that_are_documented() -> None:
    store = FakeStore()
    stage = Stage(store)
    stage.pages.store(KEYS[:1], cut(rows(1, PAGE_BYTES), 2))
    stage.pages.exists(KEYS[:2])
    stage.pages.load(KEYS[:2], empty(2, 2))
    stage.pages.reset()
    assert set(stage.pages.counted()) <= set(OUTCOMES)
    assert not stage.pages.counted()
