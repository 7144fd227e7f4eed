"""The report as plain values for JSON: what was compared, what came of it, and on what it rests."""

from __future__ import annotations

import itertools
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvstore.evidence.compare import Change, change_of, side_of
from kvstore.evidence.criteria import ABSOLUTE, METRICS, STATISTICS, Criteria, Fixed
from kvstore.evidence.records import Records, Request, Usage, bucket_of
from kvstore.evidence.verdict import Verdict, decide

__all__ = ["FORMAT", "make_report"]

FORMAT: Final = 1
TENANTS_MAX: Final = 20
STRATUM_METRICS: Final = ("first_token_ms.mean", "first_token_ms.p99", "computed_tokens.mean")
HOUR_S: Final = 3_600.0
DAY_S: Final = 86_400.0
OVERLAP_MIN: Final = 0.5
"""Share of the shorter side's time in which the other side ran, too."""


class Store(NamedTuple):
    """What the daemons used over the time of the records. Rates are per second of that time."""

    seconds: float
    cpu_s: float
    ram_bytes: float
    ram_byte_s: float
    ssd_bytes: float
    mismatches: Mapping[str, int]
    reviews: Mapping[str, int]
    known: bool


def make_report(
    criteria: Criteria,
    fixed: Fixed,
    records: Records,
    now_s: float,
    told: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """now_s: seconds since 1970. told: hears what is being computed."""
    baseline = [one for one in records.requests if not one.applied]
    applied = [one for one in records.requests if one.applied]
    store = _used(records.usage)
    worth = _Worth(criteria, store, len(applied))
    changes: dict[str, Change] = {}
    for name in METRICS:
        for statistic in STATISTICS:
            told(f"{name}.{statistic}")
            metric = f"{name}.{statistic}"
            changes[metric] = _change(criteria, worth, metric, metric, baseline, applied)
    balance = _change(
        criteria, worth, "prompt_tokens.mean", "prompt_tokens.mean", baseline, applied
    )
    strata = list(_strata(criteria, worth, baseline, applied, told))
    figures = _figures(store, worth, len(applied))
    coverage = _coverage(records)
    problem = fixed.problem
    if not problem and records.first_s and fixed.fixed_at_s > records.first_s:
        problem = "the criteria were fixed after the records began"
    verdict = decide(criteria, problem, changes, figures, balance, coverage)
    every = [(("all", "all"), one) for one in changes.values()] + strata
    return {
        "format": FORMAT,
        "name": criteria.name,
        "made_at": _date(now_s),
        "made_with": {
            "kvstore": kvstore.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "verdict": _verdict(verdict),
        "criteria": {
            "digest": fixed.digest,
            "fixed_at": _date(fixed.fixed_at_s) if fixed.fixed_at_s else None,
            "problem": problem or None,
            "content": _content(criteria),
        },
        "seed": criteria.sample.seed,
        "sources": _sources(records),
        "daemons": records.starts,
        "samples": _samples(records, baseline, applied, coverage),
        "balance": _as_fields(balance),
        "changes": [_as_fields(one) for one in changes.values()],
        "strata": [{"by": by, "which": which, **_as_fields(one)} for (by, which), one in strata],
        "improved": [_named(where, one) for where, one in every if one.improved],
        "worse": [_named(where, one) for where, one in every if one.worse],
        "withheld": {"tokens": records.withheld_tokens, "saved_ms": records.withheld_ms},
        "resources": {**figures, "seconds": store.seconds, "known": store.known},
        "holds": {
            "audit_mismatches": sum(store.mismatches.values()),
            "by_instance": dict(store.mismatches),
            "reviews": dict(store.reviews),
        },
        "prices": _content(criteria)["prices"],
        "limits": _limits(criteria, records, baseline, applied, store, len(every)),
        "rollback": {
            "setting": "serve.share",
            "value": 0,
            "effect": "nothing is loaded any more; look-ups, pushes and records go on",
            "from_config": sorted({str(one.get("config_digest")) for one in records.starts}),
        },
        "next_review": {
            "at_the_latest": _date(now_s + criteria.review.after_days * DAY_S),
            "or_when": [
                "the daemon's settings or version change",
                "the criteria change",
                "the engine, its model or its hardware change",
                "an audit finds a mismatch, or a fingerprint is held",
                "the traffic's prompt lengths or tenants change",
            ],
            "told_by": "kvstore report --check RECORD",
        },
    }


# ---------------------------------------------------------------- values of a request


class _Worth:
    """Values of requests, by metric; what was not measured is left out."""

    def __init__(self, criteria: Criteria, store: Store, applied: int) -> None:
        self._prices = criteria.prices
        self.store_cost = self._store_cost(store)
        self._store_share = self.store_cost / applied if applied else 0.0

    def _store_cost(self, store: Store) -> float:
        prices = self._prices
        return (
            store.cpu_s / HOUR_S * prices.cpu_core_hour
            + store.ram_byte_s / (1 << 30) / HOUR_S * prices.ram_gib_hour
            + store.ssd_bytes / (1 << 40) * prices.ssd_tib_written
        )

    def values(self, name: str, requests: Iterable[Request]) -> NDArray[np.float64]:
        found = (self._value(name, one) for one in requests)
        return np.array([one for one in found if one is not None], np.float64)

    def _value(self, name: str, one: Request) -> float | None:
        if name == "cost":
            busy_ms = one.prefill_ms or one.first_token_ms
            engine = busy_ms / 1e3 / HOUR_S * self._prices.engine_hour
            return engine + (self._store_share if one.applied else 0.0) if busy_ms else None
        if name in ("first_token_ms", "prefill_ms"):
            measured = one.first_token_ms if name == "first_token_ms" else one.prefill_ms
            # A request that failed has no first token; its time would make the side look fast.
            return measured if measured and not one.failed else None
        return float(getattr(one, name))


def _change(
    criteria: Criteria,
    worth: _Worth,
    metric: str,
    name: str,
    baseline: Sequence[Request],
    applied: Sequence[Request],
) -> Change:
    """`name` is what the draws are seeded with; `metric` says what is compared."""
    kind, _, statistic = metric.partition(".")
    sample = criteria.sample
    change = change_of(
        name,
        worth.values(kind, baseline),
        worth.values(kind, applied),
        statistic=statistic,
        absolute=kind in ABSOLUTE,
        confidence=sample.confidence,
        resamples=sample.resamples,
        seed=sample.seed,
    )
    return change._replace(metric=metric)


Where = tuple[str, str]


def _strata(
    criteria: Criteria,
    worth: _Worth,
    baseline: Sequence[Request],
    applied: Sequence[Request],
    told: Callable[[str], None],
) -> Iterable[tuple[Where, Change]]:
    tenants = Counter(one.tenant for one in (*baseline, *applied))
    shown = {name for name, _ in tenants.most_common(TENANTS_MAX)}
    kinds: list[tuple[str, Callable[[Request], str]]] = [
        ("tenant", lambda one: one.tenant if one.tenant in shown else "others"),
        ("prompt", lambda one: bucket_of(one.prompt_tokens)),
        ("tier", lambda one: one.tier),
    ]
    for by, key in kinds:
        for which in sorted({key(one) for one in (*baseline, *applied)}):
            sides = [[one for one in side if key(one) == which] for side in (baseline, applied)]
            for metric in STRATUM_METRICS:
                told(f"{by} {which}: {metric}")
                yield (
                    (by, which),
                    _change(criteria, worth, metric, f"{by}/{which}/{metric}", *sides),
                )


# ---------------------------------------------------------------- the daemons


def _used(usage: Mapping[str, Sequence[Usage]]) -> Store:
    seconds = cpu_s = ram_bytes = ram_byte_s = ssd_bytes = 0.0
    mismatches: Counter[str] = Counter()
    reviews: Counter[str] = Counter()
    for instance, unsorted in usage.items():
        rows = sorted(unsorted, key=lambda one: one.at_s)
        first, last = rows[0], rows[-1]
        seconds += last.at_s - first.at_s
        cpu_s += last.cpu_s - first.cpu_s
        ssd_bytes += last.ssd_written_bytes - first.ssd_written_bytes
        ram_bytes = max(ram_bytes, *(one.rss_bytes for one in rows))
        for one, following in itertools.pairwise(rows):
            ram_byte_s += one.rss_bytes * (following.at_s - one.at_s)
        mismatches[instance] = last.mismatches
        # Decisions outlive a daemon and are told again by the next: the most that one has seen.
        for state, count in last.reviews.items():
            reviews[state] = max(reviews[state], count)
    return Store(
        seconds, cpu_s, ram_bytes, ram_byte_s, ssd_bytes, mismatches, dict(reviews), bool(usage)
    )


def _figures(store: Store, worth: _Worth, applied: int) -> dict[str, float]:
    """What is known: a daemon that recorded itself once has used an unknown amount since."""
    if not store.known:
        return {}
    found = {
        "audit_mismatches": float(sum(store.mismatches.values())),
        "holds": float(sum(store.reviews.values())),
        "ram_bytes": store.ram_bytes,
    }
    if store.seconds > 0:
        requests = max(1, applied)
        found |= {
            "cpu_cores": store.cpu_s / store.seconds,
            "ssd_bytes_per_request": store.ssd_bytes / requests,
            "store_cost_per_1000_requests": worth.store_cost / requests * 1_000,
        }
    return found


def _coverage(records: Records) -> dict[str, float]:
    """Reports a look-up, by side: at most 1."""
    reported = Counter(one.applied for one in records.requests)
    return {
        name: min(1.0, reported[side] / records.lookups[side])
        for side, name in ((False, "baseline"), (True, "applied"))
        if records.lookups[side]
    }


# ---------------------------------------------------------------- words


def _samples(
    records: Records,
    baseline: Sequence[Request],
    applied: Sequence[Request],
    coverage: Mapping[str, float],
) -> dict[str, Any]:
    return {
        side: {
            "requests": len(requests),
            "lookups": records.lookups[side == "applied"],
            "reported": coverage.get(side),
            "failed": sum(one.failed for one in requests),
            "from": _date(requests[0].at_s) if requests else None,
            "to": _date(requests[-1].at_s) if requests else None,
            "first_token_ms": _plain(
                side_of(
                    np.array([one.first_token_ms for one in requests if one.first_token_ms])
                )._asdict()
            ),
        }
        for side, requests in (("baseline", baseline), ("applied", applied))
    } | {"arms": dict(records.arms)}


def _limits(
    criteria: Criteria,
    records: Records,
    baseline: Sequence[Request],
    applied: Sequence[Request],
    store: Store,
    comparisons: int,
) -> list[str]:
    by_chance = comparisons * (1 - criteria.sample.confidence)
    found = [
        "the figures of requests are the engines' own",
        "requests are taken to be independent: where conversations are long, intervals are narrow",
        "held-out requests push what they compute: they warm the store that others are served from",
        f"of {comparisons} intervals, about {by_chance:.0f} miss by chance",
        "looking often and stopping at a good moment is not corrected for",
    ]
    if baseline and applied and _overlap(baseline, applied) < OVERLAP_MIN:
        found.append("the sides ran at different times: traffic may have changed in between")
    if not store.known:
        found.append("no daemon recorded its own use: costs are the engines' alone")
    elif not store.seconds:
        found.append("no daemon recorded its own use twice: costs are the engines' alone")
    digests = {one.get("config_digest") for one in records.starts}
    if len(digests) > 1:
        found.append(f"the daemons ran with {len(digests)} different settings")
    versions = sorted({str(one.get("kvstore")) for one in records.starts})
    if len(versions) > 1:
        found.append(f"the daemons had different versions: {', '.join(versions)}")
    unmeasured = sum(not one.first_token_ms and not one.failed for one in records.requests)
    if unmeasured:
        found.append(f"{unmeasured} requests have no time to the first token")
    damaged = sum(one.damaged for one in records.sources)
    if damaged:
        found.append(f"{damaged} damaged lines were left out")
    return found


def _overlap(one: Sequence[Request], other: Sequence[Request]) -> float:
    first, last = max(one[0].at_s, other[0].at_s), min(one[-1].at_s, other[-1].at_s)
    shorter = min(one[-1].at_s - one[0].at_s, other[-1].at_s - other[0].at_s)
    return 1.0 if shorter <= 0 <= last - first else max(0.0, last - first) / max(shorter, 1e-9)


def _sources(records: Records) -> list[dict[str, Any]]:
    return [
        {
            "path": one.path,
            "digest": one.digest,
            "bytes": one.size_bytes,
            "from": _date(one.first_s) if one.first_s else None,
            "to": _date(one.last_s) if one.last_s else None,
            "lines": one.lines,
            "damaged_lines": one.damaged,
        }
        for one in records.sources
    ]


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "word": verdict.word,
        "reasons": list(verdict.reasons),
        "judged": [one._asdict() for one in verdict.judged],
    }


def _named(where: Where, change: Change) -> str:
    by, which = where
    place = "" if by == "all" else f" ({by} {which})"
    return (
        f"{change.metric}{place}: {change.shown(change.change)} [{change.interval}], "
        f"{change.baseline_requests} and {change.applied_requests} requests"
    )


def _as_fields(change: Change) -> dict[str, Any]:
    shown = {"shown": change.shown(change.change), "interval": change.interval}
    return _plain({**change._asdict(), **shown})


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


def _content(criteria: Criteria) -> dict[str, Any]:
    import msgspec

    built: dict[str, Any] = msgspec.to_builtins(criteria)
    return built


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="seconds")
