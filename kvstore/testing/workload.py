"""A day of clients in a few hundred steps, from a seed: the simulation of the core.

Engines of one or two ranks open spaces, push prompts that share prefixes, read them back, hold
views, let leases expire, give up, write too late, and die; an operator pins, invalidates, raises
epochs and reviews. After every step all invariants of the core hold, and every byte that can be
read under a lease is one that was committed for that key, by one write group, and not invalidated
since. `Simulation.recover` then ends all faults: nothing may be left, everything must work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvstore.core.core import Core
from kvstore.model.fingerprint import (
    ORDER_HEADS,
    Encoding,
    Fingerprint,
    Geometry,
    Identity,
    Placement,
)
from kvstore.model.layout import Layout, layout_of
from kvstore.model.reasons import Reason
from kvstore.model.values import CoreLimits, LeaseMode, Place, TenantSpec, TierKind, TierSpec
from kvstore.testing.clock import ManualClock
from kvstore.testing.machine import NO_FAULTS, Faults, Machine

MS = 1_000_000
PROMPTS = 6
PROMPT_BLOCKS = 10


def fingerprint(
    *,
    model: str = "model",
    revision: str | None = "r1",
    epoch: int = 0,
    block_tokens: int = 16,
    ranks: int = 1,
) -> Fingerprint:
    """A small model: a block of 16 tokens is 4 KiB, and grows with `block_tokens`."""
    return Fingerprint(
        Identity(model, revision, epoch, config_digest="config"),
        Geometry("gqa", layers=2, kv_heads=2, head_size=16),
        Encoding("float16", block_tokens, element_order=ORDER_HEADS),
        Placement(tensor_parallel=ranks),
    )


def prompt_keys(prompt: int, blocks: int = PROMPT_BLOCKS) -> list[bytes]:
    """Keys of a prompt; neighbours share their first half, as chats share a system prompt."""
    keys: list[bytes] = []
    for index in range(blocks):
        owner = prompt // 2 if index < PROMPT_BLOCKS // 2 else 1_000 + prompt
        keys.append(hashlib.sha256(b"%d/%d" % (owner, index)).digest())
    return keys


def content(space_id: int, key: bytes, part: int, write: int, length: int) -> bytes:
    """The bytes of one part as one write made them."""
    line = hashlib.sha256(b"%d/%d/%d/" % (space_id, part, write) + key).digest()
    return line * (length // len(line))


@dataclass
class Write:
    """One attempt of an engine to push blocks: what `content` is told apart by.

    committed: bit masks of parts by key, as far as clients were told OK.
    """

    id: int
    space_id: int
    committed: dict[bytes, int] = field(default_factory=dict)
    void: set[bytes] = field(default_factory=set)


@dataclass
class Reservation:
    """A write lease as its client knows it."""

    lease_id: int
    session: int
    write: Write
    part: int
    keys: list[bytes]
    offsets: list[int]
    region_id: int
    part_bytes: int


@dataclass
class Reading:
    """A read lease as its client knows it. places: once it is settled. seen: what was read."""

    lease_id: int
    session: int
    space_id: int
    layout: Layout
    keys: list[bytes]
    all_or_nothing: bool
    places: list[Place | None] | None = None
    seen: dict[bytes, bytes] = field(default_factory=dict)


@dataclass
class Engine:
    """One engine instance: a group of one session a rank."""

    tenant: str
    group: bytes
    fingerprint: Fingerprint
    layout: Layout
    sessions: list[int] = field(default_factory=list)
    space_id: int = 0


@dataclass(frozen=True)
class Setting:
    """One configuration of the simulated daemon."""

    tiers: tuple[TierSpec, ...]
    tenants: tuple[TenantSpec, ...]
    limits: CoreLimits


def settings(random: Random) -> Setting:
    """A small daemon with one to three tiers and one to three tenants."""
    host = TierSpec("host", TierKind.POOL, random.choice([130, 200, 400]) * 1024, ingest=True)
    device = TierSpec("device", TierKind.POOL, random.choice([24, 48, 80]) * 1024)
    disk = TierSpec("disk", TierKind.ARCHIVE, 1 << 20)
    tiers = random.choice([(host,), (host, disk), (device, host), (device, host, disk)])
    tenants = tuple(TenantSpec(name) for name in ("a", "b", "c")[: random.choice([1, 2, 3])])
    limits = CoreLimits(
        leases_per_session_max=30,
        view_bytes_per_session_max=40 * 1024,
        staging_bytes=random.choice([24, 64]) * 1024,
        copies_in_flight_max=random.choice([2, 6, 50]),
        ghost_keys_max=50,
        sessions_max=12,
        spaces_max=14,
        region_slots_min=random.choice([2, 4]),
    )
    return Setting(tiers, tenants, limits)


class Simulation:
    """One seed. `run` makes steps, `recover` ends the faults. See the module's docstring."""

    def __init__(self, seed: int, core_type: type[Core] = Core) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.setting = settings(self.random)
        self.clock = ManualClock()
        self.core = core_type(self.setting.tiers, self.setting.tenants, self.setting.limits)
        faults = Faults(copy_fails=0.05, load_corrupt=0.05, archive_ages=0.3)
        self.machine = Machine(self.core, self.random, faults)
        self.engines: list[Engine] = []
        self.reservations: list[Reservation] = []
        self.late_writers: list[Reservation] = []
        self.readings: list[Reading] = []
        self.pins: list[int] = []
        self.writes: dict[int, Write] = {}
        self.by_key: dict[tuple[int, bytes], dict[int, None]] = {}
        self.epochs = {"model": 0, "other": 0}
        self.blocks_read = 0
        self._next_write = 0
        self._stale_below: dict[bytes, int] = {}

    @property
    def now_ns(self) -> int:
        """The simulated moment."""
        return self.clock.monotonic_ns()

    # ------------------------------------------------------------------ steps

    def run(self, steps: int) -> None:
        """Makes random steps; every one is checked."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self._arrive, 6),
            (self._die, 1),
            (self._reserve, 26),
            (self._write, 10),
            (self._end_reservation, 20),
            (self._acquire, 26),
            (self._settle, 14),
            (self._release, 14),
            (self._operate, 3),
            (self._pass_time, 8),
            (self._write_late, 4),
        ]
        for _ in range(3):
            self._arrive()
        chosen = self.random.choices(
            [action for action, _ in actions], [weight for _, weight in actions], k=steps
        )
        for action in chosen:
            action()
            self._progress()
            self.check()

    def check(self) -> None:
        """All invariants, and all bytes that can be read now."""
        self.core.check()
        for reading in self.readings:
            self._verify(reading)

    def _progress(self) -> None:
        """The world moves on a little: copies, regions, rows, archives."""
        self.machine.run_effects()
        for _ in range(self.random.choice([0, 1, 3, 8, 20])):
            self.machine.finish_copy(self.now_ns)
        if self.random.random() < 0.4:
            self.machine.finish_region(self.now_ns)
        if self.random.random() < 0.5:
            self.machine.finish_row(self.now_ns)
        self.machine.age_archive(tell=self.random.random() < 0.5)

    def _pass_time(self) -> None:
        self.clock.advance_ns(self.random.choice([1, 1, 20, 20, 400, 2_000]) * MS)
        self.core.tick(self.now_ns)

    def _until(self) -> int:
        return self.now_ns + self.random.choice([50, 5_000, 20_000]) * MS

    # ------------------------------------------------------------------ engines

    def _arrive(self) -> None:
        if len(self.engines) >= 5:
            return
        tenant = (
            self.random.choice(self.setting.tenants[:2]).name
            if self.random.random() < 0.8
            else self.setting.tenants[-1].name
        )
        model = self.random.choice(["model", "model", "model", "model", "other"])
        offered = fingerprint(
            model=model,
            revision=self.random.choice(["r1", "r1", "r1", "r1", None]),
            epoch=self.epochs[model] + (self.random.random() < 0.1),
            block_tokens=self.random.choice([16, 16, 16, 24, 48]),
            ranks=self.random.choice([1, 1, 2]),
        )
        group = b"group %d" % self.random.randrange(100)
        if self.engines and self.random.random() < 0.6:
            # A replica of an engine that is there: they share a space.
            peer = self.random.choice(self.engines)
            tenant, offered = peer.tenant, peer.fingerprint
        self.add_engine(tenant, group, offered)

    def add_engine(self, tenant: str, group: bytes, offered: Fingerprint) -> Engine | None:
        """An engine attaches all its ranks and opens its space; None if it is refused."""
        ranks = offered.placement.tensor_parallel
        if len(self.core.books.sessions) + ranks > self.setting.limits.sessions_max:
            return None
        engine = Engine(tenant, group, offered, layout_of(offered))
        for _ in range(ranks):
            engine.sessions.append(self.core.begin_session(tenant, group, self.now_ns))
        self.engines.append(engine)
        self._open(engine)
        return engine

    def _open(self, engine: Engine) -> bool:
        opening = self.core.open(engine.sessions[0], engine.fingerprint, self.now_ns)
        engine.space_id = opening.space_id
        return bool(opening.space_id)

    def _die(self) -> None:
        if not self.engines:
            return
        engine = self.random.choice(self.engines)
        dead = set(engine.sessions)
        if len(engine.sessions) > 1 and self.random.random() < 0.5:
            dead = {self.random.choice(engine.sessions)}
        self._end_sessions(engine, dead)
        # A rank that died alone comes back under the same group.
        while 0 < len(engine.sessions) < engine.fingerprint.placement.tensor_parallel:
            engine.sessions.append(
                self.core.begin_session(engine.tenant, engine.group, self.now_ns)
            )

    def _end_sessions(self, engine: Engine, dead: set[int]) -> None:
        for session in dead:
            self.core.end_session(session, self.now_ns)
            engine.sessions.remove(session)
        self._bury(dead)
        if not engine.sessions:
            self.engines.remove(engine)

    def _bury(self, dead: set[int]) -> None:
        """What dead clients knew is forgotten; their slow copies may still write."""
        for reservation in self.reservations:
            if reservation.session in dead:
                self.late_writers.append(reservation)
        self.reservations = [r for r in self.reservations if r.session not in dead]
        self.readings = [r for r in self.readings if r.session not in dead]

    def _engine(self) -> Engine | None:
        """An engine with a space that is open, as far as it knows."""
        if not self.engines:
            return None
        engine = self.random.choice(self.engines)
        if engine.space_id and self.core.books.spaces.get(engine.space_id) is not None:
            return engine
        if self._open(engine):
            return engine
        self._end_sessions(engine, set(engine.sessions))
        return None

    # ------------------------------------------------------------------ writing

    def _reserve(self) -> None:
        engine = self._engine()
        if engine is None:
            return
        chain = prompt_keys(self.random.randrange(PROMPTS), self.random.randint(1, PROMPT_BLOCKS))
        first = self.random.choice([0, 0, len(chain) // 2])
        self._next_write += 1
        write = Write(self._next_write, engine.space_id)
        ranks = list(enumerate(engine.sessions))
        self.random.shuffle(ranks)
        for part, session in ranks:
            self.reserve(engine, session, part, chain, first, write)
            if self.random.random() < 0.2:
                break
        if self.random.random() < 0.6:
            # Most pushes go through at once; the others are what the simulation is about.
            self.machine.run_effects()
            for reservation in [r for r in self.reservations if r.write is write]:
                self.reservations.remove(reservation)
                self.fill(reservation)
                self.commit(reservation)

    def reserve(
        self, engine: Engine, session: int, part: int, chain: list[bytes], first: int, write: Write
    ) -> Reason:
        """One rank reserves its part; its client remembers what it may write."""
        reserved = self.core.reserve(
            session, engine.space_id, chain, first, part, write.id, self._until(), self.now_ns
        )
        assert len(reserved.wanted) == len(reserved.offsets)
        if not reserved.lease_id:
            return reserved.reason
        keys = [chain[index] for index in reserved.wanted]
        self.writes[write.id] = write
        for key in keys:
            self.by_key.setdefault((write.space_id, key), {})[write.id] = None
        self.reservations.append(
            Reservation(
                reserved.lease_id,
                session,
                write,
                part,
                keys,
                reserved.offsets,
                reserved.staging_region,
                reserved.part_bytes,
            )
        )
        return reserved.reason

    def _write(self) -> None:
        if self.reservations:
            self.machine.run_effects()
            self.fill(self.random.choice(self.reservations))

    def fill(self, reservation: Reservation) -> None:
        """The client writes all its blocks into staging."""
        for key, offset in zip(reservation.keys, reservation.offsets, strict=True):
            self.machine.write_staging(
                reservation.region_id,
                offset,
                content(
                    reservation.write.space_id,
                    key,
                    reservation.part,
                    reservation.write.id,
                    reservation.part_bytes,
                ),
            )

    def _write_late(self) -> None:
        """A client that was given up goes on writing where it was told to."""
        if self.late_writers:
            reservation = self.random.choice(self.late_writers)
            self.fill(reservation)
            if self.random.random() < 0.5:
                self.late_writers.remove(reservation)
                self.core.release(reservation.session, [reservation.lease_id], self.now_ns)

    def _end_reservation(self) -> None:
        if not self.reservations:
            return
        reservation = self.reservations.pop(self.random.randrange(len(self.reservations)))
        self.machine.run_effects()
        choice = self.random.random()
        if choice < 0.75:
            self.fill(reservation)
            self.commit(reservation, durable=self.random.random() < 0.2)
        elif choice < 0.9:
            self.core.release(reservation.session, [reservation.lease_id], self.now_ns)
        else:
            # The client hangs: the reservation will expire, its staging stays his.
            self.late_writers.append(reservation)

    def commit(self, reservation: Reservation, durable: bool = False) -> Reason:
        """The client commits; from now on its content may be read."""
        committed = self.core.commit(
            reservation.session, reservation.lease_id, durable, self.now_ns
        )
        write = reservation.write
        if committed.reason is Reason.OK:
            for key in reservation.keys:
                parts = write.committed.get(key, 0)
                write.committed[key] = parts | 1 << reservation.part
            if committed.ready or self.random.random() < 0.3:
                self.core.settle_commit(reservation.lease_id, self.now_ns)
        return committed.reason

    # ------------------------------------------------------------------ reading

    def _acquire(self) -> None:
        engine = self._engine()
        if engine is None or len(self.readings) > 30:
            return
        keys = self._wanted(engine.space_id)
        below = self.machine.below(engine.space_id, keys)
        if self.random.random() < 0.2:
            # The shell gathered the fact a while ago.
            below, self._stale_below = {**self._stale_below, **below}, below
        reach = None
        if self.random.random() < 0.3:
            reach = frozenset({self.random.randrange(len(self.setting.tiers))})
        session = self.random.choice(engine.sessions)
        all_or_nothing = self.random.random() < 0.2
        view = self.random.random() < 0.3
        acquired = self.core.acquire(
            session,
            engine.space_id,
            keys,
            mode=LeaseMode.VIEW if view else LeaseMode.COPY,
            until_ns=self._until(),
            wait=self.random.random() < 0.7,
            all_or_nothing=all_or_nothing,
            below=below,
            reach=reach,
            now_ns=self.now_ns,
        )
        if acquired.lease_id:
            reading = Reading(
                acquired.lease_id, session, engine.space_id, engine.layout, keys, all_or_nothing
            )
            self.readings.append(reading)
            if acquired.ready and self.random.random() < 0.8:
                self.settle(reading)

    def _wanted(self, space_id: int) -> list[bytes]:
        """The head of a prompt; rather one that is in an archive and not in a pool."""
        space = self.core.books.spaces.get(space_id)
        index = {} if space is None else space.index
        prompts = [prompt_keys(self.random.randrange(PROMPTS)) for _ in range(3)]
        best = max(
            prompts,
            key=lambda keys: sum(k not in index for k in self.machine.below(space_id, keys)),
        )
        return best[: self.random.randint(1, PROMPT_BLOCKS)]

    def _settle(self) -> None:
        waiting = [r for r in self.readings if r.places is None]
        if waiting:
            ready = [r for r in waiting if r.lease_id in self.machine.ready]
            self.settle(self.random.choice(ready or waiting))

    def settle(self, reading: Reading) -> int:
        """The client is told its places; returns how many blocks it has."""
        settled = self.core.settle(reading.lease_id, self.now_ns)
        if not settled.leased:
            self.readings.remove(reading)
            return 0
        assert not (reading.all_or_nothing and None in settled.places), "all or nothing"
        reading.places = settled.places
        return settled.leased

    def _release(self) -> None:
        if not self.readings:
            return
        reading = self.readings.pop(self.random.randrange(len(self.readings)))
        session = self.core.books.sessions[reading.session]
        peers = self.core.books.group_sessions[session.group_key]
        self.core.release(self.random.choice(sorted(peers)), [reading.lease_id], self.now_ns)

    def _verify(self, reading: Reading) -> None:
        """What the client reads: under a live lease every block is there and right; after it has
        expired, a block whose generation is still the same is right, too.
        """
        if reading.places is None:
            return
        live = self.core.books.leases.get(reading.lease_id) is not None
        for key, place in zip(reading.keys, reading.places, strict=True):
            if place is None:
                continue
            if not live and not self._readable(place):
                continue
            assert self.machine.generation(place) == place.generation, "a leased slot was reused"
            data = self.machine.read(place, reading.layout.block_bytes)
            if key not in reading.seen:
                self._verify_block(reading, key, data)
                reading.seen[key] = data
            assert data == reading.seen[key], "bytes changed under a lease"
            self.blocks_read += 1
        if not live:
            self.readings = [r for r in self.readings if r is not reading]

    def _readable(self, place: Place) -> bool:
        region = self.core.region(place.region)
        return region is not None and self.machine.generation(place) == place.generation

    def _verify_block(self, reading: Reading, key: bytes, data: bytes) -> None:
        """The bytes are those of one write, all parts of which were committed."""
        space_id, layout = reading.space_id, reading.layout
        every_part = (1 << len(layout.parts)) - 1
        for write_id in reversed(self.by_key.get((space_id, key), {})):
            write = self.writes[write_id]
            if write.committed.get(key, 0) != every_part:
                continue
            expected = b"".join(
                content(space_id, key, part.index, write_id, part.length) for part in layout.parts
            )
            if data == expected:
                return
        raise AssertionError("bytes that nobody committed for this key, or of two write groups")

    # ------------------------------------------------------------------ the operator

    def _operate(self) -> None:
        self.random.choice(
            [
                self._pin,
                self._unpin,
                self._pin,
                self._unpin,
                self._invalidate_keys,
                self._invalidate_keys,
                self._invalidate_keys,
                self._invalidate_keys,
                self._invalidate_space,
                self._raise_epoch,
                self._review,
            ]
        )()

    def _pin(self) -> None:
        engine = self._engine()
        if engine is not None and len(self.pins) < 4:
            keys = prompt_keys(self.random.randrange(PROMPTS), 3)
            pinned = self.core.pin(engine.space_id, keys, self.now_ns, engine.tenant)
            self.pins += [pinned.pin_id] if pinned.pin_id else []

    def _unpin(self) -> None:
        if self.pins:
            assert self.core.unpin(self.pins.pop(), self.now_ns)

    def _invalidate_keys(self) -> None:
        engine = self._engine()
        if engine is None:
            return
        space_id = engine.space_id
        keys = prompt_keys(self.random.randrange(PROMPTS))[self.random.randrange(8) :]
        saving = [copy for copy in self.machine.copies if copy.why == "save"]
        if saving and self.random.random() < 0.7:
            # While it is being saved: the archive must not keep it.
            copy = self.random.choice(saving)
            space_id, keys = copy.space_id, [copy.key]
        self.core.invalidate(space_id=space_id, keys=keys, now_ns=self.now_ns)
        self._void(space_id, keys)

    def _void(self, space_id: int, keys: list[bytes]) -> None:
        """Who has his places goes on with the old content; nobody else may see it."""
        codes = [
            self.core.lookup(session, space_id, keys)
            for engine in self.engines
            if engine.space_id == space_id
            for session in engine.sessions
        ]
        assert not any(any(code) for code in codes), "invalidated keys are still visible"
        self._release_unsettled({space_id})
        for key in keys:
            self.by_key.pop((space_id, key), None)

    def _invalidate_space(self) -> None:
        engine = self._engine()
        if engine is not None:
            self.core.invalidate(space_id=engine.space_id, now_ns=self.now_ns)
            assert not any(self.core.lookup(engine.sessions[0], engine.space_id, prompt_keys(0)))
            self._release_closed()

    def _release_unsettled(self, spaces: set[int]) -> None:
        for reading in [r for r in self.readings if r.space_id in spaces and r.places is None]:
            self.core.release(reading.session, [reading.lease_id], self.now_ns)
            self.readings.remove(reading)

    def _release_closed(self) -> None:
        open_spaces = {row.space_id for row in self.core.spaces()}
        self._release_unsettled({r.space_id for r in self.readings} - open_spaces)

    def _raise_epoch(self) -> None:
        model = self.random.choice(sorted(self.epochs))
        self.epochs[model] += 1
        raised = self.core.set_epoch(model, self.epochs[model], "new weights", self.now_ns)
        assert raised.epoch == self.epochs[model]
        for space in self.core.spaces():
            identity = space.fingerprint.identity
            assert identity.weight_epoch >= self.epochs.get(identity.model_name, 0)
        self._release_closed()

    def _review(self) -> None:
        held = self.core.reviews()
        if held:
            self.core.review(
                self.random.choice(held).review_id,
                self.random.random() < 0.6,
                "r1",
                "someone",
                "looked at it",
                self.now_ns,
                self.clock.wall_s(),
            )
            self._release_closed()

    # ------------------------------------------------------------------ recovery

    def recover(self) -> None:
        """No faults any more and everybody leaves: nothing is left, and everything works again."""
        self.machine.faults = NO_FAULTS
        for pin in self.pins:
            self.core.unpin(pin, self.now_ns)
        for engine in self.engines:
            for session in engine.sessions:
                self.core.end_session(session, self.now_ns)
        self.engines, self.readings, self.reservations = [], [], []
        self.machine.settle(self.now_ns)
        self.check()
        self._check_nothing_left()
        for tenant in self.setting.tenants:
            self._put_and_read(tenant.name)

    def _check_nothing_left(self) -> None:
        stats = self.core.stats()
        gauges = (
            stats.sessions,
            stats.read_leases,
            stats.view_leases,
            stats.write_leases,
            stats.pins,
            stats.copies_in_flight,
            stats.spaces_held,
            stats.reviews_held,
        )
        assert not any(gauges), f"something is left: {stats}"
        for pool in stats.pools:
            assert (pool.staging_bytes, pool.closing_bytes, pool.pinned_bytes) == (0, 0, 0)
        assert not self.core.books.tickets

    def _put_and_read(self, tenant: str) -> None:
        """A new engine stores a prompt and reads it back, within a few tries."""
        engine = self.add_engine(tenant, b"fresh", fingerprint(model="fresh"))
        assert engine is not None
        session, keys = engine.sessions[0], prompt_keys(0, 4)
        for _ in range(4):
            self.clock.advance_ns(2_000 * MS)
            self._next_write += 1
            write = Write(self._next_write, engine.space_id)
            reason = self.reserve(engine, session, 0, keys, 0, write)
            self.machine.settle(self.now_ns)
            for reservation in self.reservations:
                self.fill(reservation)
                assert self.commit(reservation) is Reason.OK
            self.reservations = []
            self.machine.settle(self.now_ns)
            self.check()
        assert reason is Reason.OK, f"puts do not succeed: {reason}"
        acquired = self.core.acquire(
            session,
            engine.space_id,
            keys,
            mode=LeaseMode.COPY,
            until_ns=self.now_ns + MS,
            wait=False,
            now_ns=self.now_ns,
        )
        reading = Reading(acquired.lease_id, session, engine.space_id, engine.layout, keys, False)
        self.readings.append(reading)
        assert self.settle(reading) == len(keys), "what was put is there"
        self._verify(reading)
        self.core.end_session(session, self.now_ns)
        self.engines.remove(engine)
        self.readings = []
        self.machine.settle(self.now_ns)
