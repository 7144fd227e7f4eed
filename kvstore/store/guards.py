"""The guards of a store: where their values come from, and what a stop does.

    memory        free bytes of the tightest bound on memory: nothing new is taken in, and no more
                  memory is made
    held          undecided fingerprints: no further one is held
    bytes         free bytes of an archive's file system: nothing is saved
    writes        an archive's bytes written in a day, by its budget: nothing is saved
    read_errors   share of an archive's loads that the device failed: nothing is loaded
    write_errors  share of its saves that failed: nothing is saved
    corrupt       share of its loads that came back damaged: nothing is loaded, and the fingerprints
                  whose own share is past the line are held for a person
    load          measured load time by the prefill time that it replaced, by tier and tenant, since
                  clients report it: look-ups do not advise to load from there

On the event loop's thread, fed by the store's tick. Each change is told to `listeners`.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstore.core.core import Core
from kvstore.model.fingerprint import Fingerprint, Verdict
from kvstore.model.reasons import Reason
from kvstore.model.values import Opening
from kvstore.policy.guards import TRIALS, UNLIMITED, Guard, GuardLimits, RateGuard, State
from kvstore.store.guarded import GuardedArchive, Outcomes
from kvstore.store.sessions import Session
from kvstore.tiers import memory_budget
from kvstore.tiers.base import ArchiveStats

log = logging.getLogger(__name__)

LOOK_EVERY_NS = 200_000_000
LEVELS_EVERY_NS = 1_000_000_000
SPACES_MAX = 256
"""Spaces whose damaged blocks are counted, the latest ones."""
MEMORY_BYTES_MAX = 64 << 20
"""A 128th of a bound on memory, at most: with less free the kernel looks for victims."""
MEMORY_WARNS = 4
SPARE_SHARE = 0.25
"""Of the bytes that an archive leaves free in its file system: with less, others fill it faster
than the archive can give way."""
SPARE_WARNS = 3
"""Times the stop line: where a guard of free bytes warns unless that is set."""


class Name(NamedTuple):
    """Which guard. tier, tenant: empty where it is of none."""

    guard: str
    tier: str = ""
    tenant: str = ""


class GuardStats(NamedTuple):
    """A guard as people and metrics see it. value, warn, stop: in the guard's own unit; 0: no such
    line. warnings, stops: how often each was entered.
    """

    name: Name
    state: State
    value: float
    warn: float
    stop: float
    warnings: int
    stops: int


class GuardChange(NamedTuple):
    """A guard went from one state to another. detail: what else is to be told."""

    stats: GuardStats
    was: State
    detail: str = ""


class Guards:
    """See the module's docstring."""

    def __init__(
        self,
        limits: GuardLimits,
        tiers: Sequence[str],
        archives: Mapping[int, GuardedArchive],
        *,
        reviews_held: Callable[[], int],
        hold: Callable[[int, Reason, str], int],
        pause_memory: Callable[[bool], None],
        set_admission: Callable[[int, float], None],
    ) -> None:
        """tiers: names, fastest first. hold: `Store.hold`. pause_memory: whether none is made.
        set_admission: see `Core.set_admission`.
        """
        self.listeners: list[Callable[[GuardChange], None]] = []
        self.limits = limits
        self._tiers = tuple(tiers)
        self._archives = archives
        self._reviews_held = reviews_held
        self._hold = hold
        self._pause_memory = pause_memory
        self._set_admission = set_admission
        self._guards: dict[Name, Guard] = {}
        self._defect = ""
        self._groups = memory_budget.Groups()
        self._spaces: OrderedDict[int, RateGuard] = OrderedDict()
        self._looked_ns = self._levels_ns = -LEVELS_EVERY_NS
        memory = (limits.memory_free_warn_bytes, limits.memory_free_stop_bytes)
        self._memory = self._level(Name("memory"), *memory, falling=True)
        self._held = self._level(Name("held"), limits.held_warn, limits.held_stop)
        self._loads: dict[tuple[str, int], RateGuard] = {}
        for tier in archives:
            self._of_archive(self._tiers[tier])

    def _of_archive(self, tier: str) -> None:
        limits = self.limits
        lines = (limits.disk_free_warn_bytes, limits.disk_free_stop_bytes)
        self._level(Name("bytes", tier), *lines, falling=True)
        self._level(Name("writes", tier), limits.disk_writes_warn_share, 1.0)
        errors = (limits.errors_warn_share, limits.errors_stop_share)
        self._rate(Name("read_errors", tier), *errors)
        self._rate(Name("write_errors", tier), *errors)
        self._rate(Name("corrupt", tier), limits.corrupt_warn_share, limits.corrupt_stop_share)

    def _level(self, name: Name, warn: float, stop: float, *, falling: bool = False) -> Guard:
        guard = Guard(warn, stop, hold_ns=self.limits.hold_ns, falling=falling)
        self._guards[name] = guard
        return guard

    def _rate(self, name: Name, warn: float, stop: float) -> RateGuard:
        guard = self._new_rate(warn, stop)
        self._guards[name] = guard
        return guard

    def _new_rate(self, warn: float, stop: float) -> RateGuard:
        limits = self.limits
        return RateGuard(
            warn,
            stop,
            hold_ns=limits.hold_ns,
            window_ns=limits.window_ns,
            samples_min=limits.samples_min,
        )

    # ------------------------------------------------------------------ values

    def tick(self, now_ns: int) -> None:
        """Looks at what there is to see, every now and then."""
        if now_ns - self._looked_ns < LOOK_EVERY_NS:
            return
        self._looked_ns = now_ns
        try:
            self._look_at_all(now_ns)
        except Exception as error:
            # What was not looked at is looked at next time; what it guards goes on as it was.
            if repr(error) != self._defect:
                log.exception("a look at the guards failed: a defect")
            self._defect = repr(error)
        else:
            self._defect = ""

    def _look_at_all(self, now_ns: int) -> None:
        if levels := now_ns - self._levels_ns >= LEVELS_EVERY_NS:
            self._levels_ns = now_ns
            self._see_memory(now_ns)
        self._see(Name("held"), float(self._reviews_held()), now_ns)
        for tier, archive in self._archives.items():
            if levels:
                stats = archive.stats()
                self._see_levels(self._tiers[tier], stats, now_ns)
                self._set_admission(tier, stats.gauges.get("save_chance_wanted", 0.0))
            self._note_outcomes(self._tiers[tier], archive.take_outcomes(), now_ns)
            self._set_gates(self._tiers[tier], archive, now_ns)
        for tenant, tier in self._loads:
            self._look(Name("load", self._tiers[tier], tenant), now_ns)

    def _see(self, name: Name, value: float | None, now_ns: int) -> None:
        guard = self._guards[name]
        change = guard.see(value, now_ns)
        if change is not None:
            self._tell(GuardChange(_stats(name, guard), change.was))

    def _look(self, name: Name, now_ns: int) -> None:
        guard = self._guards[name]
        assert isinstance(guard, RateGuard)
        change = guard.look(now_ns)
        if change is not None:
            self._tell(GuardChange(_stats(name, guard), change.was))

    def _tell(self, change: GuardChange) -> None:
        for listener in self.listeners:
            listener(change)

    def _see_memory(self, now_ns: int) -> None:
        bound = memory_budget.tightest(memory_budget.read_text, self._groups)
        free_bytes = None if bound is None else float(bound.available_bytes)
        if bound is not None:
            guard, limits, total = self._memory, self.limits, bound.total_bytes
            guard.stop = limits.memory_free_stop_bytes or min(total // 128, MEMORY_BYTES_MAX)
            guard.warn = limits.memory_free_warn_bytes or MEMORY_WARNS * guard.stop
        self._see(Name("memory"), free_bytes, now_ns)
        self._pause_memory(self._memory.stopped)

    def _see_levels(self, tier: str, stats: ArchiveStats, now_ns: int) -> None:
        gauges = stats.gauges
        spare = gauges.get("spare_bytes", 0.0)
        guard, limits = self._guards[Name("bytes", tier)], self.limits
        guard.stop = limits.disk_free_stop_bytes or SPARE_SHARE * spare
        guard.warn = limits.disk_free_warn_bytes or SPARE_WARNS * guard.stop
        self._see(Name("bytes", tier), gauges.get("file_system_free_bytes"), now_ns)
        budget = gauges.get("endurance_day_bytes", 0.0)
        share = gauges.get("written_day_bytes", 0.0) / budget if budget else None
        self._see(Name("writes", tier), share, now_ns)

    def _note_outcomes(self, tier: str, outcomes: Outcomes, now_ns: int) -> None:
        for name, part, whole in (
            ("read_errors", outcomes.loads_failed, outcomes.loads_ended),
            ("write_errors", outcomes.saves_failed, outcomes.saves),
            ("corrupt", outcomes.loads_corrupt, outcomes.loads_ended),
        ):
            guard = self._guards[Name(name, tier)]
            assert isinstance(guard, RateGuard)
            if whole:
                guard.note(part, whole, now_ns, whole)
            self._look(Name(name, tier), now_ns)
        for space_id, (loads, corrupt) in outcomes.loads.items():
            if corrupt or space_id in self._spaces:
                self._note_space(tier, space_id, loads, corrupt, now_ns)

    def _note_space(self, tier: str, space_id: int, loads: int, corrupt: int, now_ns: int) -> None:
        limits = self.limits
        guard = self._spaces.get(space_id)
        if guard is None:
            guard = self._new_rate(0, limits.corrupt_stop_share)
            self._spaces[space_id] = guard
            if len(self._spaces) > SPACES_MAX:
                self._spaces.popitem(last=False)
        guard.note(corrupt, loads, now_ns, loads)
        samples = guard.samples
        if guard.look(now_ns) is None or not guard.stopped:
            return
        del self._spaces[space_id]
        words = f"{guard.value:.0%} of {samples} loads from {tier} came back damaged"
        if review := self._hold(space_id, Reason.MISS_CORRUPT, words):
            name = Name("corrupt", tier)
            told = _stats(name, guard)
            detail = f"space {space_id} is held, review {review}: {words}"
            self._tell(GuardChange(told, State.OK, detail))

    def _set_gates(self, tier: str, archive: GuardedArchive, now_ns: int) -> None:
        for gate, names in (
            (archive.reading, ("read_errors", "corrupt")),
            (archive.writing, ("bytes", "writes", "write_errors")),
        ):
            guards = [self._guards[Name(name, tier)] for name in names]
            if any(guard.stopped for guard in guards):
                gate.open_for(0)
            elif probing := [guard for guard in guards if guard.state is State.PROBE]:
                more = min(guard.take(TRIALS, now_ns) for guard in probing)
                before = 0 if gate.left == UNLIMITED else gate.left
                gate.open_for(min(before + more, TRIALS))
            elif gate.left != UNLIMITED:
                gate.open_for(UNLIMITED)

    # ------------------------------------------------------------------ what others ask

    def may_write(self, now_ns: int) -> bool:
        """Whether a client may bring blocks in."""
        return bool(self._memory.take(1, now_ns))

    def refuses(
        self, core: Core, session: Session, fingerprint: Fingerprint, now_ns: int
    ) -> Opening | None:
        """The refusal of an incomplete fingerprint that nobody holds yet, if too many are held."""
        # As of now: a burst of offers comes between two ticks.
        self._see(Name("held"), float(self._reviews_held()), now_ns)
        if self._held.state <= State.WARN:
            return None
        offer = core.explain_offer(session.tenant, session.group, fingerprint)
        if offer.verdict is not Verdict.HELD or offer.review_id or self._held.take(1, now_ns):
            return None
        detail = (
            f"{self._held.value:.0f} fingerprints wait for review already "
            "(setting: guards.held_stop)"
        )
        return offer._replace(
            verdict=Verdict.INCOMPATIBLE, reason=Reason.DECLINED_GUARD, layout=None, detail=detail
        )

    def loaded(self, tenant: str, tier: int, load_s: float, prefill_s: float, now_ns: int) -> None:
        """A tenant's client measured a load from this tier, and knows the time that prefilling the
        same tokens takes.
        """
        if not (0 < load_s < math.inf and 0 < prefill_s < math.inf):  # nor what is no number
            return
        guard = self._loads.get((tenant, tier))
        if guard is None:
            limits = self.limits
            guard = RateGuard(
                limits.load_warn_ratio,
                limits.load_stop_ratio,
                hold_ns=limits.hold_ns,
                window_ns=limits.window_ns,
                samples_min=limits.loads_min,
                trials=1,  # a request pays for it, and one tells
            )
            self._guards[Name("load", self._tiers[tier], tenant)] = guard
            self._loads[tenant, tier] = guard
        guard.note(load_s, prefill_s, now_ns)

    def declines(
        self, tenant: str, tiers: Iterable[int], now_ns: int, *, trying: bool
    ) -> frozenset[int]:
        """Those of `tiers` that this tenant is not advised to load from. trying: it would load from
        all of them now, which counts as a trial of those that are half-open.
        """
        guards = {tier: self._loads.get((tenant, tier)) for tier in tiers}
        return frozenset(
            tier
            for tier, guard in guards.items()
            if guard is not None and guard.state > State.WARN
            if not (trying and guard.take(1, now_ns))
        )

    def stats(self) -> tuple[GuardStats, ...]:
        """All guards."""
        return tuple(_stats(name, guard) for name, guard in self._guards.items())


def _stats(name: Name, guard: Guard) -> GuardStats:
    return GuardStats(
        name, guard.state, guard.value, guard.warn, guard.stop, guard.warnings, guard.stops
    )
