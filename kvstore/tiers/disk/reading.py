"""Reads out of an opened folder: who is sent to the device, and what it means that one failed.

Promises. Nobody is sent to a device that fails or hangs: all miss, and the tier itself tries a page
now and then until the device is back. Such a time costs no block: one that could not be read is
hidden at first, and dropped when another read shows that it is the block that fails, and not the
device.

`find` needs no lock; any thread may call anything.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from kvstore.clock import Clock
from kvstore.model.reasons import BlockCorrupt, KVStoreError, Reason
from kvstore.model.values import PAGE_BYTES
from kvstore.tiers.base import Bytes
from kvstore.tiers.disk.files import Trouble, Truncated, classify
from kvstore.tiers.disk.guard import FAILURES_IN_A_ROW, Hanging, Path
from kvstore.tiers.disk.pages import aligned_bytes
from kvstore.tiers.disk.volume import SpaceInfo, Volume

log = logging.getLogger(__name__)

TRIES = 3
"""Pages in different places that are tried: one bad place is not the device."""
_STRIDE = 7_919
"""Between the slots of two tries; a prime, so that all are tried sooner or later."""
CORRUPT_KEPT = 64


class Reading:
    """See the module's docstring. path, hanging: whether reads are sent, and why not."""

    def __init__(self, clock: Clock, counts: Counter[str], *, parallel: bool) -> None:
        """counts: of the tier. parallel: the device is tried on a thread of its own."""
        self.path = Path(failures_to_stop=FAILURES_IN_A_ROW)
        self.hanging = Hanging()
        self.corrupt_ns: list[int] = []
        self._clock = clock
        self._counts = counts
        self._parallel = parallel
        self._hidden: dict[tuple[int, bytes], None] = {}
        self._trying = threading.Lock()
        self._tries = itertools.count()

    # ------------------------------------------------------------------ blocks

    def find(self, volume: Volume, space_id: int, keys: Sequence[bytes]) -> Collection[bytes]:
        """Those of `keys` that can be read, as far as is known."""
        if self.path.stopped or self.hanging.stalled(self._clock.monotonic_ns()):
            return ()
        found = volume.find(space_id, keys)
        if self._hidden:
            return [key for key in found if (space_id, key) not in self._hidden]
        return found

    def load(
        self, volume: Volume, space_id: int, key: bytes, space: SpaceInfo, into: Bytes
    ) -> bytes:
        """As `Archive.load`."""
        if self.path.stopped:
            raise KVStoreError(Reason.DECLINED_GUARD, f"reading is stopped: {self.path.reason}")
        if (space_id, key) in self._hidden:
            raise KVStoreError(Reason.MISS_EVICTED, "it could not be read")
        try:
            with self._on_the_device():
                checksum = volume.read(space_id, key, space, into)
        except BlockCorrupt as error:
            self._note_corrupt(error)
            raise
        except OSError as error:
            self._note_error(error, (space_id, key))
            raise
        self._answered(volume)
        self._counts["loads"] += 1
        self._counts["loaded_bytes"] += len(into)
        return checksum

    def give_up(self, volume: Volume, names: Collection[tuple[int, bytes]]) -> None:
        """Drops those of `names` that could not be read: they are about to be written anew."""
        for name in [name for name in names if name in self._hidden]:
            self._hidden.pop(name, None)
            volume.discard(*name)

    def begin_anew(self) -> None:
        """Another folder was opened: nothing of it is known to be bad."""
        self._hidden.clear()

    def _answered(self, volume: Volume) -> None:
        """A read went well: what failed before was the blocks' own fault."""
        if self.path.succeeded():
            log.info("disk tier: reading goes on")
        while self._hidden:
            with contextlib.suppress(KeyError):  # another thread's read went well, too
                name, _ = self._hidden.popitem()
                volume.discard(*name)

    def _note_corrupt(self, error: BlockCorrupt) -> None:
        self._counts["corrupt_dropped"] += 1
        now_ns = self._clock.monotonic_ns()
        self.corrupt_ns = [*self.corrupt_ns[1 - CORRUPT_KEPT :], now_ns]
        log.warning("disk tier: a record was dropped: %s", error.detail)

    def _note_error(self, error: OSError, name: tuple[int, bytes]) -> None:
        trouble = classify(error, None)
        self._counts[f"read_errors kind={trouble.name.lower()}"] += 1
        if trouble is Trouble.IO:
            self._hidden[name] = None
        if not self.path.stopped:  # else it was sent before that, and tells nothing new
            self._failed(error)

    # ------------------------------------------------------------------ device

    def tend(self, volume: Volume) -> None:
        """Tries a device that failed, when it is time."""
        if not self.path.due(self._clock.monotonic_ns()) or not self._trying.acquire(False):
            return
        if self._parallel:
            args = (volume,)
            threading.Thread(
                target=self._try, args=args, name="kvstore-disk-try", daemon=True
            ).start()
        else:
            self._try(volume)

    def _try(self, volume: Volume) -> None:
        try:
            error: OSError | None = None
            for _ in range(TRIES):
                error = self._try_page(volume, next(self._tries))
                if error is None:
                    break
        finally:
            self._trying.release()
        if error is not None:
            self._failed(error)
            return
        # Those of the time when everything failed get another chance.
        self._hidden.clear()
        if self.path.succeeded():
            log.info("disk tier: reading goes on")

    def _try_page(self, volume: Volume, number: int) -> OSError | None:
        with volume.books:
            segments = list(volume.segments.values())
        if not segments:
            return None
        segment = segments[number % len(segments)]
        slot = number * _STRIDE % segment.slots
        try:
            with self._on_the_device():
                page = aligned_bytes(PAGE_BYTES)
                volume.files.preadv(segment.segment, slot * segment.slot_bytes, [page])
        except Truncated:
            return None  # the device answers; the block's reader finds out
        except OSError as error:
            return error
        return None

    def _failed(self, error: OSError) -> None:
        trouble = classify(error, None)
        why = f"{trouble.value}: {error.strerror}"
        if self.path.failed(why, self._clock.monotonic_ns()):
            log.warning("disk tier: reading is stopped, and tried again: %s", error)

    @contextlib.contextmanager
    def _on_the_device(self) -> Iterator[None]:
        thread = threading.get_ident()
        self.hanging.begin(thread, self._clock.monotonic_ns())
        try:
            yield
        finally:
            self.hanging.end(thread)
