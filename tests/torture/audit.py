"""A timing audit: can a tenant tell by the clock that another has stored a prefix?

The two-sample Kolmogorov-Smirnov method: 250 + 250 timed calls, for keys that another tenant has
and for keys that nobody has; and, so that the audit can see at all, for keys of one's own. Time
decides nothing by itself: a difference counts only if it is large, and each time of three.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.wire.v1 import store_pb2 as pb
from tests.daemon import Daemon
from tests.e2e.stage import Prompt, model
from tests.rawclient import CALL_S, RawClient
from tests.torture.base import Job, Outcome

SAMPLES = 250
TURNS = 3
BLOCKS = 512
PROMPTS = 2
CALLS = 2
"""Of each sample; the shortest counts."""
LEAK_MIN = 0.4
"""Of the statistic, in each of three turns; at 250 samples p < 0.05 begins at 0.12."""
SEEN_MIN = 0.25
"""Own hits differ from misses by at least this in one of three turns, or nothing was audited."""
SEEING = "acquire"
"""The call in which a hit costs most: there own keys must be told from others."""
MODEL = model(name="audited")

Timed = Callable[[list[bytes]], None]


def ks(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sample Kolmogorov-Smirnov statistic: the largest distance of the distributions."""
    a, b = np.sort(np.asarray(first)), np.sort(np.asarray(second))
    both = np.concatenate([a, b])
    below_a = np.searchsorted(a, both, side="right") / len(a)
    below_b = np.searchsorted(b, both, side="right") / len(b)
    return float(np.max(np.abs(below_a - below_b)))


def p_value(statistic: float, first: int, second: int) -> float:
    """How likely so large a statistic is where there is no difference: the limit for large samples
    with Stephens's correction (Journal of the Royal Statistical Society B 32, 1970), good from
    about eight of each on.
    """
    size = np.sqrt(first * second / (first + second))
    terms = np.arange(1, 101)
    argument = (size + 0.12 + 0.11 / size) * statistic
    total = 2 * np.sum((-1.0) ** (terms - 1) * np.exp(-2 * (terms * argument) ** 2))
    return float(np.clip(total, 0.0, 1.0))


def audit(job: Job, daemon: Daemon, outcome: Outcome) -> None:
    """Tenant b times its calls for keys of its own, of tenant a, and of nobody."""
    samples = job.scale.of(SAMPLES, at_least=60)
    with (
        RawClient(daemon.data_sockets["a"]) as a,
        RawClient(daemon.data_sockets["b"]) as b,
    ):
        theirs = [put(a, job.rng, "a") for _ in range(PROMPTS)]
        own = [put(b, job.rng, "b") for _ in range(PROMPTS)]
        # As many and as old as the others: what is asked for the first time takes longer.
        never = [[job.rng.randbytes(32) for _ in range(BLOCKS)] for _ in range(PROMPTS)]
        prompts = {"own": own, "foreign": theirs, "never": never}
        space = b.open(MODEL).space_id
        for name, timed in calls(b, space).items():
            leaks: list[float] = []
            seen: list[float] = []
            for _ in range(TURNS):
                times = _sample(timed, prompts, samples, job.rng)
                leaks.append(ks(times["foreign"], times["never"]))
                seen.append(ks(times["own"], times["foreign"]))
                outcome.trials += 3 * samples
                if leaks[-1] < LEAK_MIN and (name != SEEING or max(seen) >= SEEN_MIN):
                    break
            leak = min(leaks)
            outcome.counts[f"ks_{name}_foreign_never_permille"] = round(leak * 1e3)
            outcome.counts[f"ks_{name}_own_foreign_permille"] = round(max(seen) * 1e3)
            p = p_value(leak, samples, samples)
            outcome.counts[f"ks_{name}_foreign_never_p_permille"] = round(p * 1e3)
            if len(leaks) == TURNS and leak >= LEAK_MIN:
                outcome.failed.append(f"{name}: time tells another's keys from none: {leaks}")
            if name == SEEING and max(seen) < SEEN_MIN:
                outcome.failed.append(f"{name}: time does not even tell own keys: {seen}")


def put(client: RawClient, rng: random.Random, tenant: str, blocks: int = BLOCKS) -> list[bytes]:
    """Stores a prompt by chance; its keys."""
    prompt = Prompt(MODEL, rng.randrange(1 << 30), blocks, tenant=tenant)
    client.put(client.open(MODEL).space_id, prompt.keys, prompt.rows())
    return list(prompt.keys)


def calls(client: RawClient, space: int) -> dict[str, Timed]:
    """What is timed, by name. What is leased ends by itself: a release would be timed, too."""

    def acquire(keys: list[bytes]) -> None:
        packed = b"".join(keys)
        request = pb.AcquireRequest(session=client.secret, space_id=space, keys=packed, ttl_ms=500)
        client.stub.Acquire(request, timeout=CALL_S)

    def lookup(keys: list[bytes]) -> None:
        client.lookup(space, keys)

    def explain(keys: list[bytes]) -> None:
        client.explain(space, keys[:16])

    def fetch(keys: list[bytes]) -> None:
        client.fetch(space, keys[:16])

    return {"lookup": lookup, "acquire": acquire, "explain": explain, "fetch": fetch}


def _sample(
    timed: Timed, prompts: dict[str, list[list[bytes]]], samples: int, rng: random.Random
) -> dict[str, list[float]]:
    """The kinds take turns in an order by chance, so that what else goes on hits all alike."""
    times: dict[str, list[float]] = {kind: [] for kind in prompts}
    for _ in range(samples):
        for kind in rng.sample(list(times), len(times)):
            keys = rng.choice(prompts[kind])
            times[kind].append(min(_took_s(timed, keys) for _ in range(CALLS)))
    return times


def _took_s(timed: Timed, keys: list[bytes]) -> float:
    began = time.perf_counter()
    timed(keys)
    return time.perf_counter() - began
