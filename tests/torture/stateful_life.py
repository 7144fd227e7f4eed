"""The lives of a daemon in one thread (`small_daemon`), as Hypothesis chooses them.

Puts, reads, leases, operator's commands, faults, copies and devices that lag, and ends of all
kinds. After every step the core's and the ring's invariants hold, memory and files are what the
books say, and every byte that is leased is right. Each life ends with the faults taken away: then
everything works.
"""

from __future__ import annotations

import errno
import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvstore.core.leases import WriteLease, WriteState
from kvstore.core.states import SlotState
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.layout import layout_of
from kvstore.model.reasons import KVStoreError, Reason
from kvstore.model.values import LeaseMode, Place, SpaceRow
from kvstore.store import Leased, Session
from kvstore.testing.clock import ManualClock
from kvstore.testing.files import Injection, Op
from kvstore.testing.folder import MemoryFolder
from kvstore.testing.payload import check, payload, tag_of
from kvstore.testing.workload import PROMPT_BLOCKS, fingerprint, prompt_keys
from kvstore.tiers.base import Bytes
from kvstore.tiers.disk.dictindex import CommitFault
from kvstore.tiers.disk.format import record_bytes
from kvstore.tiers.disk.rows import index_bytes
from tests.torture.small_daemon import DISK, TENANTS, CutLedger, SmallDaemon
from tests.torture.truth import Dropped, Name, Truth, Written
from tests.unit.store.virtual import StepPool

MS, SECOND = 10**6, 10**9
KIB = 1 << 10
MODELS = ("model", "other")
HOST_BYTES = (128 * KIB, 256 * KIB, 768 * KIB)
DISK_RECORDS = (14, 30, 90)
WRITE_ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS)
TRANSFERS = (Op.PREADV, Op.PWRITEV, Op.FDATASYNC, Op.CREATE, Op.UNLINK, Op.STATVFS)

READ_NS, WRITE_NS = 2 * SECOND, 20 * SECOND

small = st.integers(0, 1 << 16)
clients = st.integers(0, 7)
prompts = st.integers(0, 2)


class Wrong(AssertionError):
    """Bytes that were not what was promised."""


@dataclass(frozen=True)
class Owner:
    """Whose blocks they are: the same keys have other bytes for each."""

    tenant: str
    model: str
    epoch: int

    @property
    def fingerprint(self) -> Fingerprint:
        tokens = 16 if self.model == "model" else 48
        return fingerprint(model=self.model, epoch=self.epoch, block_tokens=tokens)


@dataclass
class Engine:
    """A client of one owner."""

    owner: Owner
    session: Session
    space: int
    mapped: set[int] = field(default_factory=set)


@dataclass
class Reading:
    """A lease that is held, and what was read under it."""

    engine: Engine
    leased: Leased
    seen: dict[int, bytes]
    until_ns: int


class Life(RuleBasedStateMachine):
    """See the module's docstring."""

    counts: ClassVar[Counter[str]] = Counter()
    played: ClassVar[Sequence[Callable[[], None]]] = ()
    """Called after each example."""

    def __init__(self) -> None:
        super().__init__()
        self.truth = Truth()
        self.clock = ManualClock()
        self.chance = random.Random(0)
        self.host_bytes = self.disk_bytes = 0
        self.engines: dict[tuple[Owner, int], Engine] = {}
        self.owners: dict[int, Owner] = {}
        self.readings: list[Reading] = []
        self.pins: list[tuple[int, Engine, set[bytes]]] = []
        self.asked: set[Name] = set()
        self.known: list[tuple[int, int]] = []
        self.given_up: dict[int, int] = {}
        self.faulty = False
        self.floors: dict[str, list[tuple[int, int]]] = {model: [] for model in MODELS}
        self.floor_possible = dict.fromkeys(MODELS, 0)
        self.seen: Counter[str] = Counter()

    @initialize(number=small, host=st.sampled_from(HOST_BYTES), disk=st.sampled_from(DISK_RECORDS))
    def begin(self, number: int, host: int, disk: int) -> None:
        self.counts["examples"] += 1
        self.chance = random.Random(number)
        self.host_bytes, self.disk_bytes = host, room(disk)
        self._start(MemoryFolder(), CutLedger())

    # ------------------------------------------------------------------ clients

    def _engine(self, who: int) -> Engine:
        tenant, model = TENANTS[who % 2], MODELS[who // 2 % 2]
        owner = Owner(tenant, model, self.daemon.core.epoch_floors().get(model, 0))
        number = who // 4 % 2
        engine = self.engines.get((owner, number))
        if engine is None:
            session = self.daemon.store.attach(tenant, b"group %d" % number, "engine", "torture")
            engine = self.engines[owner, number] = Engine(owner, session, 0)
        if isinstance(self.daemon.core.space_of(engine.session.id, engine.space), Reason):
            engine.space = self.daemon.run(self._open(engine))
        return engine

    async def _open(self, engine: Engine) -> int:
        opening = self.daemon.store.open(engine.session, engine.owner.fingerprint)
        assert opening.space_id, f"{engine.owner} is refused: {opening}"
        self.owners[opening.space_id] = engine.owner
        return opening.space_id

    def _names(self, engine: Engine, keys: Sequence[bytes]) -> list[Name]:
        return [(engine.owner, key) for key in keys]

    def _do(self, work: Coroutine[Any, Any, None], lag: bool) -> None:
        if lag:
            self.daemon.begin(work)
        else:
            self.daemon.run(work)

    @rule(
        who=clients,
        prompt=prompts,
        blocks=st.integers(1, PROMPT_BLOCKS),
        durable=st.booleans(),
        lag=st.booleans(),
    )
    def put(self, who: int, prompt: int, blocks: int, durable: bool, lag: bool) -> None:
        if (who, prompt) not in self.known:
            self.known.append((who, prompt))
        work = self._put(self._engine(who), prompt_keys(prompt, blocks), durable)
        self._do(work, lag)

    async def _put(self, engine: Engine, keys: list[bytes], durable: bool) -> None:
        """Window by window, as far as there is room."""
        first = 0
        while first < len(keys):
            reserved = self._reserve(engine, keys, first)
            if reserved is None:
                return
            lease_id, writes = reserved
            for index, written in writes.items():
                written.begun = self.folder.stamp()
                first = index + 1
            try:
                result = await self.daemon.store.commit(
                    engine.session, lease_id, durable=durable, wait_ns=SECOND
                )
            except KVStoreError as error:
                if error.reason is Reason.LEASE_EXPIRED:
                    for written in writes.values():
                        written.begun = None
                return
            self.counts["blocks put"] += result.visible
            if result.visible < len(writes):
                return
            if durable and result.reason is Reason.OK:
                self.counts["blocks durable"] += len(writes)
                for index, written in writes.items():
                    block = self.truth.block((engine.owner, keys[index]))
                    block.durable = (self.folder.stamp(), written.reserved)

    def _reserve(
        self, engine: Engine, keys: list[bytes], first: int
    ) -> tuple[int, dict[int, Written]] | None:
        """Reserves and fills; the lease, and what is written by index."""
        version, moment = self.truth.new_version(), self.folder.stamp()
        reserved = self.daemon.store.reserve(
            engine.session,
            engine.space,
            keys,
            first=first,
            part=0,
            attempt=version,
            ttl_ns=WRITE_NS,
        )
        if not reserved.lease_id:
            self.counts[f"refused {reserved.reason.name}"] += 1
            return None
        writes = {}
        for index, offset in zip(reserved.wanted, reserved.offsets, strict=True):
            writes[index] = Written(version, moment)
            self.truth.block((engine.owner, keys[index])).writes.append(writes[index])
            data = content(engine.owner, keys[index], version)
            view = self.daemon.store.staging_view(reserved.staging_region, offset, len(data))
            view[:] = data
        return reserved.lease_id, writes

    @rule(
        who=clients,
        prompt=prompts,
        blocks=st.integers(1, PROMPT_BLOCKS),
        load=st.booleans(),
        hold=st.booleans(),
        view=st.booleans(),
        lag=st.booleans(),
    )
    def get(
        self, who: int, prompt: int, blocks: int, load: bool, hold: bool, view: bool, lag: bool
    ) -> None:
        keys = prompt_keys(prompt, blocks)
        work = self._get(self._engine(who), keys, load, hold and len(self.readings) < 6, view)
        self._do(work, lag)

    async def _get(
        self, engine: Engine, keys: list[bytes], load: bool, hold: bool, view: bool
    ) -> None:
        if load:
            self.asked.update(self._names(engine, keys))
        leased = await self.daemon.store.acquire(
            engine.session,
            engine.space,
            keys,
            mode=LeaseMode.VIEW if view else LeaseMode.COPY,
            ttl_ns=None if view else READ_NS,
            wait_ns=0,
            load_ns=SECOND if load else 0,
        )
        for region in leased.regions:
            if region.id not in engine.mapped:
                engine.mapped.add(region.id)
                self.daemon.store.holder_added(region.id)
        seen: dict[int, bytes] = {}
        for index, place in enumerate(leased.places):
            if place is not None:
                data = self._read(engine.owner, place)
                self._check_block(engine.owner, keys[index], data)
                seen[index] = data.tobytes()
        self.counts["blocks got"] += len(seen)
        if hold and leased.lease_id:
            until_ns = NEVER if view else self.clock.monotonic_ns() + READ_NS
            self.readings.append(Reading(engine, leased, seen, until_ns))
        elif leased.lease_id:
            self.daemon.store.release(engine.session, [leased.lease_id])

    @rule(
        who=clients,
        prompt=prompts,
        blocks=st.integers(1, PROMPT_BLOCKS),
        durable=st.booleans(),
        lag=st.booleans(),
    )
    def put_more(self, **chosen: Any) -> None:
        self.put(**chosen)

    @rule(which=small, blocks=st.integers(1, PROMPT_BLOCKS), lag=st.booleans(), hold=st.booleans())
    def get_known(self, which: int, blocks: int, lag: bool, hold: bool) -> None:
        """Reads what was put before, from whatever tier."""
        if self.known:
            who, prompt = self.known[which % len(self.known)]
            self.get(who, prompt, blocks, load=True, hold=hold, view=False, lag=lag)

    @rule(who=clients, prompt=prompts, blocks=st.integers(1, PROMPT_BLOCKS))
    def look_up(self, who: int, prompt: int, blocks: int) -> None:
        engine, keys = self._engine(who), prompt_keys(prompt, blocks)
        self.daemon.run(self._look_up(engine, keys))

    async def _look_up(self, engine: Engine, keys: list[bytes]) -> None:
        """A look-up says of each block which tier has it."""
        space = self.daemon.core.books.spaces.get(engine.space)
        assert space is not None
        codes = await self.daemon.store.lookup(engine.session, engine.space, keys)
        below = await self.daemon.disk.find(engine.space, keys)
        for key, code in zip(keys, codes, strict=True):
            slot = space.index.get(key)
            right = slot.code if slot is not None else (1 + DISK if key in below else 0)
            assert code == right, f"a look-up says {code}, the books {right}"

    @rule(who=clients, prompt=prompts, late=st.booleans())
    def abort(self, who: int, prompt: int, late: bool) -> None:
        """A reservation is given up; its client may go on writing for a while."""
        engine, keys = self._engine(who), prompt_keys(prompt)
        self.daemon.run(self._abort(engine, keys, late))

    async def _abort(self, engine: Engine, keys: list[bytes], late: bool) -> None:
        reserved = self._reserve(engine, keys, 0)
        if reserved is None:
            return
        lease_id, writes = reserved
        if late:
            self.given_up[lease_id] = self.clock.monotonic_ns() + WRITE_NS
            return
        released, _ = self.daemon.store.release(engine.session, [lease_id])
        assert released == 1, "a reservation is given up"
        names = [keys[index] for index in writes]
        codes = self.daemon.core.lookup(engine.session.id, engine.space, names)
        assert not any(codes), f"what was given up is still there: {codes!r}"

    @rule(which=small)
    def release(self, which: int) -> None:
        if self.readings:
            reading = self.readings.pop(which % len(self.readings))
            self.daemon.run(self._release(reading))

    async def _release(self, reading: Reading) -> None:
        self.daemon.store.release(reading.engine.session, [reading.leased.lease_id])

    @rule(which=small)
    def die(self, which: int) -> None:
        """A client's process is gone, and all that it had mapped."""
        if self.engines:
            name = sorted(self.engines, key=str)[which % len(self.engines)]
            engine = self.engines.pop(name)
            self.daemon.run(self._end_session(engine))
            self.readings = [one for one in self.readings if one.engine is not engine]
            self.daemon.settle()

    async def _end_session(self, engine: Engine) -> None:
        self.daemon.store.end_session(engine.session.id)
        for region_id in engine.mapped:
            self.daemon.store.holder_gone(region_id)

    @rule()
    def unmap(self) -> None:
        """Clients let go of what the daemon has closed."""
        self.daemon.run(self._unmap())

    async def _unmap(self) -> None:
        closed, self.daemon.to_unmap[:] = list(self.daemon.to_unmap), []
        for region_id in closed:
            for engine in self.engines.values():
                if region_id in engine.mapped:
                    engine.mapped.remove(region_id)
                    self.daemon.store.holder_gone(region_id)

    # ------------------------------------------------------------------ the operator

    @rule(
        who=clients,
        prompt=prompts,
        first=st.integers(0, PROMPT_BLOCKS - 1),
        whole=st.integers(0, 5),
        lag=st.booleans(),
    )
    def invalidate(self, who: int, prompt: int, first: int, whole: int, lag: bool) -> None:
        """Some keys; now and then the whole space."""
        engine = self._engine(who)
        keys = None if whole == 0 else prompt_keys(prompt)[first:]
        self._do(self._invalidate(engine, keys), lag)

    async def _invalidate(self, engine: Engine, keys: list[bytes] | None) -> None:
        store, core, now_ns = self.daemon.store, self.daemon.core, self.clock.monotonic_ns()
        names = list(self.truth.of(engine.owner)) if keys is None else self._names(engine, keys)
        drops = self._drop(names)
        dropped = core.invalidate(space_id=engine.space, keys=keys, now_ns=now_ns)
        durable = await store.durable(dropped.ticket, SECOND)
        store.run_effects()
        if not (dropped.ticket and durable):
            durable = await store.archives.until_forgotten(SECOND)
        if durable:
            self.counts["drops acknowledged"] += 1
            for drop in drops:
                drop.acked = self.folder.stamp()
            if keys is not None and not self.daemon.tasks:
                codes = await store.lookup(engine.session, engine.space, keys)
                assert not any(codes), f"dropped keys are found: {codes!r}"

    def _drop(self, names: Sequence[Name]) -> list[Dropped]:
        gone = set(names)
        for _, engine, keys in self.pins:
            keys -= {key for key in keys if (engine.owner, key) in gone}
        return self.truth.drop(names, self.folder.stamp())

    @rule(model=st.sampled_from(MODELS), lag=st.booleans(), really=st.integers(0, 2))
    def raise_epoch(self, model: str, lag: bool, really: int) -> None:
        if not really:
            self._do(self._raise_epoch(model), lag)

    async def _raise_epoch(self, model: str) -> None:
        core = self.daemon.core
        epoch = core.epoch_floors().get(model, 0) + 1
        old = [owner for owner in set(self.owners.values()) if owner.model == model]
        drops = self._drop([name for owner in old for name in self.truth.of(owner)])
        self.floor_possible[model] = epoch
        done = core.set_epoch(model, epoch, "torture", self.clock.monotonic_ns())
        assert done.epoch == epoch
        if await self.daemon.store.durable(done.ticket, SECOND):
            moment = self.folder.stamp()
            self.floors[model].append((moment, epoch))
            for drop in drops:
                drop.acked = moment
        for owner in old:
            self._check_stale(owner)

    def _check_stale(self, owner: Owner) -> None:
        offer = self.daemon.core.explain_offer(owner.tenant, b"group", owner.fingerprint)
        if owner.epoch < self.daemon.core.epoch_floors().get(owner.model, 0):
            assert offer.reason is not Reason.OK, f"{owner} is below the floor: {offer}"

    @rule(who=clients, prompt=prompts, blocks=st.integers(1, 3))
    def pin(self, who: int, prompt: int, blocks: int) -> None:
        engine, keys = self._engine(who), prompt_keys(prompt, blocks)
        if len(self.pins) < 2:
            now_ns = self.clock.monotonic_ns()
            pinned = self.daemon.core.pin(engine.space, keys, now_ns, engine.owner.tenant)
            if pinned.pin_id:
                self.pins.append((pinned.pin_id, engine, set(keys[: pinned.pinned])))
            self.daemon.settle()

    @rule()
    def unpin(self) -> None:
        if self.pins:
            pin_id, _, _ = self.pins.pop(0)
            assert self.daemon.core.unpin(pin_id, self.clock.monotonic_ns()), "a pin is known"
            self.daemon.settle()

    # ------------------------------------------------------------------ the world

    @rule(elapsed_ns=st.sampled_from((MS, 60 * MS, 700 * MS, 3 * SECOND, 25 * SECOND)))
    def pass_time(self, elapsed_ns: int) -> None:
        self.daemon.pass_time(elapsed_ns)
        now_ns, leases = self.clock.monotonic_ns(), self.daemon.core.books.leases
        for reading in self.readings:
            over = reading.until_ns <= now_ns
            assert not (over and leases.get(reading.leased.lease_id)), "a read lease ends in time"
        for lease_id, until_ns in self.given_up.items():
            lease = leases.get(lease_id)
            if until_ns <= now_ns and isinstance(lease, WriteLease):
                assert lease.state is not WriteState.RESERVED, "a reservation ends in time"

    @rule(what=st.sampled_from(("copying", "device", "rows")))
    def hold(self, what: str) -> None:
        """Copies, the device, or durable rows make no progress until they are let go."""
        pool: StepPool = getattr(self.daemon, what)
        pool.held = True

    @rule()
    def let_go(self) -> None:
        self.daemon.let_go()

    @rule(
        op=st.sampled_from(TRANSFERS),
        nth=st.integers(1, 6),
        times=st.sampled_from((1, 1, 3, 1000)),
        error=st.sampled_from(WRITE_ERRORS),
    )
    def fail_transfers(self, op: Op, nth: int, times: int, error: int) -> None:
        self.faulty = True
        self.folder.files.inject(Injection(op, nth, times=times, error=error, moved_bytes=512))

    @rule(nth=st.integers(1, 4), holds=st.booleans(), error=st.sampled_from(WRITE_ERRORS))
    def fail_commit(self, nth: int, holds: bool, error: int) -> None:
        self.faulty = True
        index = self.folder.index
        index.faults[index.attempts + nth] = CommitFault(OSError(error, "broken"), holds)

    @rule(what=st.sampled_from(("read-only", "full", "gone", "ledger", "damage")))
    def break_folder(self, what: str) -> None:
        self.faulty = True
        files = self.folder.files
        if what == "read-only":
            files.read_only = True
        elif what == "full":
            files.others_bytes = files.capacity_bytes
        elif what == "gone":
            files.gone = True
            self._lose_all()
        elif what == "ledger":
            self.daemon.ledger.broken = True
        else:
            self._damage()

    def _damage(self) -> None:
        """Some bytes of some segment are not what was written."""
        self._lose_all()
        sizes = {n: len(d) for n, d in self.folder.files._files.items() if d}
        if sizes:
            segment = self.chance.choice(sorted(sizes))
            data = self.folder.files.content(segment)
            at = self.chance.randrange(0, sizes[segment], 64)
            data[at : at + 64] = self.chance.randbytes(64)

    def _lose_all(self) -> None:
        self.truth.lose(list(self.truth.blocks), self.folder.stamp())

    @rule()
    def heal(self) -> None:
        files = self.folder.files
        files.heal()
        files.others_bytes = 0
        self.folder.index.faults.clear()
        self.daemon.ledger.broken = False

    # ------------------------------------------------------------------ ends

    @rule(host=st.sampled_from(HOST_BYTES), disk=st.sampled_from(DISK_RECORDS))
    def restart(self, host: int, disk: int) -> None:
        """SIGTERM and a new start, perhaps with other capacities."""
        self.daemon.let_go()
        self._note_drops()
        ready = self._ready() if not self.faulty and not self.daemon.device.held else set()
        drops = len(self.daemon.dropped)
        folder, ledger = self.daemon.stop()
        self._note_drops()
        if len(self.daemon.dropped) > drops or room(disk) < self.disk_bytes:
            ready.clear()  # there was not room for all of it
        self._end(NEVER)
        self.host_bytes, self.disk_bytes = host, room(disk)
        self._start(folder, ledger)
        self.counts["clean restarts"] += 1
        missing = [name for name in ready if not self._on_disk([name])]
        assert not missing, f"{len(missing)} of {len(ready)} blocks were not saved at the end"

    @rule(power=st.booleans(), host=st.sampled_from(HOST_BYTES), disk=st.sampled_from(DISK_RECORDS))
    def crash(self, power: bool, host: int, disk: int) -> None:
        """kill -9 or a power cut, and a new start."""
        self._note_drops()
        folder, ledger, moment = self.daemon.crash(self.chance, power=power)
        self._end(moment)
        self.host_bytes, self.disk_bytes = host, room(disk)
        self._start(folder, ledger)
        self.counts["power cuts" if power else "kills"] += 1

    def _end(self, moment: int) -> None:
        self.truth.crashed(moment)
        for floors in self.floors.values():
            certain = max((epoch for at, epoch in floors if at <= moment), default=0)
            floors[:] = [(0, certain)]
        self.engines, self.readings, self.pins = {}, [], []
        self.asked.clear()
        self.given_up.clear()
        self.seen.clear()

    def _start(self, folder: MemoryFolder, ledger: CutLedger) -> None:
        """A new daemon; what must be there is there."""
        self.folder = folder
        self.faulty = folder.files.others_bytes > 0
        self.daemon = SmallDaemon(
            folder, ledger, self.clock, host_bytes=self.host_bytes, disk_bytes=self.disk_bytes
        )
        self.owners = {row.space_id: owner_of(row) for row in self.daemon.core.spaces()}
        assert self.daemon.disk.phase == "ready", f"the disk tier is {self.daemon.disk.phase}"
        self._note_drops()
        for model in MODELS:
            floor = self.daemon.core.epoch_floors().get(model, 0)
            certain = max((epoch for _, epoch in self.floors[model]), default=0)
            assert certain <= floor <= self.floor_possible[model], f"epoch floor {floor}"
            self.floors[model], self.floor_possible[model] = [(0, floor)], floor
        must = list(self.truth.must())
        missing = set(must) - self._on_disk(must)
        assert not missing, f"{len(missing)} of {len(must)} durable blocks are lost"
        self.counts["durable blocks found"] += len(must)
        for name in must[:3]:
            self.daemon.run(self._must_read(name))

    async def _must_read(self, name: Name) -> None:
        owner, key = name
        assert isinstance(owner, Owner)
        session = self.daemon.store.attach(owner.tenant, b"reader", "engine", "torture")
        opening = self.daemon.store.open(session, owner.fingerprint)
        leased = await self.daemon.store.acquire(
            session,
            opening.space_id,
            [key],
            mode=LeaseMode.COPY,
            ttl_ns=SECOND,
            wait_ns=0,
            load_ns=SECOND,
        )
        (place,) = leased.places
        assert place is not None, f"a durable block cannot be read: {leased.reason.name}"
        self._check_block(owner, key, self._read(owner, place))
        self.daemon.store.end_session(session.id)

    def _spaces(self) -> dict[Owner, int]:
        return {owner_of(row): row.space_id for row in self.daemon.core.spaces()}

    def _on_disk(self, names: Sequence[Name]) -> set[Name]:
        found: set[Name] = set()
        for owner, space_id in self._spaces().items():
            keys = [key for whose, key in names if whose == owner]
            held = self.daemon.run(self.daemon.disk.find(space_id, keys))
            found.update((owner, key) for key in held)
        return found

    def _ready(self) -> set[Name]:
        """What can be read from memory."""
        ready: set[Name] = set()
        for space in self.daemon.core.books.spaces:
            owner = Owner(
                space.tenant,
                space.fingerprint.identity.model_name,
                space.fingerprint.identity.weight_epoch,
            )
            ready.update(
                (owner, key) for key, slot in space.index.items() if slot.state is SlotState.READY
            )
        return ready

    # ------------------------------------------------------------------ what holds always

    def _read(self, owner: Owner, place: Place) -> Bytes:
        assert self.daemon.store.generation(place) == place.generation, "a leased slot was reused"
        length = layout_of(owner.fingerprint).block_bytes
        return np.array(self.daemon.store.block_view(place, length))

    def _check_block(self, owner: Owner, key: bytes, data: Bytes) -> None:
        block = self.truth.block((owner, key))
        possible = block.possible()
        if any(np.array_equal(data, content(owner, key, version)) for version in possible):
            return
        tags = [tag(owner, key, version) for version in possible]
        others = [
            tag(whose, other, write.version)
            for (whose, other), history in self.truth.blocks.items()
            for write in history.writes
        ]
        finding = check(data, tags, others)
        stale = [w for w in block.writes if np.array_equal(data, content(owner, key, w.version))]
        raise Wrong(
            f"{finding.value}; {owner} {key.hex()[:8]}, possible {sorted(possible)}, is {stale}"
        )

    def _note_drops(self) -> None:
        """The tier below says what it has no more; what it could not read it may have dropped."""
        for moment, space_id, key in self.daemon.dropped:
            owner = self.owners.get(space_id)
            if owner is not None:
                block = self.truth.block((owner, key))
                block.lost = max(block.lost, moment)
        disk = self.daemon.disk.counts
        failed = disk["corrupt_dropped"] + sum(
            count for name, count in disk.items() if name.startswith("read_errors")
        )
        if failed > self.seen["failed reads"]:
            self.truth.lose(self.asked, self.folder.stamp())
        self.seen["failed reads"] = failed
        if not self.daemon.core.books.loading:
            self.asked.clear()

    @precondition(lambda self: hasattr(self, "daemon"))
    @invariant()
    def holds(self) -> None:
        daemon = self.daemon
        daemon.settle()
        self._note_drops()
        daemon.core.check()
        volume = daemon.disk.volume
        if volume is not None:
            with volume.books:
                volume.ring.check()
        host, pool = daemon.host.stats(), daemon.core.stats().pools[0]
        there = host.assigned_bytes + host.staging_bytes + host.closing_bytes
        assert there == pool.used_bytes, f"{there} bytes of memory, {pool.used_bytes} in the books"
        self._check_counters()
        self._check_readings()
        for _, engine, keys in self.pins:
            codes = [self._code(engine, key) for key in keys]
            assert all(code == 1 for code in codes), f"pinned blocks are away: {codes}"

    def _code(self, engine: Engine, key: bytes) -> int:
        (row,) = [r for r in self.daemon.core.spaces() if owner_of(r) == engine.owner]
        slot = self.daemon.core.books.spaces.get(row.space_id)
        assert slot is not None
        found = slot.index.get(key)
        return 0 if found is None else found.code

    def _check_counters(self) -> None:
        now = Counter(self.daemon.core.stats().counters)
        now.update({f"disk {name}": count for name, count in self.daemon.disk.counts.items()})
        for name, count in now.items():
            assert count >= self.seen[name], f"{name} fell from {self.seen[name]} to {count}"
            self.seen[name] = count

    def _check_readings(self) -> None:
        """What is leased is there, unchanged."""
        kept = []
        for reading in self.readings:
            lease = self.daemon.core.books.leases.get(reading.leased.lease_id)
            if lease is None:
                continue  # its time is over
            kept.append(reading)
            for index, was in reading.seen.items():
                place = reading.leased.places[index]
                assert place is not None
                data = self._read(reading.engine.owner, place)
                if data.tobytes() != was:
                    raise Wrong("bytes changed under a lease")
        self.readings = kept

    # ------------------------------------------------------------------ and in the end

    def teardown(self) -> None:
        if not hasattr(self, "daemon"):
            return
        try:
            if sys.exc_info()[0] is None:
                self._recover()
        finally:
            self.daemon.close()
            for listener in self.played:
                listener()

    def _recover(self) -> None:
        """No faults any more, and everybody leaves: nothing is left, and everything works."""
        self.heal()
        self.let_go()
        for _ in range(6):
            self.pass_time(5 * SECOND)
        self.daemon.let_go()
        while self.pins:
            self.unpin()
        while self.engines:
            self.die(0)
        self.daemon.to_unmap.clear()
        self.pass_time(SECOND)
        self.holds()
        stats = self.daemon.core.stats()
        left = (
            stats.sessions, stats.read_leases, stats.view_leases, stats.write_leases, stats.pins,
            stats.copies_in_flight, stats.pools[0].staging_bytes, stats.pools[0].closing_bytes,
        )  # fmt: skip
        assert not any(left), f"something is left: {left}"
        assert not self.daemon.tasks, "a call has not ended"
        for space in self.daemon.core.books.spaces:
            states = {slot.state for slot in space.index.values()}
            assert states <= {SlotState.READY}, f"a block is for ever {states}"
        self._check_files()
        # The smallest folder has hardly a place for each tenant's sizes.
        blocks = 1 if self.disk_bytes == room(DISK_RECORDS[0]) else 3
        there: set[Name] = set()
        for number in range(3):  # a region that changes hands has to be let go first
            engine, keys = self._engine(0), fresh_keys(number, blocks)
            self.daemon.run(self._put(engine, keys, True))
            self.pass_time(SECOND)
            there = self._on_disk(self._names(engine, keys))
            if len(there) == blocks:
                break
        state = self.daemon.disk.stats().state
        assert len(there) == blocks, f"a durable put stores {len(there)} of {blocks}: {state}"
        self.crash(power=False, host=self.host_bytes, disk=DISK_RECORDS[-1])
        got = self.counts["blocks got"]
        self.daemon.run(self._get(self._engine(0), keys, True, False, False))
        assert self.counts["blocks got"] == got + blocks, "what is on disk can be read"
        self.holds()

    def _check_files(self) -> None:
        """The folder is what the books say, and within its capacity."""
        volume = self.daemon.disk.volume
        assert volume is not None, f"the disk tier is {self.daemon.disk.phase}"
        with volume.books:
            usage = volume.ring.usage()
            volume.ring.check()
        there = sum(one.size_bytes for one in self.folder.files.list().values())
        assert there == usage.segment_bytes, f"{there} bytes of files, {usage} in the books"
        rows = volume.index.row_count()
        assert rows == usage.live_slots, f"{rows} rows, {usage.live_slots} blocks"
        used = self.daemon.disk.usage().used_bytes
        assert used <= self.disk_bytes, f"{used} bytes of {self.disk_bytes} are used"


NEVER = 1 << 62


def fresh_keys(number: int, blocks: int) -> list[bytes]:
    """Keys that nothing else has used."""
    return [hashlib.sha256(b"fresh %d/%d" % (number, at)).digest() for at in range(blocks)]


def room(records: int) -> int:
    """A capacity for so many blocks of 4 KiB."""
    return records * record_bytes(4 * KIB) + index_bytes(records)


def owner_of(row: SpaceRow) -> Owner:
    identity = row.fingerprint.identity
    return Owner(row.tenant, identity.model_name, identity.weight_epoch)


def tag(owner: object, key: bytes, version: int) -> bytes:
    assert isinstance(owner, Owner)
    return tag_of(owner.tenant, owner.fingerprint.digest, key, version)


def content(owner: Owner, key: bytes, version: int) -> Bytes:
    """The bytes of one write."""
    return payload(tag(owner, key, version), layout_of(owner.fingerprint).block_bytes)
