"""Clients that are frozen while they hold leases and wake when those are over; leases that are lost
with the daemon or by an operator; and a daemon that is frozen under its clients (field case P21).
"""

from __future__ import annotations

import signal
import time
from collections import Counter

import numpy as np

from kvstore.model.reasons import Reason
from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon
from tests.e2e.stage import Child, Prompt, model
from tests.rawclient import RawAdmin, RawClient, Refused
from tests.torture.base import Job, Outcome
from tests.torture.watching import START_S, check_rows, percentile, until

FROZEN = 2
"""Of each kind."""
TTL_MS = 150
EVICTED = 9 << 20
"""Bytes put over a frozen reader's blocks: more than the daemon holds."""
SENT = 512
"""Blocks read over the fd socket, in two pieces, each of more than the kernel takes at once."""
DEADLINE_MS = 200
LATE_S = 1.0
FROZEN_S = 8.0
BACK_S = 20.0
OPEN_CALL_S = 0.01
"""A call with an open breaker is promised within 1 ms."""


def frozen_clients(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    """They wake to a miss, never to other bytes, and alter nothing that is published."""
    for turn in range(job.scale.of(FROZEN)):
        _late_reader(daemon, outcome, 100 + turn)
        _late_writer(daemon, outcome, 200 + turn)
        _late_taker(daemon, outcome, 300 + turn)
        outcome.trials += 3


def _late_reader(daemon: Daemon, outcome: Outcome, seed: int) -> None:
    prompt = Prompt(model(), seed, blocks=16)
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        with Child("late_reader", daemon.data_socket, TTL_MS, seed) as child:
            leased = child.hear()["leased"]
            child.stop()
            if not until(lambda: not admin.stats().read_leases, 10.0):
                outcome.failed.append("a frozen reader's lease does not end")
            _overwrite(client, space, seed)
            evicted = sum(row is None for row in client.get(space, prompt.keys))
            child.wake()
            said = child.ask()
    findings = said["findings"]
    outcome.counts["woke_to_a_miss"] += findings.get("miss", 0)
    if findings.get("wrong"):
        outcome.wrong.append(f"a reader that woke late took {findings['wrong']} other blocks")
    if leased != 16 or findings.get("miss", 0) < evicted or not evicted:
        outcome.failed.append(f"a frozen reader: {leased} leased, {evicted} evicted, {findings}")
    if said["unknown"] != 1:
        outcome.failed.append("a reader that woke late was not told that its lease is over")


def _overwrite(client: RawClient, space: int, seed: int) -> None:
    for number in range(EVICTED // (256 * 4_096)):
        other = Prompt(model(), seed * 1_000 + number, blocks=256)
        client.put(space, other.keys, other.rows())


OVER = (Reason.LEASE_EXPIRED, Reason.GENERATION_CHANGED, Reason.UNAVAILABLE)
"""How a read ends whose lease has. GENERATION_CHANGED: a piece that was sent in time, whose slots
were written again before it was confirmed.
"""


def _late_taker(daemon: Daemon, outcome: Outcome, seed: int) -> None:
    """A read over the fd socket stands still, its lease ends, others get the slots, it goes on."""
    prompt = Prompt(model(), seed, blocks=SENT)
    with RawClient(daemon.data_socket) as client, RawClient(daemon.data_socket) as other:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        leased = client.acquire(space, prompt.keys)
        evicted: list[int] = []

        def meanwhile() -> None:
            client.release(leased.lease_id)
            _overwrite(other, other.open(model()).space_id, seed)
            evicted.append(sum(row is None for row in other.get(space, prompt.keys)))

        rows = client.read(leased, meanwhile)
    taken = [row for row in rows if row is not None]
    check_rows(outcome, prompt, taken, "sent after the end of its lease")
    outcome.counts["sent_and_disowned"] += SENT - len(taken)
    if leased.blocks != SENT or not evicted or not evicted[0]:
        outcome.failed.append(f"a slow taker: {leased.blocks} leased, {evicted} evicted")
    # UNAVAILABLE: one that stood still for a second after its lease was cut.
    if len(taken) >= SENT or client.read_end not in OVER:
        outcome.failed.append(f"a slow taker: {len(taken)} taken, then {client.read_end.name}")


def _late_writer(daemon: Daemon, outcome: Outcome, seed: int) -> None:
    prompt = Prompt(model(), seed, blocks=8)
    with RawClient(daemon.data_socket) as client:
        space = client.open(model()).space_id
        with Child("late_writer", daemon.data_socket, TTL_MS, seed) as child:
            wanted = child.hear()["wanted"]
            child.stop()
            if not until(lambda: client.put(space, prompt.keys, prompt.rows()).visible == 8, 10.0):
                outcome.failed.append("a frozen writer keeps its keys from others")
            child.wake()
            said = child.ask()["commit"]
            for _ in range(5):
                rows = client.get(space, prompt.keys)
                there = [row for row in rows if row is not None]
                check_rows(outcome, prompt, there, "after a late writer")
                if len(there) < 8:
                    outcome.failed.append(f"{8 - len(there)} blocks went with a late writer")
    if wanted != 8 or said != Reason.LEASE_EXPIRED.name:
        outcome.failed.append(f"a late writer: {wanted} wanted, its commit ended with {said}")


# ---------------------------------------------------------------- lost leases


def lost_leases(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    """A lease that ran out, was invalidated, or died with its daemon: a miss or the right bytes."""
    prompt = Prompt(model(), 7, blocks=8)
    with RawClient(daemon.data_socket) as client, RawAdmin(daemon.admin_socket) as admin:
        space = client.open(model()).space_id
        client.put(space, prompt.keys, prompt.rows())
        short = client.acquire(space, prompt.keys, ttl_ms=50)
        if not until(lambda: not admin.stats().read_leases, 10.0):
            outcome.failed.append("a lease does not run out")
        if client.release(short.lease_id).unknown != 1:
            outcome.failed.append("a lease that ran out is still known")
        leased = client.acquire(space, prompt.keys)
        view = client.acquire(space, prompt.keys, view=True)
        admin.call("Invalidate", space_id=space, keys=b"".join(prompt.keys), why="torture")
        for what in (leased, view):
            _right_or_none(client, what, prompt, outcome, "after an invalidation")
        if any(row is not None for row in client.get(space, prompt.keys)):
            outcome.wrong.append("an invalidated block was leased anew")
        client.release(leased.lease_id, view.lease_id)
        client.put(space, prompt.keys, prompt.rows())
        outcome.trials += 3
        kept = client.acquire(space, prompt.keys)
        client.copy(kept)  # maps what it will read without a daemon
        client.reserve(space, Prompt(model(), 8, blocks=4).keys)
        _die_and_return(daemon, client, kept, prompt, outcome)


def _die_and_return(
    daemon: Daemon, client: RawClient, kept: object, prompt: Prompt, outcome: Outcome
) -> None:
    sdk_config = ClientConfig(deadline_ms=2_000)
    with Client(daemon.data_socket, config=sdk_config) as sdk:
        space = sdk.space(prompt.fingerprint)
        before = space.fetch(prompt.keys)
        check_rows(outcome, prompt, np.asarray(before.data)[: before.blocks], "before the death")
        daemon.kill()
        _right_or_none(client, kept, prompt, outcome, "of a daemon that died")
        daemon.start(START_S)
        for call in (
            lambda: client.release(1),
            lambda: client.lookup(1, prompt.keys),
            lambda: client.reserve(1, prompt.keys),
        ):
            try:
                call()
                outcome.failed.append("a session of an earlier daemon is still known")
            except Refused as refused:
                outcome.counts[f"after_restart_{refused.reason.name}"] += 1
        began = time.monotonic()

        def works() -> bool:
            space.push(prompt.keys, np.stack(prompt.rows()))
            fetched = space.fetch(prompt.keys)
            rows = np.asarray(fetched.data)[: fetched.blocks]
            check_rows(outcome, prompt, rows, "after a restart")
            return fetched.blocks == len(prompt.keys)

        if not until(works, BACK_S):
            outcome.failed.append("the client's objects do not work with the restarted daemon")
        outcome.counts["works_after_restart_ms"] = round((time.monotonic() - began) * 1e3)
        outcome.trials += 1


def _right_or_none(
    client: RawClient, leased: object, prompt: Prompt, outcome: Outcome, what: str
) -> None:
    rows = client.copy(leased)  # type: ignore[arg-type]
    for index, row in enumerate(rows):
        if row is not None:
            finding = prompt.finding(index, row)
            if finding.name != "RIGHT":
                outcome.wrong.append(f"{what}: block {index}: {finding.value}")


# ---------------------------------------------------------------- a frozen daemon


def frozen_daemon(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    """Each call returns by its deadline, the breaker opens, and closes when the daemon wakes."""
    prompt = Prompt(model(), 9, blocks=8)
    frozen_s = max(2.0, FROZEN_S * job.scale)
    seconds: dict[str, list[float]] = {}
    reasons: Counter[Reason] = Counter()
    with Client(daemon.data_socket, config=ClientConfig(deadline_ms=DEADLINE_MS)) as client:
        space = client.space(prompt.fingerprint)

        def works() -> bool:
            fetched = space.fetch(prompt.keys, deadline_ms=2_000)
            rows = np.asarray(fetched.data)[: fetched.blocks]
            check_rows(outcome, prompt, rows, "a daemon that was frozen")
            return fetched.blocks == len(prompt.keys)

        space.push(prompt.keys, np.stack(prompt.rows()), deadline_ms=5_000)
        if not works():
            outcome.failed.append("nothing is there before the freeze")
        daemon.signal(signal.SIGSTOP)
        try:
            end = time.monotonic() + frozen_s
            while time.monotonic() < end:
                began = time.monotonic()
                fetched = space.fetch(prompt.keys)
                took = time.monotonic() - began
                reasons[fetched.reason] += 1
                kind = "open" if fetched.reason is Reason.BREAKER_OPEN else "closed"
                seconds.setdefault(kind, []).append(took)
                rows = np.asarray(fetched.data)[: fetched.blocks]
                check_rows(outcome, prompt, rows, "a frozen daemon")
                if took > DEADLINE_MS / 1e3 + LATE_S:
                    outcome.failed.append(f"a call beside a frozen daemon took {took:.2f} s")
                time.sleep(0.01)
        finally:
            daemon.signal(signal.SIGCONT)
        began = time.monotonic()
        if not until(works, BACK_S):
            outcome.failed.append("the client does not find the daemon that woke, or its blocks")
        outcome.counts["works_after_thaw_ms"] = round((time.monotonic() - began) * 1e3)
    outcome.trials += sum(reasons.values())
    slow, fast = seconds.get("closed", [0.0]), seconds.get("open", [])
    outcome.counts["frozen_call_max_ms"] = round(max(slow) * 1e3)
    outcome.counts["breaker_open_calls"] = len(fast)
    if not fast:
        outcome.failed.append(f"the breaker never opened: {dict(reasons)}")
        return
    outcome.counts["breaker_open_call_median_us"] = round(percentile(fast, 50) * 1e6)
    if percentile(fast, 50) > OPEN_CALL_S:
        outcome.failed.append(f"with an open breaker a call takes {percentile(fast, 50) * 1e3} ms")
