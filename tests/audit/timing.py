"""A command: can a tenant tell by the clock that another one has stored a prefix?

    python -m tests.audit.timing                     # 20 runs of 250 samples of each kind
    python -m tests.audit.timing --way tcp --seed 7

Tenant b times one call after the other, in an order by chance, for prompts that tenant a has
stored ("foreign"), that nobody has ("miss"), and that b itself has ("own"). All have as many keys,
and each kind as many prompts, each of them asked for once before anything is measured. A run
compares 250 + 250 times by the two-sample Kolmogorov-Smirnov test, the method by which sharing
between users was found at providers of models (Auditing Prompt Caching in Language Model APIs,
ICML 2025).

It passes if foreign and miss are not told apart (p > 0.001) in every run of every call, and own and
miss are (p < 1e-6) in every run of Acquire and Fetch, where a hit costs something: an audit that
cannot see that either has seen nothing. A Lookup takes as long for own hits. Where there is no
difference, p <= 0.001 comes up once in 1,000 tests all the same: of 20 runs of one call, one time
in 50. Print the seed, run it again, and look whether it is the same call. Time decides no test of
`make test`; there `tests/unit/store/test_same_work.py` compares the work itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import grpc

from tests.daemon import Daemon, make_daemon
from tests.rawclient import RawClient
from tests.tls_kit import Pki
from tests.torture import audit

RUNS = 20
SAMPLES = 250
PROMPTS = 8
"""Of each kind."""
BLOCKS = 256
WARM_UP = 20
"""Rounds before a call is measured."""
TOLD_APART_MIN = 1e-3
"""A p below it in any run: foreign hits and misses differ."""
SEEN_MAX = 1e-6
"""A p above it in any run: not even own hits were seen."""
CALLS = ("lookup", "acquire", "fetch")
SEEING = ("acquire", "fetch")
"""The calls in which own hits must be seen."""
KINDS = ("foreign", "miss", "own")
RESULT = Path("build/timing-audit.json")


class Compared(NamedTuple):
    """One run of one call: p of foreign against miss, and of own against miss; medians in us."""

    run: int
    call: str
    foreign_p: float
    own_p: float
    foreign_ks: float
    medians_us: dict[str, float]

    @property
    def passed(self) -> bool:
        seen = self.own_p < SEEN_MAX or self.call not in SEEING
        return self.foreign_p > TOLD_APART_MIN and seen


def compared(run: int, call: str, times: dict[str, list[float]]) -> Compared:
    """What the times of one run say."""
    statistic = {kind: audit.ks(times[kind], times["miss"]) for kind in ("foreign", "own")}
    p = {
        kind: audit.p_value(one, len(times[kind]), len(times["miss"]))
        for kind, one in statistic.items()
    }
    medians = {kind: sorted(some)[len(some) // 2] * 1e6 for kind, some in times.items()}
    return Compared(run, call, p["foreign"], p["own"], statistic["foreign"], medians)


@contextlib.contextmanager
def tenants(folder: Path, way: str) -> Iterator[tuple[Daemon, RawClient, RawClient]]:
    """A daemon; tenant a through its socket, tenant b by `way`."""
    pki = Pki(folder)
    settings = {"host.capacity_bytes": "256MiB"} | pki.settings("a", "b")
    named = {name.replace(".", "__"): value for name, value in settings.items()}
    with (
        make_daemon(folder, **named).start() as daemon,
        RawClient(daemon.data_sockets["a"]) as a,
        contextlib.ExitStack() as stack,
    ):
        wire: grpc.Channel | None = None
        if way == "tcp":
            wire = stack.enter_context(pki.channel(daemon.ready["tcp"], "b"))
        yield daemon, a, stack.enter_context(RawClient(daemon.data_sockets["b"], wire=wire))
        if daemon.stop() != 0:
            raise click.ClickException(f"the daemon did not end well:\n{daemon.log()}")


def measured(
    timed: audit.Timed, prompts: dict[str, list[list[bytes]]], samples: int, rng: random.Random
) -> dict[str, list[float]]:
    """Seconds of each call, by kind. One call a sample: the least of several would hide what only
    the first one shows.
    """
    times: dict[str, list[float]] = {kind: [] for kind in prompts}
    for round_ in range(WARM_UP + samples):
        for kind in rng.sample(list(prompts), len(prompts)):
            keys = rng.choice(prompts[kind])
            began = time.perf_counter()
            timed(keys)
            took_s = time.perf_counter() - began
            if round_ >= WARM_UP:
                times[kind].append(took_s)
    return times


def audited(way: str, runs: int, samples: int, rng: random.Random) -> Iterator[Compared]:
    """All runs of all calls, as they are measured."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-audit-") as name,
        tenants(Path(name), way) as (daemon, a, b),
        RawClient(daemon.data_sockets["b"]) as b_writes,
    ):
        prompts = {
            "foreign": [audit.put(a, rng, "a", BLOCKS) for _ in range(PROMPTS)],
            "miss": [[rng.randbytes(32) for _ in range(BLOCKS)] for _ in range(PROMPTS)],
            "own": [audit.put(b_writes, rng, "b", BLOCKS) for _ in range(PROMPTS)],
        }
        space = b.open(audit.MODEL).space_id

        def fetch(keys: list[bytes]) -> None:
            b.fetch(space, keys)  # with all its bytes, which is what own hits are seen by

        calls = audit.calls(b, space) | {"fetch": fetch}
        for call in CALLS:
            for keys in (keys for some in prompts.values() for keys in some):
                calls[call](keys)
        for run in range(1, runs + 1):
            for call in CALLS:
                yield compared(run, call, measured(calls[call], prompts, samples, rng))


@click.command()
@click.option("--runs", default=RUNS, show_default=True, type=click.IntRange(min=1))
@click.option("--samples", default=SAMPLES, show_default=True, type=click.IntRange(min=50))
@click.option("--seed", type=int, help="Of the order. Default: by chance; it is printed.")
@click.option("--way", type=click.Choice(["socket", "tcp"]), default="socket", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULT, show_default=True)
def main(runs: int, samples: int, seed: int | None, way: str, out: Path) -> None:
    """Time another tenant's hits against misses, and own hits against misses."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    click.echo(f"seed {seed}, {samples} + {samples} samples, tenant b by {way}")
    click.echo(f"{'run':>4} {'call':8} {'p foreign':>10} {'p own':>10}   medians in us: {KINDS}")
    found: list[Compared] = []
    gc.collect()
    gc.disable()
    for one in audited(way, runs, samples, random.Random(seed)):
        medians = " ".join(f"{one.medians_us[kind]:8.0f}" for kind in KINDS)
        mark = "" if one.passed else "  !"
        click.echo(
            f"{one.run:4} {one.call:8} {one.foreign_p:10.2g} {one.own_p:10.2g}   {medians}{mark}"
        )
        found.append(one)
        gc.collect()
    least = {call: min(one.foreign_p for one in found if one.call == call) for call in CALLS}
    most = {call: max(one.own_p for one in found if one.call == call) for call in CALLS}
    failed = [one for one in found if not one.passed]
    by_chance = 1 - (1 - TOLD_APART_MIN) ** len(found)
    result: dict[str, Any] = {
        "seed": seed,
        "way": way,
        "runs": runs,
        "samples": samples,
        "least_p_foreign_miss": least,
        "most_p_own_miss": most,
        "false_alarm_chance": by_chance,
        "failed": len(failed),
        "tests": [one._asdict() for one in found],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1))
    for call in CALLS:
        click.echo(f"{call}: least p of foreign {least[call]:.2g}, most p of own {most[call]:.2g}")
    click.echo(f"{len(failed)} of {len(found)} failed; by chance alone any would: {by_chance:.1%}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
