"""Which of the mover's tasks may run, and where: their order, and the lanes that they queue in.

Used by the mover alone, which holds its lock around all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor

from kvstore.core.effects import Copy, Forget

TURN_BYTES_MAX = 4 << 20
"""A worker takes so much at a time: what is submitted meanwhile waits about two milliseconds."""
TURN_COPIES_MAX = 64


class Task:
    """A copy or a forgetting, and those that wait for it."""

    __slots__ = ("effect", "followers", "lane", "uses", "waits")

    def __init__(self, effect: Copy | Forget, lane: Lane, uses: list[Use]) -> None:
        self.effect = effect
        self.lane = lane
        self.uses = uses
        self.waits = 0
        self.followers: list[Task] = []


Use = tuple[tuple[object, ...], bool]  # what is used, and whether beside others


def archive_uses(tier: int, space_id: int, key: bytes) -> Iterator[Use]:
    """Of a name in an archive; of all names of the space if the key is empty."""
    # To forget a whole space is to wait for every name of it, and to be waited for by every one.
    yield ("space", tier, space_id), bool(key)
    if key:
        yield ("name", tier, space_id, key), False


class Lane:
    """Tasks that are ready for the workers of one executor, and how many one takes at a time."""

    __slots__ = ("active", "bytes_max", "copies_max", "executor", "ready", "workers")

    def __init__(
        self,
        executor: Executor,
        workers: int,
        *,
        bytes_max: int = TURN_BYTES_MAX,
        copies_max: int = TURN_COPIES_MAX,
    ) -> None:
        self.executor = executor
        self.workers = workers
        self.bytes_max = bytes_max
        self.copies_max = copies_max
        self.active = 0
        self.ready: deque[Task] = deque()


class Order:
    """Who has to wait for whom: uses of one thing run in order of entry, except shared ones."""

    def __init__(self) -> None:
        self._exclusive: dict[tuple[object, ...], Task] = {}
        self._shared: dict[tuple[object, ...], list[Task]] = {}

    def enter(self, task: Task) -> None:
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

    def leave(self, task: Task) -> list[Task]:
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
