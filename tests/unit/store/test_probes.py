"""A tier that was slow, and is passed over, is measured by the daemon: bounded, and by nobody's
request.
"""

from __future__ import annotations

import asyncio
from itertools import count

from kvstore.model.cost import PrefillCost
from kvstore.model.plan import Plan
from kvstore.model.reasons import Reason
from kvstore.policy.plan import plan, runs_of
from kvstore.store.probes import PAUSE_MAX_NS, PAUSE_MIN_NS, PROBE_NS
from tests.unit.store.stand import BLOCK, MS, SECOND, block, keys
from tests.unit.store.test_archives import DISK, Archived

HOST = 0
TOKENS, BLOCKS = 16, 40
COST = PrefillCost(10.0, 0.0)
"""0.16 ms a block."""
SLOW_NS, FAST_NS = 20 * MS, MS // 100
"""Of a block on disk."""


class Gated(Archived):
    """A stand whose client follows the plan, each time for a prompt that only the disk has."""

    def __init__(self) -> None:
        super().__init__()
        self._prompts = count()
        for link in self.store.links:
            link.latency_ns = link.seed_latency_ns = 100

    def __enter__(self) -> Gated:
        return self

    @property
    def begun(self) -> int:
        """Probes of the disk."""
        return self.store.probes.counts()[DISK]

    @property
    def loaded(self) -> int:
        """Blocks that were read from disk."""
        return self.store.links[DISK].moved_bytes // BLOCK

    def ask(self, *, weighed: bool = True, name: str = "") -> Plan:
        """One look-up; what it leaves to do is done."""
        prompt = keys(BLOCKS, name or f"prompt {next(self._prompts)}")
        held = {(self.space, key): block(key).tobytes() for key in prompt}
        self.archive.held.update(held)

        async def asked() -> Plan:
            codes = await self.store.lookup(self.session, self.space, prompt)
            cost = COST if weighed else None
            links = self.store.links
            advice = plan(runs_of(codes), TOKENS, BLOCK, links, cost, BLOCKS * TOKENS)
            space, probes = self.space, self.store.probes
            probes.passed_over(self.session, space, prompt, codes, BLOCK, advice)
            return advice

        advice = self.run(asked())
        self.settle()
        return advice

    def slow_down(self) -> None:
        """Somebody finds that the disk has become slow."""
        self.slow.load_ns = SLOW_NS
        for number in range(24):
            prompt = keys(8, f"found out {number}")
            self.archive.held.update({(self.space, key): block(key).tobytes() for key in prompt})
            work = self.acquire(self.session, self.space, prompt, load_ns=SECOND)
            leased = self.run(work)
            self.store.release(self.session, (leased.lease_id,))
            self.pass_time(MS)


def test_a_slow_disk_is_passed_over_and_probed_and_used_again_once_it_has_recovered() -> None:
    with Gated() as stand:
        assert stand.ask().reason is Reason.OK, "the seed is fast"
        stand.slow_down()
        assert stand.ask().reason is Reason.DECLINED_RECOMPUTE_FASTER
        before = stand.loaded
        for _ in range(60):
            stand.pass_time(SECOND)
            assert stand.ask().reason is Reason.DECLINED_RECOMPUTE_FASTER, "it is slow yet"
        assert 5 <= stand.begun <= 15, "less and less often, while they find what is believed"
        assert stand.loaded - before <= stand.begun * (PROBE_NS // SLOW_NS + 1)
        stand.slow.load_ns = FAST_NS
        waited = 0
        while stand.ask().reason is not Reason.OK:
            stand.pass_time(SECOND // 4)
            waited += 1
            assert waited < 80, "20 s"
        assert stand.begun <= 40


def test_probes_take_a_twentieth_of_the_time_at_most() -> None:
    with Gated() as stand:
        stand.slow_down()
        stand.pass_time(PAUSE_MAX_NS)
        stand.slow.load_ns = 400 * MS  # and it gets slower still
        begun_ns, spent_ns = stand.clock.monotonic_ns(), 0
        for _ in range(100):
            before_ns = stand.clock.monotonic_ns()
            stand.ask()
            spent_ns += stand.clock.monotonic_ns() - before_ns
            stand.pass_time(4 * SECOND)
        assert stand.begun >= 3
        assert spent_ns <= (stand.clock.monotonic_ns() - begun_ns) / 20 + 3 * SECOND


def test_nothing_is_probed_where_nothing_is_passed_over() -> None:
    with Gated() as stand:
        stand.ask()
        stand.ask(weighed=False)
        assert stand.begun == 0, "what is loaded is measured by its load"
        stand.slow_down()
        stand.pass_time(PAUSE_MIN_NS)
        stand.ask(weighed=False)
        assert stand.begun == 0, "without a cost nobody declines"
        assert stand.ask().reason is Reason.DECLINED_RECOMPUTE_FASTER
        assert stand.begun == 1
        stand.store.drain()
        stand.pass_time(PAUSE_MAX_NS)
        stand.ask()
        assert stand.begun == 1, "a daemon that stops begins nothing"


def test_a_measurement_of_the_moment_needs_no_probe() -> None:
    with Gated() as stand:
        stand.slow_down()
        stand.ask()
        assert stand.begun == 0, "the loads that found it out are a moment ago"
        stand.pass_time(PAUSE_MIN_NS)
        stand.ask()
        assert stand.begun == 1


def test_one_probe_at_a_time_and_its_lease_ends() -> None:
    with Gated() as stand:
        stand.slow_down()
        stand.pass_time(PAUSE_MIN_NS)
        stand.slow.held = True
        stand.ask()
        stand.ask()
        assert stand.begun == 1
        assert stand.store.core.stats().read_leases == 1
        stand.slow.held = False
        stand.slow.step()
        stand.settle()
        assert stand.store.core.stats().read_leases == 0


def test_a_session_that_ends_takes_its_probe_along() -> None:
    with Gated() as stand:
        stand.slow_down()
        stand.pass_time(PAUSE_MIN_NS)
        stand.slow.held = True
        stand.ask()
        stand.store.end_session(stand.session.id)
        stand.slow.held = False
        stand.slow.step()
        stand.settle()
        assert stand.store.core.stats().read_leases == 0
        stand.session = stand.attach()
        stand.pass_time(PAUSE_MAX_NS * 2)
        stand.ask()
        assert stand.begun == 2


class SlowMemory(Gated):
    """A stand whose host memory has been found slow, with a prompt in it."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = keys(4, "in memory")
        self.put(self.session, self.space, self.prompt)
        self.link = self.store.links[HOST]
        for step in range(40):
            self.link.observe(4 * BLOCK, SECOND, self.clock.monotonic_ns() + step)
        self.slow_ns = self.link.predict_ns(4 * BLOCK)

    def __enter__(self) -> SlowMemory:
        return self

    def ask_for_memory(self) -> Plan:
        """One look-up of it."""

        async def asked() -> Plan:
            codes = await self.store.lookup(self.session, self.space, self.prompt)
            advice = plan(runs_of(codes), TOKENS, BLOCK, self.store.links, COST, 64)
            probes, space = self.store.probes, self.space
            probes.passed_over(self.session, space, self.prompt, codes, BLOCK, advice)
            return advice

        return self.run(asked())


def test_memory_that_was_slow_is_measured_by_a_copy() -> None:
    with SlowMemory() as stand:
        assert stand.ask_for_memory().reason is Reason.DECLINED_RECOMPUTE_FASTER
        for _ in range(60):
            stand.pass_time(SECOND)
            stand.ask_for_memory()
            stand.settle()
        assert stand.link.predict_ns(4 * BLOCK) < stand.slow_ns / 100
        assert stand.store.core.stats().read_leases == 0


def test_slow_memory_is_copied_beside_the_loop_and_leased_meanwhile() -> None:
    with SlowMemory() as stand:
        stand.pass_time(PAUSE_MAX_NS)
        stand.pool.held = True
        stand.ask_for_memory()
        stand.settle()
        assert stand.pool.waiting == 1, "the loop goes on"
        assert stand.store.core.stats().read_leases == 1
        assert stand.link.predict_ns(4 * BLOCK) == stand.slow_ns
        stand.pool.held = False
        stand.pool.step()
        stand.settle()
        assert stand.store.core.stats().read_leases == 0
        assert stand.link.predict_ns(4 * BLOCK) < stand.slow_ns


def test_a_copy_that_a_stop_cuts_short_tells_nothing_and_keeps_nothing() -> None:
    with SlowMemory() as stand:
        stand.pass_time(PAUSE_MAX_NS)
        stand.pool.held = True
        stand.ask_for_memory()
        stand.settle()
        for task in asyncio.all_tasks(stand.loop):
            task.cancel()
        stand.settle()
        assert stand.store.core.stats().read_leases == 0
        stand.pool.held = False
        stand.pool.step()
        stand.settle()
        assert stand.link.predict_ns(4 * BLOCK) == stand.slow_ns
