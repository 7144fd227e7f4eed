"""A day of clients in a few hundred steps, from a seed: the simulation of the core.

Engines and an operator act at random on a machine with faults (`clients`, `machine`). After every
step all invariants of the core hold, and every byte that can be read is right. `recover` then ends
all faults: nothing may be left, and everything must work.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.model.reasons import Reason
from kvstore.model.values import LeaseMode
from kvstore.testing.clients import Clients
from kvstore.testing.machine import NO_FAULTS
from kvstore.testing.workload import MS, PROMPTS, Reading, Write, fingerprint, prompt_keys


class Simulation(Clients):
    """One seed. `run` makes steps, `recover` ends the faults. See the module's docstring."""

    # ------------------------------------------------------------------ steps

    def run(self, steps: int) -> None:
        """Makes random steps; every one is checked."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self._arrive, 6),
            (self._die, 1),
            (self._reserve, 26),
            (self._write, 10),
            (self._end_reservation, 20),
            (self._settle_commit, 14),
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
        if self.random.random() < 0.3:
            self.core.save_ahead(self.random.random() < 0.2, self.now_ns)

    def _pass_time(self) -> None:
        self.clock.advance_ns(self.random.choice([1, 1, 20, 20, 400, 2_000, 12_000]) * MS)
        self.core.tick(self.now_ns)

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
        self.machine.settle(self.now_ns)
        self.check_commits_told()
        for engine in self.engines:
            for session in engine.sessions:
                self.core.end_session(session, self.now_ns)
        self.engines, self.readings, self.reservations, self.commits = [], [], [], []
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
