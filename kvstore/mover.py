"""Moves block bytes: runs the core's copies on a few threads and tells when they are done.

Promises. Every copy is answered exactly once, in batches, on the event loop's thread. Copies that
share a slot or an archive's name run in the order in which they were submitted: what is saved out
of a slot is read before the slot is filled again, and a name is forgotten after a running save of
it. The target's generation is written before its first byte, so that a reader of the old content
notices. The checksum is that of the bytes that arrived. A failed copy is answered with its reason;
a defect is answered as INTERNAL and logged, so that nobody waits for ever.

`submit`, `forget` and `close` belong to the event loop's thread. The executors are the caller's.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

from kvstore.clock import Clock
from kvstore.core.effects import Copy, Forget
from kvstore.gather import copy_hashed
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.model.values import STAGING, Place
from kvstore.tiers.base import Archive, PoolMemory

log = logging.getLogger(__name__)

TURN_BYTES_MAX = 4 << 20
"""A worker takes so much at a time: what is submitted meanwhile waits about two milliseconds."""
TURN_COPIES_MAX = 64


class Completion(NamedTuple):
    """How a copy ended: what `Core.done` takes. checksum: xxh3-128, 16 bytes; None if it failed."""

    copy_id: int
    ok: bool
    reason: Reason
    checksum: bytes | None
    elapsed_ns: int


class _Task:
    """A copy or a forgetting, and those that wait for it."""

    __slots__ = ("effect", "followers", "lane", "uses", "waits")

    def __init__(self, effect: Copy | Forget, lane: _Lane, uses: list[_Use]) -> None:
        self.effect = effect
        self.lane = lane
        self.uses = uses
        self.waits = 0
        self.followers: list[_Task] = []


_Use = tuple[tuple[object, ...], bool]  # what is used, and whether beside others


class _Lane:
    """Tasks that are ready for the workers of one executor."""

    __slots__ = ("active", "executor", "ready", "workers")

    def __init__(self, executor: Executor, workers: int) -> None:
        self.executor = executor
        self.workers = workers
        self.active = 0
        self.ready: deque[_Task] = deque()


class _Order:
    """Who has to wait for whom: uses of one thing run in order of entry, except shared ones."""

    def __init__(self) -> None:
        self._exclusive: dict[tuple[object, ...], _Task] = {}
        self._shared: dict[tuple[object, ...], list[_Task]] = {}

    def enter(self, task: _Task) -> None:
        for thing, shared in task.uses:
            before = [self._exclusive[thing]] if thing in self._exclusive else []
            if shared:
                self._shared.setdefault(thing, []).append(task)
            else:
                before += self._shared.pop(thing, [])
                self._exclusive[thing] = task
            for other in before:
                if other is not task:
                    other.followers.append(task)
                    task.waits += 1

    def leave(self, task: _Task) -> list[_Task]:
        """Takes out a task that has ended; returns those that need wait no longer."""
        for thing, shared in task.uses:
            if not shared:
                if self._exclusive.get(thing) is task:
                    del self._exclusive[thing]
            elif (tasks := self._shared.get(thing)) is not None and task in tasks:
                tasks.remove(task)
                if not tasks:
                    del self._shared[thing]
        freed = []
        for follower in task.followers:
            follower.waits -= 1
            if follower.waits == 0:
                freed.append(follower)
        return freed


class Mover:
    """See the module's docstring."""

    def __init__(
        self,
        pools: Mapping[int, PoolMemory],
        *,
        clock: Clock,
        post: Callable[[Callable[[], None]], object],
        on_done: Callable[[Sequence[Completion]], None],
        executor: Executor,
        workers: int = 2,
        archives: Mapping[int, Archive] | None = None,
        archive_executor: Executor | None = None,
        archive_workers: int = 4,
    ) -> None:
        """`pools` by tier, STAGING among them. `post` runs a callable on the event loop's thread,
        from any thread (call_soon_threadsafe); it is called once for a batch of completions, which
        `on_done` then gets. Copies from and to `archives` wait for a device, so they have an
        executor of their own: a commit never queues behind a disk.
        """
        if archives and archive_executor is None:
            raise ValueError("archives need an executor of their own")
        self._pools = dict(pools)
        self._archives = dict(archives or {})
        self._clock = clock
        self._post = post
        self._on_done = on_done
        self._pool_lane = _Lane(executor, workers)
        self._archive_lane = _Lane(archive_executor or executor, archive_workers)
        self._guard = threading.Lock()
        self._order = _Order()
        self._in_flight = 0
        self._done: list[Completion] = []
        self._posted = False
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Effects that have been submitted and have not ended."""
        return self._in_flight

    def submit(self, effects: Sequence[Copy | Forget]) -> None:
        """Takes over effects, in the core's order."""
        tasks = [self._task(effect) for effect in effects]
        with self._guard:
            if self._closed:
                raise RuntimeError("the mover is closed")
            self._in_flight += len(tasks)
            for task in tasks:
                self._order.enter(task)
                if task.waits == 0:
                    task.lane.ready.append(task)
            starts = self._starts()
        self._start(starts)

    def forget(self, effect: Forget) -> None:
        """Drops a name, or a whole space, from an archive, after what was submitted before."""
        self.submit([effect])

    def close(self) -> None:
        """Drops what has not begun and answers nothing from now on. Shut the executors down after
        it, which waits for the copies that run.
        """
        with self._guard:
            self._closed = True
            for lane in (self._pool_lane, self._archive_lane):
                lane.ready.clear()

    # ------------------------------------------------------------------ order

    def _task(self, effect: Copy | Forget) -> _Task:
        uses = list(self._uses(effect))
        if isinstance(effect, Forget):
            return _Task(effect, self._archive_lane, uses)
        tiers = (effect.source.tier, effect.target.tier)
        slow = any(tier in self._archives for tier in tiers)
        return _Task(effect, self._archive_lane if slow else self._pool_lane, uses)

    def _uses(self, effect: Copy | Forget) -> Iterator[_Use]:
        if isinstance(effect, Forget):
            yield from _archive_uses(effect.tier, effect.space_id, effect.key)
            return
        for place in {effect.source, effect.target}:
            if place.tier in self._archives:
                yield from _archive_uses(place.tier, effect.space_id, effect.key)
            elif place.tier != STAGING:
                # A staging window is not written again before its copies are done.
                yield (place.tier, place.region, place.slot), False

    # ------------------------------------------------------------------ workers

    def _starts(self) -> list[_Lane]:
        """One entry for each worker to start. The guard is held."""
        starts: list[_Lane] = []
        for lane in (self._pool_lane, self._archive_lane):
            while lane.active < min(lane.workers, len(lane.ready)):
                lane.active += 1
                starts.append(lane)
        return starts

    def _start(self, starts: list[_Lane]) -> None:
        for lane in starts:
            lane.executor.submit(self._work, lane).add_done_callback(_log_defect)

    def _work(self, lane: _Lane) -> None:
        """One worker: takes turns until nothing is ready."""
        while turn := self._next_turn(lane):
            ended: list[tuple[_Task, Completion | None]] = []
            whole = False
            try:
                for task in turn:
                    self._run(task, ended)
                whole = True
            finally:
                if not whole:
                    # A defect ends this worker: another one goes on with the rest of the turn.
                    with self._guard:
                        lane.active -= 1
                        if not self._closed:
                            lane.ready.extendleft(reversed(turn[len(ended) :]))
                self._end(ended)

    def _next_turn(self, lane: _Lane) -> list[_Task]:
        with self._guard:
            if not lane.ready:
                lane.active -= 1
                return []
            turn: list[_Task] = []
            turn_bytes = 0
            share = max(1, min(len(lane.ready) // lane.workers, TURN_COPIES_MAX))
            while lane.ready and len(turn) < share and turn_bytes < TURN_BYTES_MAX:
                task = lane.ready.popleft()
                turn.append(task)
                turn_bytes += getattr(task.effect, "length", 0)
            return turn

    def _run(self, task: _Task, ended: list[tuple[_Task, Completion | None]]) -> None:
        effect = task.effect
        start_ns = self._clock.monotonic_ns()
        checksum: bytes | None = None
        reason = Reason.INTERNAL
        try:
            if isinstance(effect, Forget):
                self._archives[effect.tier].forget(effect.space_id, effect.key)
            else:
                checksum = self._copy(effect)
            reason = Reason.OK
        except KVStoreError as error:
            reason = error.reason
            # An archive may let a block age out between finding and loading it.
            level = logging.INFO if reason is Reason.MISS_EVICTED else logging.WARNING
            log.log(level, "mover: %s: %s", _name(effect), error)
        except OSError as error:
            reason = Reason.DISK_FULL if error.errno == errno.ENOSPC else Reason.IO_ERROR
            log.warning("mover: %s: %s", _name(effect), error)
        finally:
            completion = None
            if isinstance(effect, Copy):
                elapsed_ns = self._clock.monotonic_ns() - start_ns
                ok = reason is Reason.OK
                completion = Completion(effect.copy_id, ok, reason, checksum, elapsed_ns)
            ended.append((task, completion))

    def _copy(self, copy: Copy) -> bytes:
        source, target, length = copy.source, copy.target, copy.length
        if target.tier in self._archives:
            data = self._pools[source.tier].view(source, length)
            return self._archives[target.tier].save(copy.space_id, copy.key, data)
        pool = self._pools[target.tier]
        into = pool.view(target, length)
        if source.tier in self._archives:
            self._begin(pool, target)
            return self._archives[source.tier].load(copy.space_id, copy.key, into)
        data = self._pools[source.tier].view(source, length)
        self._begin(pool, target)
        return copy_hashed(data, into)

    def _begin(self, pool: PoolMemory, target: Place) -> None:
        pool.set_generation(target.region, target.slot, target.generation)

    # ------------------------------------------------------------------ answers

    def _end(self, ended: list[tuple[_Task, Completion | None]]) -> None:
        with self._guard:
            for task, completion in ended:
                self._in_flight -= 1
                for freed in self._order.leave(task):
                    if not self._closed:
                        freed.lane.ready.append(freed)
                if completion is not None:
                    self._done.append(completion)
            starts = self._starts()
            wake = bool(self._done) and not self._posted and not self._closed
            self._posted |= wake
        self._start(starts)
        if wake:
            self._post(self._deliver)

    def _deliver(self) -> None:
        with self._guard:
            done, self._done = self._done, []
            self._posted = False
            if self._closed:
                return
        self._on_done(done)


def _archive_uses(tier: int, space_id: int, key: bytes) -> Iterator[_Use]:
    # To forget a whole space is to wait for every name of it, and to be waited for by every one.
    yield ("space", tier, space_id), bool(key)
    if key:
        yield ("name", tier, space_id, key), False


def _name(effect: Copy | Forget) -> str:
    what = "forget" if isinstance(effect, Forget) else effect.why
    return f"{what} of {effect.key[:4].hex() or 'space'} in space {effect.space_id}"


def _log_defect(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        log.error("mover: a worker ended by a defect", exc_info=error)
