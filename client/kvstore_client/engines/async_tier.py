"""The store behind an engine that asks from a thread which must neither copy nor wait.

The engine keeps KV in rows of host memory of its own, asks key by key whether the store has one
(`lookup`: not known yet, there, or not), then hands over jobs that fill or read rows. Three threads
do what takes time: one asks the daemon, one fills rows, one reads them.

Promises:
- Every method for the engine's thread returns at once, but `drain` and `close`, which wait for
  calls that are under way, each of which has a deadline.
- An answer that does not come in time is a miss. A key that could not be loaded stays a miss for
  that request, so an engine that asks again does not try for ever.
- A row is written only between the job that offers it and the report that the job is done; it is
  read only in the same time, and what was read is visible to others only after a commit that was
  made meanwhile.
- Each job is reported once.

Knows no engine: `vllm_tier` drives it, and so do the tests.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.model.keys import BlockKey
from kvstore_client.client import Space
from kvstore_client.engines.lanes import Lane
from kvstore_client.engines.refusals import Refusals
from kvstore_client.engines.tier_values import (
    OUTCOMES,
    Answer,
    Asked,
    Deadlines,
    Finished,
    Job,
    Question,
    Request,
    runs,
    trace_id,
)
from kvstore_client.results import Fetched, Pushed

__all__ = ["OUTCOMES", "Answer", "AsyncTier", "Deadlines", "Finished", "Spaces"]

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

KEYS_MAX: Final = 32_768
"""Keys that are remembered: those of the prompts that are under way, some 10 MB. A prompt is stored
in pieces, each with the whole chain before it, and a key costs 10 us of the interpreter's lock."""


class Spaces(Protocol):
    """Where the blocks of an engine are. `current` is called from the tier's threads."""

    def current(self) -> Space:
        """The space of the model as it is known now. Makes no call."""
        ...

    def connect(self, deadline_ms: int) -> None:
        """Connects if it is not yet; offers nothing. Called from the tier's threads."""
        ...

    def reset(self) -> None:
        """The engine's weights may have changed: nothing that was stored may be used again."""
        ...

    def close(self) -> None: ...


class AsyncTier:
    """See the module's docstring.

    rows: [rows, row_bytes] uint8, the engine's memory; the first `content_bytes` of a row are a
        block.
    key_of: the store's key for an engine's key.
    group_of: the cache group of an engine's key; groups are asked, loaded and stored apart, so that
        what one lacks is no gap in another.
    leading: the group that needs each block of a prompt, by which a prompt is weighed and counted.
        Blocks of others are each of use without those before.
    durable: what is stored is on disk before its job ends.
    threaded: False in tests, which call `work`.
    """

    def __init__(
        self,
        spaces: Spaces,
        rows: Bytes,
        content_bytes: int,
        key_of: Callable[[bytes], BlockKey],
        *,
        group_of: Callable[[bytes], int] = lambda key: 0,
        leading: int = 0,
        deadlines: Deadlines | None = None,
        durable: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        threaded: bool = True,
    ) -> None:
        if rows.ndim != 2 or not 0 < content_bytes <= rows.shape[1]:
            raise ValueError(f"rows of {rows.shape} do not hold blocks of {content_bytes} bytes")
        self._spaces = spaces
        self._rows: Bytes | None = rows
        self._content_bytes = content_bytes
        self._key_of = functools.lru_cache(KEYS_MAX)(key_of)
        self._group_of = group_of
        self._leading = leading
        self._deadlines = deadlines or Deadlines()
        self._durable = durable
        self._clock_ns = clock_ns
        # Longer than a lookup may take, so that only a defect of ours is found by it.
        self._patience_ns = 2 * self._deadlines.lookup_ms * 1_000_000
        self._requests: dict[str, Request] = {}
        self._live: set[str] = set()
        # Had begun when the weights may have changed: their KV is of both.
        self._mixed: set[str] = set()
        self._owners: dict[int, Job] = {}
        self._with_new: list[str] = []
        # Both are appended to by the tier's threads and emptied by the engine's.
        self._answers: deque[list[tuple[Asked, Answer]]] = deque()
        self._finished: deque[Finished] = deque()
        self._counted: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._refusals = Refusals(log)
        self._lookups: Lane[list[Question]] = Lane(
            "kvstore-lookup", self._look_up, self._give_up_lookup, threaded=threaded
        )
        self._loads: Lane[Job] = Lane("kvstore-load", self._load, self._fail, threaded=threaded)
        self._stores: Lane[Job] = Lane("kvstore-store", self._store, self._fail, threaded=threaded)

    # ---------------------------------------------------------------- for the engine's thread

    def connect_ahead(self) -> None:
        """Connects meanwhile: else the first request waits for it, or is too early for a hit."""
        self._lookups.submit([])

    def request_began(self, request_id: str) -> None:
        """Until `request_finished` the engine may hold KV of this request."""
        self._live.add(request_id)

    def lookup(self, request_id: str, key: bytes) -> Answer:
        """Whether the store has this key. RETRY: it was asked, or will be at `end_step`."""
        self._take_answers()
        if request_id in self._mixed:
            return Answer.MISS
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = Request()
        asked = request.keys.get(key)
        if asked is None:
            asked = request.keys[key] = Asked(key)
            if not request.new:
                self._with_new.append(request_id)
            request.new.append(asked)
        elif self._is_late(asked):
            asked.answer = Answer.MISS
            self._count("lookup_late")
        return asked.answer

    def _is_late(self, asked: Asked) -> bool:
        if asked.answer is not Answer.RETRY or not asked.asked_ns:
            return False
        return self._clock_ns() - asked.asked_ns > self._patience_ns

    def end_step(self) -> None:
        """Sends what was asked since the last time."""
        if not self._with_new:
            return
        names, self._with_new = self._with_new, []
        now_ns = self._clock_ns()
        questions = []
        for request_id in names:
            request = self._requests.get(request_id)
            if request is None or not request.new:
                continue
            new, request.new = tuple(request.new), []
            for asked in new:
                asked.asked_ns = now_ns
            questions.append(Question(request_id, new))
        if questions and not self._lookups.submit(questions):
            self._give_up_lookup(questions)

    def submit_load(
        self, job_id: int, request_id: str, keys: Sequence[bytes], rows: Sequence[int]
    ) -> None:
        """Fill these rows. The keys of a group are in the order of the prompt."""
        now_ns = self._clock_ns()
        job = Job(now_ns, job_id, request_id, True, tuple(keys), tuple(rows))
        self._submit(job, self._loads)

    def submit_store(
        self,
        job_id: int,
        request_id: str,
        keys: Sequence[bytes],
        rows: Sequence[int],
        chain: Sequence[bytes],
    ) -> None:
        """Store these rows. `chain`: the keys of the prompt, of each group from its first block to
        the last of `keys`, all of which are in it; what is not in it is not stored.
        """
        now_ns = self._clock_ns()
        job = Job(now_ns, job_id, request_id, False, tuple(keys), tuple(rows), tuple(chain))
        self._submit(job, self._stores)

    def _submit(self, job: Job, lane: Lane[Job]) -> None:
        self._owners[job.job_id] = job
        if not self._is_sound(job):
            log.error("kvstore: job %d names rows that are not there; not done", job.job_id)
            self._fail(job)
        elif job.request_id in self._mixed or not lane.submit(job):
            self._fail(job)

    def _is_sound(self, job: Job) -> bool:
        rows = self._rows
        return (
            rows is not None
            and len(job.keys) == len(job.rows)
            and all(0 <= row < len(rows) for row in job.rows)
        )

    def finished(self) -> list[Finished]:
        """Jobs that ended since the last call. What could not be loaded is a miss from now on."""
        done = []
        while self._finished:
            result = self._finished.popleft()
            job = self._owners.pop(result.job_id, None)
            if job is None:
                continue
            done.append(result)
            request = self._requests.get(job.request_id)
            if request is not None:
                self._remember(request, job, result)
        return done

    @staticmethod
    def _remember(request: Request, job: Job, result: Finished) -> None:
        there = set(result.keys)
        for key in job.keys:
            asked = request.keys.get(key)
            if asked is None:
                continue
            if job.load and key not in there:
                asked.answer, asked.failed = Answer.MISS, True
            elif not job.load and key in there and not asked.failed:
                # It was a miss when the request came; after a preemption it may be asked again.
                del request.keys[key]

    def request_finished(self, request_id: str) -> None:
        """Nothing will be asked for this request any more. Its jobs go on."""
        self._requests.pop(request_id, None)
        self._live.discard(request_id)
        self._mixed.discard(request_id)

    def drain(self) -> None:
        """Ends all jobs: those that have not begun fail. Nothing touches the rows afterwards, and
        nothing that was stored until now is used again. For the requests that have begun nothing is
        stored or found any more: they may go on with KV of the weights before.
        """
        for lane in (self._loads, self._stores):
            for job in lane.cancel():
                self._fail(job)
        self._loads.wait_idle()
        self._stores.wait_idle()
        self._mixed |= self._live
        self._spaces.reset()
        self._count("reset")

    def close(self) -> None:
        """Ends threads and session, and lets go of the rows. Idempotent."""
        for questions in self._lookups.close():
            self._give_up_lookup(questions)
        for lane in (self._loads, self._stores):
            for job in lane.close():
                self._fail(job)
        self._rows = None
        self._spaces.close()

    def counted(self) -> Mapping[str, int]:
        """What happened since the last call, by outcome (OUTCOMES)."""
        with self._counting:
            counted, self._counted = self._counted, Counter()
        return counted

    def _take_answers(self) -> None:
        while self._answers:
            for asked, answer in self._answers.popleft():
                if asked.answer is Answer.RETRY:
                    asked.answer = answer

    # ---------------------------------------------------------------- in the tier's threads

    def work(self) -> bool:
        """Without threads: runs one job of each kind here. False if there was none."""
        return any([self._lookups.run_one(), self._loads.run_one(), self._stores.run_one()])

    def _left_ms(self, since_ns: int, deadline_ms: int) -> int:
        return deadline_ms - (self._clock_ns() - since_ns) // 1_000_000

    def _look_up(self, questions: list[Question]) -> None:
        if not questions:  # see connect_ahead
            self._spaces.connect(self._deadlines.load_ms)
        for question in questions:
            left_ms = self._left_ms(question.asked[0].asked_ns, self._deadlines.lookup_ms)
            if left_ms <= 0:  # of a request that has gone on, or will at once
                self._give_up_lookup([question])
                continue
            leading, others = self._split(question.asked)
            if leading:
                self._look_up_leading(question, leading, left_ms)
            if others:
                self._look_up_others(question, others)

    def _split(self, asked: Sequence[Asked]) -> tuple[list[Asked], list[Asked]]:
        """Those of the leading group, and those of others."""
        leading: list[Asked] = []
        others: list[Asked] = []
        for one in asked:
            (leading if self._group_of(one.key) == self._leading else others).append(one)
        return leading, others

    def _look_up_leading(self, question: Question, asked: list[Asked], left_ms: int) -> None:
        keys = [self._key_of(one.key) for one in asked]
        hit = self._spaces.current().lookup(
            keys, request_id=trace_id(question.request_id), deadline_ms=left_ms
        )
        loaded = min(hit.blocks, hit.plan.load_blocks)
        self._count("lookup_hit", loaded)
        self._count("lookup_declined", hit.blocks - loaded)
        self._count("lookup_miss", len(keys) - hit.blocks)
        self._refusals.tell(hit)
        self._answer(asked, [index < loaded for index in range(len(asked))])

    def _look_up_others(self, question: Question, asked: list[Asked]) -> None:
        left_ms = self._left_ms(question.asked[0].asked_ns, self._deadlines.lookup_ms)
        if left_ms <= 0:
            self._give_up_lookup([Question(question.request_id, tuple(asked))])
            return
        keys = [self._key_of(one.key) for one in asked]
        found = self._spaces.current().presence(
            keys, request_id=trace_id(question.request_id), deadline_ms=left_ms
        )
        hits = sum(found.there)
        self._count("lookup_hit", hits)
        self._count("lookup_miss", len(keys) - hits)
        self._refusals.tell(found)
        self._answer(asked, found.there)

    def _answer(self, asked: Sequence[Asked], there: Sequence[bool]) -> None:
        answers = [Answer.HIT if yes else Answer.MISS for yes in there]
        self._answers.append(list(zip(asked, answers, strict=True)))

    def _give_up_lookup(self, questions: list[Question]) -> None:
        self._answers.append([(a, Answer.MISS) for question in questions for a in question.asked])
        self._count("lookup_miss", sum(len(question.asked) for question in questions))

    def _load(self, job: Job) -> None:
        rows = self._rows
        assert rows is not None  # let go of only after the lanes have ended
        # The request waits from its submission on, behind others too.
        left_ms = self._left_ms(job.submitted_ns, self._deadlines.load_ms)
        if left_ms <= 0:
            self._fail(job)
            return
        begun = time.perf_counter()
        loaded, moved = [], 0
        for group in self._groups(job.keys):
            keys, bytes_moved = self._load_group(job, group, rows)
            loaded += keys
            moved += bytes_moved
        self._count("load_loaded", len(loaded))
        self._count("load_failed", len(job.keys) - len(loaded))
        self._end(job, tuple(loaded), begun, moved)

    def _groups(self, keys: Sequence[bytes]) -> list[list[int]]:
        """The indexes of each group's keys."""
        groups: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            groups.setdefault(self._group_of(key), []).append(index)
        return list(groups.values())

    def _load_group(self, job: Job, group: list[int], rows: Bytes) -> tuple[list[bytes], int]:
        """The keys of one group that were loaded, and bytes. After a gap it goes on where blocks
        are of use without those before.
        """
        leading = self._group_of(job.keys[group[0]]) == self._leading
        loaded: list[bytes] = []
        moved = 0
        while group:
            left_ms = self._left_ms(job.submitted_ns, self._deadlines.load_ms)
            if left_ms <= 0:
                break
            fetched: Fetched = self._spaces.current().fetch(
                [self._key_of(job.keys[index]) for index in group],
                [rows[job.rows[index], : self._content_bytes] for index in group],
                request_id=trace_id(job.request_id),
                deadline_ms=left_ms,
            )
            loaded += [job.keys[index] for index in group[: fetched.blocks]]
            moved += fetched.bytes
            if leading or not fetched.reason.is_miss:
                break
            group = group[fetched.blocks + 1 :]
        return loaded, moved

    def _store(self, job: Job) -> None:
        rows = self._rows
        assert rows is not None
        begun = time.perf_counter()
        # Until the job ends the engine keeps its rows, which it needs for others.
        if self._left_ms(job.submitted_ns, self._deadlines.store_ms) <= 0:
            self._fail(job)
            return
        kept = 0
        for group in self._groups(job.chain):
            kept += self._store_group(job, [job.chain[index] for index in group], rows)
        whole = kept == len(job.keys)
        self._count("store_dropped", len(job.keys) - kept)
        self._end(job, job.keys if whole else (), begun, len(job.keys) * self._content_bytes)

    def _store_group(self, job: Job, chain: list[bytes], rows: Bytes) -> int:
        """How many blocks of one group's chain are kept now."""
        place = {key: index for index, key in enumerate(chain)}
        row_of = {
            place[key]: row for key, row in zip(job.keys, job.rows, strict=True) if key in place
        }
        keys = [self._key_of(key) for key in chain]

        def fill(index: int, target: Bytes) -> None:
            np.copyto(target, rows[row_of[index], : self._content_bytes])

        kept = 0
        for first, end in runs(sorted(row_of)):
            left_ms = self._left_ms(job.submitted_ns, self._deadlines.store_ms)
            if left_ms <= 0:
                break
            pushed: Pushed = self._spaces.current().push(
                keys[:end],
                fill,
                first_block=first,
                durable=self._durable,
                request_id=trace_id(job.request_id),
                deadline_ms=left_ms,
            )
            kept += pushed.stored + pushed.present + pushed.reserved
            self._count("store_stored", pushed.stored)
            self._count("store_present", pushed.present + pushed.reserved)
        return kept

    def _end(self, job: Job, keys: tuple[bytes, ...], begun: float, moved: int) -> None:
        took = time.perf_counter() - begun
        success = len(keys) == len(job.keys)
        self._finished.append(Finished(job.job_id, job.load, success, keys, took, moved))

    def _fail(self, job: Job) -> None:
        self._count("load_failed" if job.load else "store_dropped", len(job.keys))
        self._finished.append(Finished(job.job_id, job.load, False, (), 0.0, 0))

    def _count(self, what: str, number: int = 1) -> None:
        if number:
            assert what in OUTCOMES
            with self._counting:
                self._counted[what] += number
