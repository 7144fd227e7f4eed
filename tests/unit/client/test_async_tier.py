"""The tier behind an engine's scheduler, without an engine: the test runs its jobs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.model.keys import chain_digests
from kvstore.model.reasons import Reason
from kvstore_client import Client, ClientConfig, PrefillCost
from kvstore_client.engines.async_tier import Answer, AsyncTier, Deadlines
from kvstore_client.engines.lanes import Lane
from kvstore_client.engines.model_spaces import ModelSpaces
from kvstore_client.engines.vllm_facts import group_of, key_of
from kvstore_client.testing import NEVER, FakeClock, FakeStore, FakeTransport, refusal
from tests.client_kit import model, rows

ROWS = 12
ROW_BYTES = 4096 + 512  # padded as vLLM pads to pages
CONTENT_BYTES = 4096


class Stage:
    """One engine's rows, a store, and what the engine would do in a step."""

    def __init__(
        self,
        store: FakeStore,
        answer: Callable[[str, Any], Any] | None = None,
        *,
        threaded: bool = False,
        config: ClientConfig | None = None,
        fingerprint: Any = None,
        keyed: Callable[[bytes], Any] = key_of,
        **more: Any,
    ) -> None:
        self.store = store
        self.clock = FakeClock()
        transport = store.transport
        if answer is not None:
            transport = FakeTransport.factory(answer, store.dial, self.clock)
        self.client = Client("/fake", config=config, transport=transport)
        self.spaces = ModelSpaces(self.client, fingerprint or model())
        self.rows = np.zeros((ROWS, ROW_BYTES), np.uint8)
        self.tier = AsyncTier(
            self.spaces,
            self.rows,
            CONTENT_BYTES,
            keyed,
            clock_ns=self.clock,
            threaded=threaded,
            **more,
        )
        self._job_id = 0

    def ask(self, keys: list[bytes], request: str = "r") -> list[Answer]:
        """The answers when the engine asks again in the step after the first one."""
        for key in keys:
            self.tier.lookup(request, key)
        self.tier.end_step()
        while self.tier.work():
            pass
        return [self.tier.lookup(request, key) for key in keys]

    def put(self, keys: list[bytes], at: list[int], request: str = "w", **more: Any) -> Any:
        self._job_id += 1
        self.tier.submit_store(self._job_id, request, keys, at, more.get("chain", keys))
        return self.end()

    def load(self, keys: list[bytes], at: list[int], request: str = "r") -> Any:
        self._job_id += 1
        self.tier.submit_load(self._job_id, request, keys, at)
        return self.end()

    def end(self) -> Any:
        while self.tier.work():
            pass
        (done,) = self.tier.finished()
        assert done.job_id == self._job_id
        return done


def engine_keys(count: int, prompt: int = 0) -> list[bytes]:
    """As vLLM has them: a hash of the prefix and a group index."""
    return [bytes([prompt, index]) * 16 + bytes(4) for index in range(count)]


def of_group(keys: list[bytes], group: int) -> list[bytes]:
    return [key[:-4] + group.to_bytes(4, "big") for key in keys]


@pytest.fixture
def store() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    made.close()


@pytest.fixture
def stage(store: FakeStore) -> Iterator[Stage]:
    made = Stage(store)
    yield made
    made.tier.close()


def filled(stage: Stage, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Rows 0 to count hold bytes of this seed; what they hold."""
    stage.rows[:count, :CONTENT_BYTES] = rows(count, CONTENT_BYTES, seed)
    stage.rows[:count, CONTENT_BYTES:] = 0xAA
    held: np.ndarray[Any, Any] = stage.rows[:count, :CONTENT_BYTES].copy()
    return held


def test_what_was_stored_is_found_and_loaded_into_other_rows(stage: Stage) -> None:
    keys = engine_keys(4)
    expected = filled(stage, 4)
    done = stage.put(keys, [0, 1, 2, 3])
    assert done.success
    assert done.keys == tuple(keys)
    assert stage.ask(keys) == [Answer.HIT] * 4
    done = stage.load(keys, [9, 7, 11, 8])
    assert done.success
    assert (stage.rows[[9, 7, 11, 8], :CONTENT_BYTES] == expected).all()
    assert not stage.rows[[9, 7, 11, 8], CONTENT_BYTES:].any(), "padding belongs to the engine"
    assert stage.tier.counted() == {"store_stored": 4, "lookup_hit": 4, "load_loaded": 4}
    assert not stage.tier.counted(), "counts are handed out once"


def test_nothing_is_asked_before_the_step_ends_and_then_in_one_call(stage: Stage) -> None:
    keys = engine_keys(5)
    assert [stage.tier.lookup("r", key) for key in keys] == [Answer.RETRY] * 5
    assert not stage.tier.work()
    stage.tier.end_step()
    assert [stage.tier.lookup("r", key) for key in keys] == [Answer.RETRY] * 5
    assert stage.tier.work()
    assert stage.store.requests["Lookup"] == 1
    assert [stage.tier.lookup("r", key) for key in keys] == [Answer.MISS] * 5
    stage.tier.end_step()
    assert not stage.tier.work(), "an answer is not asked for again"


def test_the_first_question_finds_the_daemon_connected_and_nothing_was_offered_before(
    stage: Stage,
) -> None:
    stage.tier.connect_ahead()
    assert stage.tier.work()
    assert stage.store.requests == {"Attach": 1}
    assert stage.ask(engine_keys(2)) == [Answer.MISS] * 2
    assert stage.store.requests["Attach"] == 1


def test_a_daemon_that_is_not_there_yet_fails_no_question_by_being_looked_for(
    store: FakeStore,
) -> None:
    def unavailable(method: str, request: Any) -> Any:
        raise refusal(Reason.UNAVAILABLE)

    stage = Stage(store, unavailable)
    stage.tier.connect_ahead()
    assert stage.tier.work()
    assert stage.ask(engine_keys(1)) == [Answer.MISS]
    stage.tier.close()


def test_the_leading_run_is_a_hit(stage: Stage) -> None:
    keys = engine_keys(4)
    filled(stage, 4)
    stage.put(keys, [0, 1, 2, 3])
    stage.store.drop([key_of(keys[2])])
    assert stage.ask(keys) == [Answer.HIT, Answer.HIT, Answer.MISS, Answer.MISS]


def test_a_key_that_could_not_be_loaded_stays_a_miss_for_that_request(stage: Stage) -> None:
    keys = engine_keys(4)
    expected = filled(stage, 4)
    stage.put(keys, [0, 1, 2, 3])
    assert stage.ask(keys) == [Answer.HIT] * 4
    stage.store.drop([key_of(keys[2])])
    done = stage.load(keys, [4, 5, 6, 7])
    assert not done.success
    assert done.keys == tuple(keys[:2]), "what was loaded before the failure is kept"
    assert (stage.rows[4:6, :CONTENT_BYTES] == expected[:2]).all()
    for _ in range(3):
        assert stage.ask(keys) == [Answer.HIT, Answer.HIT, Answer.MISS, Answer.MISS]
    # Stored again meanwhile: this request has given it up, another one has not.
    stage.put(keys, [0, 1, 2, 3], request="r")
    assert stage.ask(keys) == [Answer.HIT, Answer.HIT, Answer.MISS, Answer.MISS]
    assert stage.ask(keys, "another") == [Answer.HIT] * 4


def test_what_a_request_stored_itself_is_asked_anew(stage: Stage) -> None:
    """After a preemption the engine asks for what was a miss when the request came."""
    keys = engine_keys(2)
    filled(stage, 2)
    assert stage.ask(keys) == [Answer.MISS] * 2
    stage.put(keys, [0, 1], request="r")
    assert stage.ask(keys) == [Answer.HIT] * 2


def test_a_finished_request_is_forgotten_and_its_late_answer_harms_nobody(stage: Stage) -> None:
    keys = engine_keys(2)
    for key in keys:
        stage.tier.lookup("r", key)
    stage.tier.end_step()
    stage.tier.request_finished("r")
    filled(stage, 2)
    stage.put(keys, [0, 1])
    stage.tier.work()
    assert stage.ask(keys) == [Answer.HIT] * 2


def test_an_answer_that_does_not_come_is_a_miss_after_a_while(stage: Stage) -> None:
    """Whatever holds the lookups up: the engine does not wait for ever."""
    (key,) = engine_keys(1)
    other = Stage(stage.store)
    filled(other, 1)
    other.put([key], [0])
    other.tier.close()
    stage.tier.lookup("r", key)
    stage.tier.end_step()
    stage.clock.advance(0.4)
    assert stage.tier.lookup("r", key) is Answer.RETRY
    stage.clock.advance(0.2)
    assert stage.tier.lookup("r", key) is Answer.MISS
    assert stage.tier.counted() == {"lookup_late": 1}
    assert stage.tier.work()
    assert stage.tier.counted() == {"lookup_miss": 1}
    assert stage.store.requests["Lookup"] == 0, "nobody waits for that answer any more"
    assert stage.tier.lookup("r", key) is Answer.MISS, "too late is too late"


def test_questions_behind_a_slow_one_have_what_is_left_of_their_time(store: FakeStore) -> None:
    """A daemon that is slow for one request must not make each of the next wait as long again."""
    slow_s = [0.2, 0.2, 0.0]

    def answer(method: str, request: Any) -> Any:
        if method == "Lookup":
            engine.clock.advance(slow_s.pop(0))
        return store.answer(method, request)

    engine = Stage(store, answer)
    keys = engine_keys(4)
    for request, key in zip("abcd", keys, strict=True):
        engine.tier.lookup(request, key)
    engine.tier.end_step()
    assert engine.tier.work()
    assert slow_s == [0.0], "c and d are too late when their turn comes"
    answers = [engine.tier.lookup(request, key) for request, key in zip("abcd", keys, strict=True)]
    assert answers == [Answer.MISS] * 4
    assert engine.tier.counted() == {"lookup_miss": 4}
    assert engine.ask(keys[:1], "e") == [Answer.MISS]
    assert not slow_s
    engine.tier.close()


def test_only_what_a_job_names_is_stored_with_its_place_in_the_prompt(stage: Stage) -> None:
    """Gaps are not filled with rows that nobody has offered."""
    keys = engine_keys(6)
    expected = filled(stage, 3)
    done = stage.put([keys[4], keys[1], keys[2]], [0, 1, 2], chain=keys[:5])
    assert done.success
    space = stage.spaces.current()
    for key, row in ((keys[4], 0), (keys[1], 1), (keys[2], 2)):
        fetched = space.fetch([key_of(key)])
        assert fetched.blocks == 1
        assert (fetched.data[0] == expected[row]).all()
    for key in (keys[0], keys[3], keys[5]):
        assert not space.lookup([key_of(key)]).blocks


def test_a_key_that_is_not_in_the_prompt_is_not_stored(stage: Stage) -> None:
    keys = engine_keys(3)
    filled(stage, 3)
    done = stage.put(keys, [0, 1, 2], chain=keys[:2])
    assert not done.success
    assert not stage.spaces.current().lookup([key_of(keys[2])]).blocks
    assert stage.spaces.current().lookup([key_of(key) for key in keys[:2]]).blocks == 2


def test_a_growing_prompt_costs_one_key_a_block(store: FakeStore) -> None:
    """Each piece of it comes with the chain from its beginning."""
    asked: list[bytes] = []

    def counting(key: bytes) -> Any:
        asked.append(key)
        return key_of(key)

    stage = Stage(store, keyed=counting)
    keys = engine_keys(8)
    expected = filled(stage, 8)
    for end in range(1, 9):
        assert stage.put([keys[end - 1]], [end - 1], chain=keys[:end]).success
    assert asked == keys
    assert stage.ask(keys) == [Answer.HIT] * 8
    assert stage.load(keys[4:], [8, 9, 10, 11]).success
    assert (stage.rows[8:12, :CONTENT_BYTES] == expected[4:]).all()
    assert asked == keys
    stage.tier.close()


def test_the_second_writer_of_a_key_changes_nothing(stage: Stage) -> None:
    keys = engine_keys(2)
    expected = filled(stage, 2, seed=1)
    stage.put(keys, [0, 1])
    filled(stage, 2, seed=2)
    done = stage.put(keys, [0, 1])
    assert done.success
    assert stage.tier.counted()["store_present"] == 2
    stage.ask(keys)
    stage.load(keys, [4, 5])
    assert (stage.rows[4:6, :CONTENT_BYTES] == expected).all()


@pytest.mark.parametrize("row", [-1, ROWS])
def test_a_row_that_is_not_there_fails_the_job_and_touches_nothing(stage: Stage, row: int) -> None:
    keys = engine_keys(2)
    assert not stage.put(keys, [0, row]).success
    assert not stage.load(keys, [0, row]).success
    assert not stage.store.requests["Reserve"]
    assert not stage.rows.any()


def test_a_load_that_would_be_slower_is_declined(store: FakeStore) -> None:
    keys = engine_keys(2)
    first = Stage(store)
    filled(first, 2)
    first.put(keys, [0, 1])

    def declining(method: str, request: Any) -> Any:
        answer = store.answer(method, request)
        if method == "Lookup":
            assert request.prefill.a_us_per_token == 2.0, "the cost goes with the question"
            answer.plan.load_blocks = 1
        return answer

    stage = Stage(store, declining, config=ClientConfig(prefill=PrefillCost(2.0, 0.0)))
    assert stage.ask(keys) == [Answer.HIT, Answer.MISS]
    assert stage.tier.counted() == {"lookup_hit": 1, "lookup_declined": 1}
    first.tier.close()
    stage.tier.close()


@pytest.mark.parametrize(
    "failure",
    [NEVER, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, b"garbage\xff", ValueError("x")],
)
@pytest.mark.parametrize("method", ["Attach", "Open", "Lookup", "Acquire", "Reserve", "Commit"])
def test_whatever_a_call_answers_is_a_miss_or_not_stored(
    store: FakeStore, method: str, failure: Any
) -> None:
    """At each call of the protocol: nothing is raised, every job ends, rows keep what they held."""
    keys = engine_keys(2)
    before = Stage(store)
    expected = filled(before, 2)
    before.put(keys, [0, 1])
    before.tier.close()

    def answer(asked: str, request: Any) -> Any:
        return failure if asked == method else store.answer(asked, request)

    stage = Stage(store, answer)
    answers = stage.ask(keys)
    assert set(answers) <= {Answer.HIT, Answer.MISS}
    done = stage.load(keys, [4, 5])
    if done.keys:
        assert (stage.rows[4 : 4 + len(done.keys), :CONTENT_BYTES] == expected).all()
    new = engine_keys(2, prompt=1)
    stage.rows[:2] = 7
    stored = stage.put(new, [0, 1])
    if method in ("Attach", "Open", "Reserve", "Commit"):
        assert not stored.success
    assert (stage.rows[:2] == 7).all()
    stage.tier.close()


def test_a_daemon_that_dies_between_answer_and_load_is_a_miss_once(store: FakeStore) -> None:
    """The loop that engines fell into: the answer is still a hit, the load fails, and so on."""
    dead = threading.Event()

    def answer(method: str, request: Any) -> Any:
        return grpc.StatusCode.UNAVAILABLE if dead.is_set() else store.answer(method, request)

    stage = Stage(store, answer)
    keys = engine_keys(3)
    filled(stage, 3)
    stage.put(keys, [0, 1, 2])
    assert stage.ask(keys) == [Answer.HIT] * 3
    dead.set()
    assert not stage.load(keys, [4, 5, 6]).keys
    assert stage.ask(keys) == [Answer.MISS] * 3
    stage.tier.close()


def test_why_nothing_is_found_is_told_once_and_ordinary_misses_never(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    details = iter(("first", "second"))

    def answer(method: str, request: Any) -> Any:
        return refusal(Reason.DRAINING, next(details)) if method == "Lookup" else store.answer(
            method, request
        )  # fmt: skip

    ordinary, refused = Stage(store), Stage(store, answer)
    with caplog.at_level(logging.WARNING):
        ordinary.ask(engine_keys(1))
        assert not caplog.records
        refused.ask(engine_keys(1, prompt=1))
        refused.ask(engine_keys(1, prompt=2))
    assert [record.getMessage().count("DRAINING") for record in caplog.records] == [1]
    ordinary.tier.close()
    refused.tier.close()


def test_drain_ends_waiting_jobs_and_forgets_what_was_stored(stage: Stage) -> None:
    keys = engine_keys(2)
    filled(stage, 2)
    stage.put(keys, [0, 1])
    assert stage.ask(keys) == [Answer.HIT] * 2
    stage.tier.submit_load(101, "r", keys, [4, 5])
    stage.tier.submit_store(102, "r", keys, [0, 1], keys)
    stage.tier.drain()
    assert [(done.job_id, done.success) for done in stage.tier.finished()] == [
        (101, False),
        (102, False),
    ]
    assert not stage.rows[4:6].any()
    assert stage.ask(keys, "after") == [Answer.MISS] * 2, "weights may be others now"
    filled(stage, 2, seed=5)
    assert stage.put(keys, [0, 1]).success
    assert stage.ask(keys, "later") == [Answer.HIT] * 2


def test_a_request_that_lives_through_a_reset_neither_stores_nor_finds(stage: Stage) -> None:
    """Its blocks are of the weights before, and the next request would find them as new ones."""
    keys = engine_keys(2)
    filled(stage, 2)
    for request in ("old", "ended"):
        stage.tier.request_began(request)
    stage.tier.request_finished("ended")
    assert stage.put(keys, [0, 1], request="old").success
    stage.tier.drain()
    assert not stage.put(keys, [0, 1], request="old").success
    assert stage.ask(keys, "new") == [Answer.MISS] * 2
    for request in ("new", "ended"):
        stage.tier.request_began(request)
    assert stage.put(keys, [0, 1], request="ended").success, "an id may come again"
    assert stage.ask(keys, "later") == [Answer.HIT] * 2
    assert stage.ask(keys, "old") == [Answer.MISS] * 2
    assert not stage.load(keys, [4, 5], request="old").success
    assert not stage.rows[4:6].any()
    stage.tier.request_finished("old")
    assert stage.ask(keys, "old") == [Answer.HIT] * 2


def test_after_close_nothing_is_touched_and_every_job_ends(stage: Stage) -> None:
    keys = engine_keys(2)
    filled(stage, 2)
    stage.put(keys, [0, 1])
    stage.tier.submit_load(101, "r", keys, [4, 5])
    stage.tier.close()
    stage.tier.submit_load(102, "r", keys, [4, 5])
    assert [(done.job_id, done.success) for done in stage.tier.finished()] == [
        (101, False),
        (102, False),
    ]
    assert not stage.rows[4:6].any()
    stage.tier.lookup("new", keys[0])
    stage.tier.end_step()
    assert stage.tier.lookup("new", keys[0]) is Answer.MISS
    stage.tier.close()


def test_a_job_that_no_thread_takes_any_more_ends(stage: Stage) -> None:
    keys = engine_keys(1)
    stage.tier._loads.close()
    assert not stage.load(keys, [0]).success


def test_a_load_has_its_time_from_its_submission_on(store: FakeStore) -> None:
    """A request waits behind the loads of others, too; what is left of its time is its own."""
    leases_ms: list[int] = []

    def answer(method: str, request: Any) -> Any:
        if method == "Acquire":
            leases_ms.append(request.ttl_ms)
        return store.answer(method, request)

    stage = Stage(store, answer)
    keys = engine_keys(1)
    filled(stage, 1)
    stage.put(keys, [0])
    for job_id, waited_s, success in ((101, 1.5, True), (102, 2.0, False)):
        stage.tier.submit_load(job_id, "r", keys, [5])
        stage.clock.advance(waited_s)
        stage.tier.work()
        assert [done.success for done in stage.tier.finished()] == [success]
    assert len(leases_ms) == 1, "what is too late is not even asked for"
    assert leases_ms[0] <= 500 + 50
    stage.tier.close()


def test_a_store_has_its_time_from_its_submission_on(store: FakeStore) -> None:
    """The engine cannot use a row while a job waits with it, behind however many others."""
    took_s = 0.0

    def answer(method: str, request: Any) -> Any:
        if method == "Reserve":
            engine.clock.advance(took_s)
        return store.answer(method, request)

    engine = Stage(store, answer)
    keys = engine_keys(6)
    filled(engine, 6)
    for job_id, waited_s, success in ((101, 4.9, True), (102, 5.0, False)):
        engine.tier.submit_store(job_id, "w", keys[:1], [0], keys[:1])
        engine.clock.advance(waited_s)
        engine.tier.work()
        (done,) = engine.tier.finished()
        assert (done.success, done.bytes) == (success, CONTENT_BYTES if success else 0)
    assert store.requests["Reserve"] == 1, "what is too late is not even offered"
    took_s = 3.0
    assert not engine.put([keys[1], keys[3], keys[5]], [1, 3, 5], chain=keys).success
    assert store.requests["Reserve"] == 3, "three pieces have the time of one job"
    assert engine.tier.counted()["store_dropped"] >= 2
    engine.tier.close()


def test_rows_are_let_go_of(store: FakeStore) -> None:
    """vLLM unmaps them, which fails while anybody refers to them."""
    memory = bytearray(ROWS * ROW_BYTES)
    stage = Stage(store)
    tier = AsyncTier(
        stage.spaces,
        np.frombuffer(memory, np.uint8).reshape(ROWS, ROW_BYTES),
        CONTENT_BYTES,
        key_of,
        threaded=True,
    )
    keys = engine_keys(2)
    tier.submit_store(1, "r", keys, [0, 1], keys)
    tier.submit_load(2, "r", keys, [3, 4])
    tier.close()
    assert {done.job_id for done in tier.finished()} == {1, 2}
    memory.clear()  # BufferError while an array over it is alive
    stage.tier.close()


def test_threads_do_the_same(store: FakeStore) -> None:
    stage = Stage(store, threaded=True)
    keys = engine_keys(3)
    expected = filled(stage, 3)
    stage.tier.submit_store(1, "w", keys, [0, 1, 2], keys)
    stage.tier._stores.wait_idle()
    assert [done.success for done in stage.tier.finished()] == [True]
    for key in keys:
        stage.tier.lookup("r", key)
    stage.tier.end_step()
    stage.tier._lookups.wait_idle()
    assert [stage.tier.lookup("r", key) for key in keys] == [Answer.HIT] * 3
    stage.tier.submit_load(2, "r", keys, [6, 7, 8])
    stage.tier._loads.wait_idle()
    assert [done.success for done in stage.tier.finished()] == [True]
    assert (stage.rows[6:9, :CONTENT_BYTES] == expected).all()
    stage.tier.close()


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, 600_001])
def test_a_deadline_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="lookup_ms"):
        Deadlines(lookup_ms=bad)


def test_keys_of_engines_never_meet_keys_of_tokens() -> None:
    key = engine_keys(1)[0]
    assert key_of(key) == chain_digests([key])[0]
    assert key_of(key) != key_of(key[:-1] + b"\1"), "another cache group is another block"


def test_a_lane_goes_on_after_a_job_that_raises() -> None:
    ran: list[int] = []
    failed: list[int] = []

    def run(job: int) -> None:
        if job == 1:
            raise RuntimeError("planted")
        ran.append(job)

    lane: Lane[int] = Lane("test", run, failed.append)
    for job in range(3):
        assert lane.submit(job)
    lane.wait_idle()
    assert (ran, failed) == ([0, 2], [1])
    assert lane.close() == []
    assert not lane.submit(3)


# ---------------------------------------------------------------- several cache groups


@pytest.fixture
def grouped(store: FakeStore) -> Iterator[Stage]:
    """Group 1 needs each block of a prompt, group 0 the last ones."""
    made = Stage(store, group_of=group_of, leading=1)
    yield made
    made.tier.close()


def test_a_gap_in_one_group_is_none_in_another(grouped: Stage) -> None:
    whole, window = of_group(engine_keys(4), 1), engine_keys(4)
    filled(grouped, 6)
    # As vLLM offers them: one job, one chain of all groups, of the window what was still there.
    done = grouped.put(
        [*window[2:], *whole],
        [0, 1, 2, 3, 4, 5],
        chain=[*window[:3], *whole[:3], window[3], whole[3]],
    )
    assert done.success
    assert grouped.ask([*whole, *reversed(window)]) == [
        *[Answer.HIT] * 4, Answer.HIT, Answer.HIT, Answer.MISS, Answer.MISS,
    ]  # fmt: skip
    grouped.store.drop([key_of(whole[1]), key_of(window[3])])
    assert grouped.ask([*whole, *reversed(window)], "later") == [
        Answer.HIT, Answer.MISS, Answer.MISS, Answer.MISS,
        Answer.MISS, Answer.HIT, Answer.MISS, Answer.MISS,
    ]  # fmt: skip


def test_each_group_gets_its_own_bytes(grouped: Stage) -> None:
    whole, window = of_group(engine_keys(3), 1), engine_keys(3)
    expected = filled(grouped, 6)
    grouped.put([*window, *whole], [0, 1, 2, 3, 4, 5])
    grouped.rows[:] = 0
    done = grouped.load([*whole, *window], [6, 7, 8, 9, 10, 11])
    assert done.success
    assert (grouped.rows[6:12, :CONTENT_BYTES] == expected[[3, 4, 5, 0, 1, 2]]).all()


def test_what_one_group_lacks_at_the_load_fails_no_other(grouped: Stage) -> None:
    whole, window = of_group(engine_keys(4), 1), engine_keys(4)
    expected = filled(grouped, 8)
    grouped.put([*window, *whole], list(range(8)))
    asked = [*whole, *window]
    assert grouped.ask(asked) == [Answer.HIT] * 8
    grouped.store.drop([key_of(whole[2]), key_of(window[0]), key_of(window[2])])
    grouped.rows[:] = 0
    done = grouped.load(asked, list(range(8)))
    assert not done.success
    assert set(done.keys) == {whole[0], whole[1], window[1], window[3]}
    assert (grouped.rows[[0, 1, 5, 7], :CONTENT_BYTES] == expected[[4, 5, 1, 3]]).all()
    assert grouped.ask(asked) == [
        Answer.HIT, Answer.HIT, Answer.MISS, Answer.MISS,
        Answer.MISS, Answer.HIT, Answer.MISS, Answer.HIT,
    ]  # fmt: skip
    assert grouped.tier.counted()["load_failed"] == 4


def test_a_daemon_that_is_away_is_asked_once_a_group(store: FakeStore) -> None:
    asked = 0

    def answer(method: str, request: Any) -> Any:
        nonlocal asked
        if method == "Acquire":
            asked += 1
            return grpc.StatusCode.UNAVAILABLE
        return store.answer(method, request)

    stage = Stage(store, answer, group_of=group_of, leading=1)
    whole, window = of_group(engine_keys(4), 1), engine_keys(4)
    filled(stage, 8)
    stage.put([*window, *whole], list(range(8)))
    done = stage.load([*whole, *window], list(range(8)))
    assert not done.keys
    assert asked == 2
    stage.tier.close()


def test_windows_are_asked_beside_the_prompt_and_counted_as_none(grouped: Stage) -> None:
    whole, window = of_group(engine_keys(3), 1), engine_keys(3)
    filled(grouped, 6)
    grouped.put([*window, *whole], list(range(6)))
    before = grouped.store.requests["Lookup"]
    grouped.tier.counted()
    assert grouped.ask([*whole, *window]) == [Answer.HIT] * 6
    assert grouped.store.requests["Lookup"] - before == 2
    assert grouped.tier.counted() == {"lookup_hit": 6}


def test_a_question_about_a_window_that_is_late_is_a_miss(store: FakeStore) -> None:
    def answer(method: str, request: Any) -> Any:
        if method == "Lookup":
            engine.clock.advance(0.3)
        return store.answer(method, request)

    engine = Stage(store, answer, group_of=group_of, leading=1)
    whole, window = of_group(engine_keys(2), 1), engine_keys(2)
    filled(engine, 4)
    engine.put([*window, *whole], list(range(4)))
    assert engine.ask([*whole, *window])[2:] == [Answer.MISS] * 2
    engine.tier.close()
