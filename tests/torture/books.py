"""Stage L: what the daemon counts is what happened, and no jump of the wall clock ends anything.

A trial: a script of look-ups whose hits and misses are known, and the counters compared with them;
then a lease and a reservation are taken, the wall clock jumps by up to ten days either way, and
both hold as long as they were given for, and no longer. Now and then the daemon restarts with its
clock where it is: all that was durable is there, and no age and no sum is negative.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

from kvstore.model.reasons import Reason
from tests.daemon import Daemon
from tests.e2e.stage import BLOCK_TOKENS, Prompt, model
from tests.rawclient import RawAdmin, RawClient, Refused, reason
from tests.torture import debug_daemon, wall
from tests.torture.base import Job, Outcome
from tests.torture.daemons import daemon_of
from tests.torture.oracle import Client, Oracle, check_durable, until_loaded

TRIALS = 40
RESTART_EVERY = 10
BLOCKS = 6
TTL_MS = 400
HOLD_S = 0.15
"""How long after a jump both must be there: several ticks of the daemon's clock, and less than they
were given for.
"""
TICKS_S = 0.5
"""Ten times what a daemon may need to notice an end."""
LATE_S = 5.0
DAYS_S = 86_400
JUMPS_S = (10 * DAYS_S, -10 * DAYS_S, 3_600, -3_600, 0)
MODEL = model(name="books")


class Books:
    name = "books"
    what = "counters against a script, and leases while the wall clock jumps"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        off = job.folder / "off"
        off.write_text("0")
        daemon = daemon_of(
            job,
            job.folder,
            host__capacity_bytes="16MiB",
            disk__path=str(job.folder / "disk"),
            disk__capacity_bytes="64MiB",
            limits__lease_ttl_ms=TTL_MS,
        )
        daemon.module = debug_daemon.__name__
        daemon.environ[wall.VARIABLE] = str(off)
        oracle = Oracle(outcome)
        prompts: list[Prompt] = []
        trials = job.scale.of(TRIALS, at_least=4)
        with daemon:
            daemon.start()
            for trial in range(trials):
                prompt = Prompt(MODEL, job.rng.randrange(2**31), BLOCKS)
                prompts.append(prompt)
                off.write_text(str(job.rng.choice(JUMPS_S)))
                with Client(daemon, oracle) as client:
                    client.put(prompt, durable=True)
                _count(daemon, outcome, prompt, job.rng.randrange(1, 4))
                off.write_text("0")
                _hold(daemon, outcome, oracle, off, job.rng)
                outcome.trials += 1
                if trial % RESTART_EVERY == RESTART_EVERY - 1 or trial == trials - 1:
                    _restart(daemon, outcome, oracle, prompts)
                job.progress(trial + 1, trials, outcome)
                if job.enough(outcome):
                    break
        return outcome


# ---------------------------------------------------------------- counts


def _count(daemon: Daemon, outcome: Outcome, prompt: Prompt, times: int) -> None:
    """Look-ups of which each finds a known part, and what the counters have grown by."""
    absent = Prompt(MODEL, 1, 2).keys
    with RawClient(daemon.data_socket) as raw, RawAdmin(daemon.admin_socket) as admin:
        space = raw.open(MODEL).space_id
        before = admin.stats().counters
        asked = found = 0
        for hit in range(times):
            present = prompt.keys[: hit + 2]
            raw.lookup(space, [*present, *absent])
            asked += len(present) + len(absent)
            found += len(present)
        raw.lookup(space, absent)
        asked += len(absent)
        after = admin.stats().counters
    grown = {
        "kvstore_lookups_total": times + 1,
        "kvstore_lookup_tokens_total": asked * BLOCK_TOKENS,
        "kvstore_hit_tokens_total": found * BLOCK_TOKENS,
    }
    for name, expected in grown.items():
        by = _sum(after, name) - _sum(before, name)
        if by != expected:
            outcome.failed.append(f"{name} grew by {by:g}, not {expected}")
    outcome.counts["counters compared"] += len(grown)


def _sum(counters: Mapping[str, float], name: str) -> float:
    return sum(value for key, value in counters.items() if key.partition("{")[0] == name)


# ---------------------------------------------------------------- leases


def _hold(daemon: Daemon, outcome: Outcome, oracle: Oracle, off: Path, rng: random.Random) -> None:
    """A lease and a reservation outlast a jump, and end when they were to end."""
    kept = Prompt(MODEL, 2, BLOCKS)
    given = Prompt(MODEL, rng.randrange(2**31), BLOCKS)
    jump_s = rng.choice(JUMPS_S)
    with Client(daemon, oracle) as client:
        client.put(kept)
    with RawClient(daemon.data_socket) as raw, RawAdmin(daemon.admin_socket) as admin:
        space = raw.open(MODEL).space_id
        leased = raw.acquire(space, kept.keys)
        reserved = raw.reserve(space, given.keys)
        began = time.monotonic()
        off.write_text(str(jump_s))
        time.sleep(HOLD_S)
        stats = admin.stats()
        if time.monotonic() - began < TTL_MS / 1e3:
            held = stats.read_leases, stats.write_leases
            if held != (1, 1):
                outcome.failed.append(f"a jump of {jump_s} s left {held} leases of 1, 1")
            outcome.counts["leases held across a jump"] += 1
        if not _read_leases_end(admin):
            outcome.failed.append(f"{LATE_S} s after a jump of {jump_s} s leases had not ended")
        raw.release(leased.lease_id)
        time.sleep(max(0.0, began + TTL_MS / 1e3 + TICKS_S - time.monotonic()))
        try:
            said = reason(raw.commit(reserved.lease_id).reason)
        except Refused as error:
            said = error.reason
        if said is Reason.OK:
            outcome.failed.append("a reservation was committed after its end")
    off.write_text("0")


def _read_leases_end(admin: RawAdmin) -> bool:
    end = time.monotonic() + TTL_MS / 1e3 + LATE_S
    while admin.stats().read_leases:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# ---------------------------------------------------------------- restarts


def _restart(daemon: Daemon, outcome: Outcome, oracle: Oracle, prompts: list[Prompt]) -> None:
    if daemon.stop() != 0:
        outcome.failed.append("it did not end well")
    oracle.restarted()
    daemon.start()
    until_loaded(daemon, oracle)
    with Client(daemon, oracle) as client:
        outcome.counts["durable blocks read"] += check_durable(client, prompts)
        numbers = client.admin.stats().counters
    negative = sorted(name for name, value in numbers.items() if value < 0)
    if negative:
        outcome.failed.append(f"negative: {', '.join(negative)}")
