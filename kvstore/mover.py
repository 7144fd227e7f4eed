"""Moves block bytes: runs the core's copies on a few threads and tells when they are done.

Promises. Every copy is answered exactly once, in batches, on the event loop's thread. Copies that
share a slot or an archive's name run in the order in which they were submitted: what is saved out
of a slot is read before the slot is filled again, and a name is forgotten after a running save of
it. The target's generation is written before its first byte, so that a reader of the old content
notices. A failed copy is answered with its reason;
a defect is answered as INTERNAL and logged, so that nobody waits for ever.

Saves and forgettings go to one thread, in batches, since an archive pays for each commit and not
for its size. While that thread is stalled, saves are given up at once: the slots that they read are
needed by those who put.

`submit`, `forget`, `relieve` and `close` belong to the event loop's thread. The executors are the
caller's.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

from kvstore.clock import Clock
from kvstore.core.effects import Copy, Forget
from kvstore.gather import copy_one
from kvstore.lanes import Lane, Order, Task, Use, archive_uses
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.model.values import STAGING
from kvstore.shm import whole_pages
from kvstore.tiers.base import (
    Archive,
    Bytes,
    Crossing,
    PoolMemory,
    RegionMemory,
    RemotePool,
    Saved,
    SavedBlock,
)

log = logging.getLogger(__name__)

COUNTED = frozenset({Reason.MISS_EVICTED, Reason.DECLINED_GUARD, Reason.NO_SPACE})
"""No line for each: an archive may let a block age out between finding and loading it, and a guard
that stops, which is told once, refuses all that are out at once, which may be thousands; so may a
device whose memory another has taken.
"""

READ_BYTES_MAX = 1 << 20
"""A reader takes so much at a time: what came is answered for while the device reads on, and no
reader has several blocks left when the others have none.
"""
SAVE_BYTES_MAX = 256 << 20
"""Saves of one group commit. Its fixed cost is that of writing 20 MiB, during which the device
stands still: 256 MiB in four commits took a third longer.
"""
SAVES_MAX = 1024
CROSS_BYTES_MAX = 32 << 20
"""Copies that cross to or from a device together: a millisecond or less of its link, and whoever
waits for the first of them waits for the last.
"""
CROSS_WORKERS = 2
"""One batch is under way while the next one is begun."""
STALL_NS = 2 * 10**9
STALL_BYTES_PER_SECOND = 64 << 20
"""A batch of saves that takes longer than the first, and is slower than the second, is stalled."""


UNHASHED = b""
"""Checksum of a copy between pools: nobody would compare it, and it cost as much as the copy."""


class Completion(NamedTuple):
    """How a copy ended: what `Core.done` takes. checksum: xxh3-128, 16 bytes, of what an archive
    stored or loaded; UNHASHED between pools; None if it failed.
    """

    copy_id: int
    ok: bool
    reason: Reason
    checksum: bytes | None
    elapsed_ns: int


_Ended = tuple[Task, "Completion | bool"]  # bool: of a forgetting, whether it is durable


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
        archive_readers: int = 4,
        on_forgotten: Callable[[int, bool], None] = lambda count, durable: None,
        remotes: Mapping[int, RemotePool] | None = None,
        remote_executor: Executor | None = None,
    ) -> None:
        """`pools` by tier, STAGING among them. `post` runs a callable on the event loop's thread,
        from any thread (call_soon_threadsafe); it is called once for a batch of completions, which
        `on_done` then gets. Copies from and to `archives` wait for a device, so they have an
        executor of their own, with one thread more than readers: a commit never queues behind a
        disk. `on_forgotten` is told on the loop's thread how many forgettings have ended, and
        whether an archive will remember them. Copies from and to `remotes` wait for their
        device in an executor of CROSS_WORKERS threads.
        """
        if (archives and archive_executor is None) or (remotes and remote_executor is None):
            raise ValueError("archives and remote pools need executors of their own")
        self._pools = dict(pools)
        self._archives = dict(archives or {})
        self._clock = clock
        self._post = post
        self._on_done = on_done
        self._remotes = dict(remotes or {})
        self._memory: dict[int, RegionMemory] = {**self._pools, **self._remotes}
        self._pool_lane = Lane(executor, workers)
        self._cross_lane = Lane(
            remote_executor or executor, CROSS_WORKERS, bytes_max=CROSS_BYTES_MAX
        )
        self._read_lane = Lane(
            archive_executor or executor, archive_readers, bytes_max=READ_BYTES_MAX
        )
        self._write_lane = Lane(
            archive_executor or executor, 1, bytes_max=SAVE_BYTES_MAX, copies_max=SAVES_MAX
        )
        self._lanes = (self._pool_lane, self._cross_lane, self._read_lane, self._write_lane)
        self._stalls_at_ns: int | None = None  # the batch that is being saved, if it has not ended
        self._on_forgotten = on_forgotten
        self._forgotten: list[bool] = []
        self._guard = threading.Lock()
        self._order = Order()
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
        self.relieve()

    def relieve(self) -> None:
        """Gives up the saves that wait behind a stalled one. Called now and then."""
        stalls_at_ns = self._stalls_at_ns
        if stalls_at_ns is None or self._clock.monotonic_ns() < stalls_at_ns:
            return
        with self._guard:
            ready = self._write_lane.ready
            saves = [task for task in ready if isinstance(task.effect, Copy)]
            kept = [task for task in ready if not isinstance(task.effect, Copy)]
            ready.clear()
            ready.extend(kept)
        self._end([(task, _failed(task, Reason.LIMIT_QUEUE)) for task in saves])

    def forget(self, effect: Forget) -> None:
        """Drops a name, or a whole space, from an archive, after what was submitted before."""
        self.submit([effect])

    def close(self) -> None:
        """Drops what has not begun and answers nothing from now on. Shut the executors down after
        it, which waits for the copies that run.
        """
        with self._guard:
            self._closed = True
            for lane in self._lanes:
                lane.ready.clear()

    # ------------------------------------------------------------------ order

    def _task(self, effect: Copy | Forget) -> Task:
        uses = list(self._uses(effect))
        if isinstance(effect, Forget) or effect.target.tier in self._archives:
            return Task(effect, self._write_lane, uses)
        tiers = {effect.source.tier, effect.target.tier}
        if tiers & self._archives.keys():
            return Task(effect, self._read_lane, uses)
        far = tiers & self._remotes.keys()
        return Task(effect, self._cross_lane if far else self._pool_lane, uses)

    def _uses(self, effect: Copy | Forget) -> Iterator[Use]:
        if isinstance(effect, Forget):
            yield from archive_uses(effect.tier, effect.space_id, effect.key)
            return
        for place in {effect.source, effect.target}:
            if place.tier in self._archives:
                yield from archive_uses(place.tier, effect.space_id, effect.key)
            elif place.tier != STAGING:
                # A staging window is not written again before its copies are done.
                yield (place.tier, place.region, place.slot), False

    # ------------------------------------------------------------------ workers

    def _starts(self) -> list[Lane]:
        """One entry for each worker to start. The guard is held."""
        starts: list[Lane] = []
        for lane in self._lanes:
            while lane.active < min(lane.workers, len(lane.ready)):
                lane.active += 1
                starts.append(lane)
        return starts

    def _start(self, starts: list[Lane]) -> None:
        for lane in starts:
            lane.executor.submit(self._work, lane).add_done_callback(_log_defect)

    def _work(self, lane: Lane) -> None:
        """One worker: takes turns until nothing is ready."""
        while turn := self._next_turn(lane):
            ended: list[_Ended] = []
            whole = False
            try:
                if lane is self._write_lane:
                    self._write(turn, ended)
                elif lane is self._cross_lane:
                    self._cross(turn, ended)
                else:
                    for task in turn:
                        self._run(task, ended)
                whole = True
            finally:
                if not whole:
                    # A defect ends this worker: another one goes on with the rest of the turn.
                    with self._guard:
                        lane.active -= 1
                        if not self._closed:
                            begun = {task for task, _ in ended}
                            rest = [task for task in turn if task not in begun]
                            lane.ready.extendleft(reversed(rest))
                self._end(ended)

    def _next_turn(self, lane: Lane) -> list[Task]:
        with self._guard:
            if not lane.ready:
                lane.active -= 1
                return []
            turn: list[Task] = []
            turn_bytes = 0
            share = max(1, min(len(lane.ready) // lane.workers, lane.copies_max))
            while lane.ready and len(turn) < share and turn_bytes < lane.bytes_max:
                task = lane.ready.popleft()
                turn.append(task)
                turn_bytes += self._weight_bytes(task.effect)
            return turn

    def _weight_bytes(self, effect: Copy | Forget) -> int:
        """A save out of a device is copied first, into memory that no pool accounts for: few do."""
        if isinstance(effect, Forget):
            return 0
        far = effect.why == "save" and effect.source.tier in self._remotes
        return effect.length * (SAVE_BYTES_MAX // CROSS_BYTES_MAX if far else 1)

    def _run(self, task: Task, ended: list[_Ended]) -> None:
        """One copy between pools, or out of an archive."""
        copy = task.effect
        assert isinstance(copy, Copy), "an archive is written to by one thread"
        start_ns = self._clock.monotonic_ns()
        outcome: Saved | None = None
        try:
            outcome = self._copy(copy)
        except (KVStoreError, OSError) as error:
            outcome = error
        finally:
            elapsed_ns = self._clock.monotonic_ns() - start_ns
            ended.append((task, _completion(copy, outcome, elapsed_ns)))

    def _cross(self, turn: list[Task], ended: list[_Ended]) -> None:
        """Copies between pools of which one is a device's: all are begun before one is waited
        for.
        """
        start_ns = self._clock.monotonic_ns()
        batches: dict[int, list[tuple[Task, Copy, Crossing]]] = {}
        for task in turn:
            copy = task.effect
            assert isinstance(copy, Copy), "an archive is written to by one thread"
            outcome: KVStoreError | None = None
            crossing: Crossing | None = None
            try:
                crossing = self._crossing(copy)
                batches.setdefault(crossing.device.tier, []).append((task, copy, crossing))
            except KVStoreError as error:
                outcome = error
            finally:
                if crossing is None:
                    ended.append((task, _completion(copy, outcome, 0)))
        for tier, batch in batches.items():
            outcomes: Sequence[Saved | None] = [None] * len(batch)
            try:
                crossed = self._remotes[tier].cross([crossing for _, _, crossing in batch])
                outcomes = [UNHASHED if failed is None else failed for failed in crossed]
            finally:
                elapsed_ns = self._clock.monotonic_ns() - start_ns
                ended += [
                    (task, _completion(copy, outcome, elapsed_ns))
                    for (task, copy, _), outcome in zip(batch, outcomes, strict=True)
                ]

    def _crossing(self, copy: Copy) -> Crossing:
        """The copy, ready to be begun: the generation is written before it is."""
        inward = copy.target.tier in self._remotes
        device, host = copy.target, copy.source
        if not inward:
            device, host = host, device
        memory = self._pools[host.tier].view(host, copy.length)
        self._begin(self._memory[copy.target.tier], copy)
        return Crossing(device, host, memory, inward)

    def _write(self, turn: list[Task], ended: list[_Ended]) -> None:
        """Forgettings, then saves: none depends on another, else it would not be ready."""
        length = sum(getattr(task.effect, "length", 0) for task in turn)
        self._stalls_at_ns = self._clock.monotonic_ns() + patience_ns(length)
        try:
            for tier in self._archives:
                self._forget(tier, turn, ended)
            for tier in self._archives:
                self._save(tier, turn, ended)
        finally:
            self._stalls_at_ns = None

    def _forget(self, tier: int, turn: list[Task], ended: list[_Ended]) -> None:
        tasks, names = [], []
        for task in turn:
            if isinstance(task.effect, Forget) and task.effect.tier == tier:
                tasks.append(task)
                names.append((task.effect.space_id, task.effect.key))
        if not names:
            return
        durable = False
        try:
            self._archives[tier].forget(names)
            durable = True
        except (KVStoreError, OSError) as error:
            log.warning("mover: %d names are not forgotten durably yet: %s", len(names), error)
        finally:
            ended += [(task, durable) for task in tasks]

    def _save(self, tier: int, turn: list[Task], ended: list[_Ended]) -> None:
        tasks: list[tuple[Task, Copy]] = []
        blocks: list[SavedBlock] = []
        for task, copy, data in self._sources(tier, turn, ended):
            tasks.append((task, copy))
            blocks.append(SavedBlock(copy.space_id, copy.key, copy.parent, copy.depth, data))
        if not blocks:
            return
        start_ns = self._clock.monotonic_ns()
        outcomes: Sequence[Saved | None] = [None] * len(tasks)
        try:
            outcomes = self._archives[tier].save_batch(blocks)
        finally:
            elapsed_ns = self._clock.monotonic_ns() - start_ns
            ended += [
                (task, _completion(copy, outcome, elapsed_ns))
                for (task, copy), outcome in zip(tasks, outcomes, strict=True)
            ]

    def _sources(
        self, tier: int, turn: list[Task], ended: list[_Ended]
    ) -> list[tuple[Task, Copy, Bytes]]:
        """What is to be saved, with its bytes: where they are, or a copy of what only a device
        reads, of all such blocks at once.
        """
        near: list[tuple[Task, Copy, Bytes]] = []
        far: dict[int, list[tuple[Task, Copy, Bytes]]] = {}
        for task in turn:
            copy = task.effect
            if not isinstance(copy, Copy) or copy.target.tier != tier:
                continue
            source = copy.source
            if source.tier in self._remotes:
                far.setdefault(source.tier, []).append((task, copy, whole_pages(copy.length)))
                continue
            try:
                near.append((task, copy, self._pools[source.tier].view(source, copy.length)))
            except (KVStoreError, OSError) as error:
                ended.append((task, _completion(copy, error, 0)))
        for remote, batch in far.items():
            crossings = [Crossing(copy.source, None, into, False) for _, copy, into in batch]
            try:
                crossed = self._remotes[remote].cross(crossings)
            except Exception:
                ended += [(task, _completion(copy, None, 0)) for task, copy, _ in batch]
                raise
            for one, failed in zip(batch, crossed, strict=True):
                if failed is None:
                    near.append(one)
                else:
                    ended.append((one[0], _completion(one[1], failed, 0)))
        return near

    def _copy(self, copy: Copy) -> bytes:
        source, target, length = copy.source, copy.target, copy.length
        pool = self._pools[target.tier]
        into = pool.view(target, length)
        if source.tier in self._archives:
            self._begin(pool, copy)
            return self._archives[source.tier].load(copy.space_id, copy.key, into)
        data = self._pools[source.tier].view(source, length)
        self._begin(pool, copy)
        copy_one(data, into)
        return UNHASHED

    def _begin(self, pool: RegionMemory, copy: Copy) -> None:
        target = copy.target
        pool.set_generation(target.region, target.slot, target.generation)

    # ------------------------------------------------------------------ answers

    def _end(self, ended: list[_Ended]) -> None:
        with self._guard:
            for task, outcome in ended:
                self._in_flight -= 1
                for freed in self._order.leave(task):
                    if not self._closed:
                        freed.lane.ready.append(freed)
                if isinstance(outcome, Completion):
                    self._done.append(outcome)
                else:
                    self._forgotten.append(outcome)
            starts = self._starts()
            news = bool(self._done or self._forgotten)
            wake = news and not self._posted and not self._closed
            self._posted |= wake
        self._start(starts)
        if wake:
            self._post(self._deliver)

    def _deliver(self) -> None:
        with self._guard:
            done, self._done = self._done, []
            forgotten, self._forgotten = self._forgotten, []
            self._posted = False
            if self._closed:
                return
        if done:
            self._on_done(done)
        if forgotten:
            self._on_forgotten(len(forgotten), all(forgotten))


def patience_ns(length: int) -> int:
    """When a batch of saves of so many bytes is stalled."""
    return max(STALL_NS, length * 10**9 // STALL_BYTES_PER_SECOND)


def _completion(copy: Copy, outcome: Saved | None, elapsed_ns: int) -> Completion:
    """None: a defect."""
    if isinstance(outcome, bytes):
        return Completion(copy.copy_id, True, Reason.OK, outcome, elapsed_ns)
    reason = Reason.INTERNAL
    if isinstance(outcome, KVStoreError):
        reason = outcome.reason
    elif isinstance(outcome, OSError):
        reason = Reason.DISK_FULL if outcome.errno == errno.ENOSPC else Reason.IO_ERROR
    if outcome is not None and reason not in COUNTED:
        # An archive says itself, once, that it takes no saves.
        level = logging.DEBUG if copy.why == "save" else logging.WARNING
        log.log(level, "mover: %s: %s", _name(copy), outcome)
    return Completion(copy.copy_id, False, reason, None, elapsed_ns)


def _failed(task: Task, reason: Reason) -> Completion:
    assert isinstance(task.effect, Copy), "a forgetting is not answered with a reason"
    return Completion(task.effect.copy_id, False, reason, None, 0)


def _name(copy: Copy) -> str:
    return f"{copy.why} of {copy.key[:4].hex()} in space {copy.space_id}"


def _log_defect(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        log.error("mover: a worker ended by a defect", exc_info=error)
