"""Changes an opened folder, in the order that keeps every committed block readable.

Promises. At any moment a crash leaves what was committed and not what was not:
    1. rows of slots that are to be written again are removed by an earlier commit
    2. a new segment's file is there before the index names it
    3. records are written, then fdatasync
    4. one commit brings their rows, and removes those of the next victims
    5. only then blocks are known, slots free, and files of retired segments removed
A commit that failed leaves its slots in doubt: they are not written again before another one has
removed what it may have brought. After a failed fdatasync what it covered is lost.

Everything here may wait for the device. One thread at a time, which the tier sees to.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore.model.reasons import NoSpace, Reason
from kvstore.tiers.base import SavedBlock
from kvstore.tiers.disk.catalog import NO_ROW
from kvstore.tiers.disk.files import Trouble, classify
from kvstore.tiers.disk.format import (
    KEY_BYTES,
    RecordHeader,
    Row,
    Segment,
    encode_into,
    payload_checksum,
    record_bytes,
)
from kvstore.tiers.disk.opening import Folder
from kvstore.tiers.disk.pages import RecordBuffers, ScratchPages
from kvstore.tiers.disk.ring import NO_SEGMENT, Placement, Slot
from kvstore.tiers.disk.rows import IndexRow
from kvstore.tiers.disk.volume import SWEEP_ROWS, Debts, SpaceInfo, Volume

log = logging.getLogger(__name__)

ROUNDS_MAX = 6
"""Of making room for one batch: segments that cannot be made, victims to be removed first."""
BAD_SLOTS_MAX = 1_024
NO_PARENT = bytes(KEY_BYTES)
GONE = "gone-"
"""Prefix of named values: spaces that were dropped while they had rows."""


@dataclass
class Outgoing:
    """A block on its way to the device. row: of its record, once it is written and synced; error:
    why it is not.
    """

    block: SavedBlock
    space: SpaceInfo
    slot: Slot | None = None
    row: IndexRow | None = None
    error: OSError | NoSpace | None = None


class Writer:
    """See the module's docstring."""

    def __init__(
        self,
        volume: Volume,
        folder: Folder,
        *,
        generation: Callable[[], int],
        on_dropped: Callable[[Sequence[tuple[int, bytes]], int], None],
        executor: Executor | None = None,
        executor_threads: int = 0,
    ) -> None:
        """generation: a number that no write in this folder had before. on_dropped: gets the names
        of blocks that made room, and the generation of the last one. executor: threads that write
        beside the caller's, so many.
        """
        self._volume = volume
        self._folder = folder
        self._generation = generation
        self._on_dropped = on_dropped
        self._executor = executor
        self._executor_threads = executor_threads
        self._scratch = ScratchPages()
        self._unlinks: list[int] = []
        self._bad_slots = 0

    # ------------------------------------------------------------------ blocks

    def write(self, outgoing: Sequence[Outgoing], meta: Mapping[str, bytes | None]) -> bool:
        """Writes blocks of one size and tenant, of different names that are not known. Each has a
        row and is known then, or has an error. meta: named values to commit with them. True: it is
        time to `stock`.
        """
        written: list[Outgoing] = []
        try:
            if self._volume.debts.first:
                self.settle()
            self._place(outgoing)
            placed = [one for one in outgoing if one.slot is not None]
            self._each(placed)
            written = self._sync(placed)
            if written:
                with self._volume.books:
                    self._volume.debts.meta.update(meta)
                self.settle([one.row for one in written if one.row is not None])
                self._publish(written)
        except OSError as error:
            for one in outgoing:
                one.row, one.error = None, one.error or error
        with self._volume.books:
            return bool(written) and self._volume.ring.is_short()

    def _place(self, outgoing: Sequence[Outgoing]) -> None:
        """Gives each a slot of a segment that is there, or an error."""
        volume = self._volume
        tenant = outgoing[0].space.tenant_digest
        size = record_bytes(len(outgoing[0].block.data))
        left = list(outgoing)
        error: OSError | None = None
        for _ in range(ROUNDS_MAX):
            placement = self._take_out(partial(volume.ring.place, tenant, size, len(left)))
            failed = self._make_segments(placement.new_segments)
            with volume.books:
                slots = [slot for slot in placement.slots if slot.segment in volume.segments]
            for one, slot in zip(left, slots, strict=False):
                one.slot = slot
            left = left[len(slots) :]
            error = failed or error
            more = placement.victims or placement.retired_segments or placement.drop_aside
            full = failed is not None and self.trouble(failed) is Trouble.FULL
            if full:
                self.fit()
            if not left or not (more or full) or (failed is not None and not full):
                break
            self.settle()
        for one in left:
            one.error = error or NoSpace(Reason.NO_SPACE, "no slot is free", "disk.capacity_bytes")

    def _take_out(self, choose: Callable[[], Placement]) -> Placement:
        """What is chosen to make room is known no longer, at once: whoever looked it up in between
        would read a slot that is nobody's.
        """
        volume = self._volume
        with volume.books:
            volume.tell_touches()
            placement = choose()
            rows = [victim.row for victim in placement.victims]
            names = volume.catalog.names(rows)
            last = volume.catalog.entries(rows[-1:])
            volume.catalog.remove(rows)
            volume.debts.victims += placement.victims
            volume.debts.retired += [one.segment for one in placement.retired_segments]
        if names:
            self._on_dropped(names, last[0].generation)
        if placement.drop_aside:
            self._drop_aside()
        return placement

    def _drop_aside(self) -> None:
        """What cannot be removed stops nobody: its room is taken."""
        try:
            self._folder.drop_aside()
        except OSError as error:
            log.warning("disk tier: what was set aside cannot be removed: %s", error)
        self.count_aside()
        with self._volume.books:
            self._volume.ring.aside_stays = self._volume.ring.aside_bytes > 0

    def count_aside(self) -> None:
        """Of what was set aside some may have been removed."""
        aside_bytes = self._folder.aside_bytes()
        with self._volume.books:
            self._volume.ring.aside_bytes = aside_bytes

    def _make_segments(self, segments: Sequence[Segment]) -> OSError | None:
        """Makes the files of new segments. The first error: those after it are not made."""
        volume = self._volume
        failed: OSError | None = None
        for segment in segments:
            if failed is None:
                try:
                    volume.files.create(segment.segment, segment.file_bytes)
                except OSError as error:
                    failed = error
            with volume.books:
                if failed is None:
                    volume.segments[segment.segment] = segment
                    volume.debts.made.append(segment)
                else:
                    volume.ring.unlinked(segment.segment)
        return failed

    def _each(self, placed: Sequence[Outgoing]) -> None:
        """Whoever waits for the device lets another thread hash. All have ended when it returns."""
        left = deque(placed)

        def work() -> None:
            while left:
                try:
                    one = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                self._write_one(one)

        others: list[Future[None]] = []
        try:
            if self._executor is not None:
                for _ in range(min(self._executor_threads, len(placed) - 1)):
                    others.append(self._executor.submit(work))
            work()
        finally:
            left.clear()
            wait(others)
        for other in others:
            other.result()

    def _write_one(self, one: Outgoing) -> None:
        block, slot = one.block, one.slot
        assert slot is not None, "only what has a slot is written"
        checksum = payload_checksum(block.data)
        generation, length = self._generation(), len(block.data)
        header = RecordHeader(
            one.space.tenant_digest,
            one.space.fingerprint_digest,
            block.space_id,
            block.key,
            block.parent,
            block.depth,
            generation,
            length,
            checksum,
        )
        scratch = self._scratch
        encode_into(header, scratch.header)
        record = RecordBuffers(scratch.header, block.data, scratch.tail).fill()
        offset = slot.slot * record_bytes(length)
        try:
            self._volume.files.pwritev(slot.segment, offset, record.buffers)
        except OSError as error:
            one.error = error
            return
        row = Row(slot.segment, slot.slot, generation, length, checksum, block.parent, block.depth)
        one.row = IndexRow(block.space_id, block.key, row)

    def _sync(self, placed: Sequence[Outgoing]) -> list[Outgoing]:
        """Those that are on the device. The slots of others are free again, unless the device does
        not take bytes there.
        """
        written = [one for one in placed if one.error is None]
        segments = sorted({one.slot.segment for one in written if one.slot is not None})
        beside = self._executor is not None and len(segments) > 1
        each = self._executor.map if self._executor is not None and beside else map
        failures = dict(zip(segments, each(self._fdatasync, segments), strict=True))
        errors = {segment: error for segment, error in failures.items() if error is not None}
        free: list[Slot] = []
        for one in placed:
            assert one.slot is not None
            refused = one.error
            if refused is None and one.slot.segment in errors:
                one.row, one.error = None, errors[one.slot.segment]
            if one.error is None:
                continue
            # Where a device does not take bytes while it takes others, nothing is written again.
            bad = isinstance(refused, OSError) and bool(written)
            if bad and self._bad_slots < BAD_SLOTS_MAX:
                self._bad_slots += 1
            else:
                free.append(one.slot)
        with self._volume.books:
            self._volume.ring.abandon(free)
        return [one for one in placed if one.error is None]

    def _fdatasync(self, segment: int) -> OSError | None:
        try:
            self._volume.files.fdatasync(segment)
        except OSError as error:
            return error
        return None

    def _publish(self, written: Sequence[Outgoing]) -> None:
        volume = self._volume
        rows = [one.row for one in written if one.row is not None]
        parents = [row.row.parent or NO_PARENT for row in rows]
        space_ids = np.array([row.space_id for row in rows], np.uint64)
        packed = np.frombuffer(b"".join(parents), np.uint8).reshape(-1, KEY_BYTES)
        depths = np.array([row.row.depth for row in rows], np.int64)
        above = np.full((len(rows), 2), NO_SEGMENT, np.uint32)
        with volume.books:
            numbers = np.array(volume.catalog.put_many(rows), np.int64)
            found = volume.catalog.find_batch(space_ids, packed)
            there = found != NO_ROW
            above[there] = np.stack(volume.catalog.places(found[there]), axis=1)
            volume.ring.settle([Slot(*row.place) for row in rows], numbers, depths, above)

    # ------------------------------------------------------------------ commits

    def settle(self, rows: Sequence[IndexRow] = ()) -> None:
        """Commits rows, and what is owed. OSError: the debts stay, the rows' slots are in doubt."""
        volume = self._volume
        with volume.books:
            debts, volume.debts = volume.debts, Debts()
        if rows or debts or debts.first:
            try:
                self._commit(rows, debts)
            except OSError:
                with volume.books:
                    debts.doubtful += [Slot(row.row.segment, row.row.slot) for row in rows]
                    volume.debts.add(debts)
                raise
        self._unlink()

    def _commit(self, rows: Sequence[IndexRow], debts: Debts) -> None:
        volume = self._volume
        retired = set(debts.retired)
        victims = [victim for victim in debts.victims if victim.segment not in retired]
        doubtful = [slot for slot in debts.doubtful if slot.segment not in retired]
        volume.index.commit(
            remove=[
                *((victim.segment, victim.slot) for victim in victims),
                *((slot.segment, slot.slot) for slot in doubtful),
                *(place for place in debts.places if place[0] not in retired),
            ],
            add=rows,
            remove_segments=debts.retired,
            add_segments=[one for one in debts.made if one.segment not in retired],
            meta=debts.meta,
        )
        with volume.books:
            volume.ring.release(victims)
            volume.ring.abandon(doubtful)
        self._unlinks += debts.retired

    def _unlink(self) -> None:
        """Removes the files of retired segments; what the device refuses is tried again."""
        volume = self._volume
        unlinks, self._unlinks = self._unlinks, []
        for segment in unlinks:
            try:
                volume.files.unlink(segment)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.debug("segment %d is not removed yet: %s", segment, error)
                self._unlinks.append(segment)
                continue
            with volume.books:
                if volume.segments.pop(segment, None) is not None:
                    volume.ring.unlinked(segment)

    # ------------------------------------------------------------------ removals

    def forget(self, names: Sequence[tuple[int, bytes]]) -> None:
        """Names are known no longer, at once and, when it returns, for good. OSError: the latter
        not yet.
        """
        volume = self._volume
        for space_id, key in names:
            if key:
                volume.discard(space_id, key)
                continue
            with volume.books:
                volume.catalog.drop_space(space_id)
                if volume.catalog.space_blocks(space_id):
                    volume.debts.meta[f"{GONE}{space_id}"] = b""
        self.settle()

    def sweep(self) -> bool:
        """Removes some rows of dropped spaces; True if there are more. OSError."""
        volume = self._volume
        with volume.books:
            if volume.catalog.swept:
                return False
            rows = volume.catalog.sweep(SWEEP_ROWS)
            segments, numbers = volume.catalog.places(rows)
            slots = [Slot(*slot) for slot in zip(segments.tolist(), numbers.tolist(), strict=True)]
            volume.debts.victims += volume.ring.evict(slots)
            gone = {space_id for space_id, _ in volume.catalog.names(rows)}
            volume.catalog.remove(rows)
            for space_id in gone:
                if not volume.catalog.space_blocks(space_id):
                    volume.debts.meta[f"{GONE}{space_id}"] = None
        self.settle()
        return True

    def remove_orphans(self) -> None:
        """Removes files that the index does not name: a crash came before their commit."""
        orphans, self._volume.orphans = self._volume.orphans, []
        self._unlinks += orphans
        self._unlink()

    # ------------------------------------------------------------------ capacity

    def fit(self) -> None:
        """The file system has no room: gets along with what is there."""
        with self._volume.books:
            ring = self._volume.ring
            usage = ring.usage()
            used = usage.segment_bytes + usage.index_bytes + usage.aside_bytes
            ring.capacity_bytes = min(ring.capacity_bytes, used)

    def stock(self) -> None:
        """Makes the segments that the next batches will need, so that none waits for them. What
        fails is no trouble yet: it is tried again when it is needed.
        """
        while True:
            with self._volume.books:
                segments = self._volume.ring.stock()
            if not segments:
                return
            if failed := self._make_segments(segments):
                log.debug("no segment is made ahead: %s", failed)
                return

    def reclaim(self, *, unlink_first: bool = False) -> None:
        """Retires segments until all fits into the capacity. OSError.

        unlink_first: on a full file system a commit may need the room that the files have. What
        the index names then is known no longer, and after a crash is a segment without a file.
        """
        volume = self._volume
        placement = self._take_out(volume.ring.reclaim)
        if unlink_first:
            self._unlinks += [segment.segment for segment in placement.retired_segments]
            self._unlink()
        if placement.retired_segments:
            self.settle()

    def trouble(self, error: OSError) -> Trouble:
        """What the error of a write means."""
        try:
            file_system = self._volume.files.statvfs()
        except OSError:
            file_system = None
        return classify(error, file_system)
