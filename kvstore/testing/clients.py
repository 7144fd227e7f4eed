"""Simulated engines: they attach, push prompts, read them back, hold views, hang, and die.

Every byte that can be read under a lease is one that was committed for that key by one write group,
and not invalidated since; nothing changes under a lease. AssertionError if that is not so.
"""

from __future__ import annotations

from random import Random

from kvstore.core.core import Core
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.layout import layout_of
from kvstore.model.reasons import Reason
from kvstore.model.values import LeaseMode, Place
from kvstore.testing.clock import ManualClock
from kvstore.testing.machine import Faults, Machine
from kvstore.testing.workload import (
    MS,
    PROMPT_BLOCKS,
    PROMPTS,
    Engine,
    Reading,
    Reservation,
    Setting,
    Write,
    content,
    fingerprint,
    prompt_keys,
    settings,
)


class Clients:
    """Engines of one or two ranks, at random. See the module's docstring."""

    def __init__(self, seed: int, core_type: type[Core] = Core) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.setting = self._make_setting()
        self.clock = ManualClock()
        self.core = core_type(self.setting.tiers, self.setting.tenants, self.setting.limits)
        faults = Faults(copy_fails=0.05, load_corrupt=0.05, archive_ages=0.3)
        self.machine = Machine(self.core, self.random, faults)
        self.engines: list[Engine] = []
        self.reservations: list[Reservation] = []
        self.late_writers: list[Reservation] = []
        self.commits: list[Reservation] = []
        self.readings: list[Reading] = []
        self.pins: list[int] = []
        self.writes: dict[int, Write] = {}
        self.by_key: dict[tuple[int, bytes], dict[int, None]] = {}
        self.epochs = {"model": 0, "other": 0}
        self.blocks_read = 0
        self._next_write = 0
        self._stale_below: dict[bytes, int] = {}

    def _make_setting(self) -> Setting:
        """Of the simulated daemon, at random."""
        return settings(self.random)

    @property
    def now_ns(self) -> int:
        """The simulated moment."""
        return self.clock.monotonic_ns()

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
        self.commits = [r for r in self.commits if r.session not in dead]
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
            if committed.ready or self.random.random() < 0.1:
                self.core.settle_commit(reservation.lease_id, self.now_ns)
            else:
                self.commits.append(reservation)
        return committed.reason

    def _settle_commit(self) -> None:
        """A call that waits for its commit is told, asks anew, or its time is over."""
        if not self.commits:
            return
        told = [r for r in self.commits if r.lease_id in self.machine.ready]
        commit = self.random.choice(told or self.commits)
        if not told and self.random.random() < 0.8:
            return
        result = self.core.settle_commit(commit.lease_id, self.now_ns)
        settled = result.visible + result.waiting + result.failed
        assert settled == len(commit.keys), f"a commit is told what became of it: {result}"
        self.commits.remove(commit)
        if not told and self.random.random() < 0.5:
            again = self.core.commit(commit.session, commit.lease_id, False, self.now_ns)
            if again.reason is Reason.OK and not again.ready:
                self.commits.append(commit)

    def check_commits_told(self) -> None:
        """No copy is out any more: every call that waits for a commit has been told."""
        for commit in self.commits:
            assert commit.lease_id in self.machine.ready, "a commit that waits is never told"

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
