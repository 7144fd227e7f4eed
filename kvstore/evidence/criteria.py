"""Criteria: what has to be seen for a verdict, written down and digested before it is seen.

A TOML file, and beside it FILE.digest, which says with what content and when it was fixed. Without
both, or where the content is another one by now, or was fixed after the records began, there is no
verdict. The digest guards against forgetting, not against forgers.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "ABSOLUTE",
    "BOUNDS",
    "METRICS",
    "STATISTICS",
    "Bound",
    "Criteria",
    "CriteriaError",
    "Criterion",
    "Fixed",
    "fix",
    "fixed_of",
    "read_criteria",
]

METRICS: Final = {
    "first_token_ms": "ms",
    "prefill_ms": "ms",
    "load_ms": "ms",
    "computed_tokens": "tokens",
    "loaded_bytes": "bytes",
    "failed": "share",
    "cost": "currency",
}
"""What is known of each request, and its unit. `cost`: engine time, and of served requests their
share of what the store itself cost."""
ABSOLUTE: Final = frozenset({"failed", "load_ms", "loaded_bytes"})
"""Compared by their difference: where nothing is loaded or fails, a ratio says nothing."""
STATISTICS: Final = ("mean", "p50", "p99", "worst")
BOUNDS: Final = (
    *("audit_mismatches", "holds", "cpu_cores", "ram_bytes", "ssd_bytes_per_request"),
    *("store_cost_per_1000_requests",),
)
"""What is known of the daemons, over the whole time of the records."""

Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class CriteriaError(Exception):
    """The criteria cannot be used; the text says why."""


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much has to be seen. requests_min: on each side. coverage_min: share of the look-ups that
    were reported. seed, resamples: of the bootstrap."""

    requests_min: Annotated[int, msgspec.Meta(ge=2)] = 200
    confidence: Share = 0.95
    resamples: Annotated[int, msgspec.Meta(ge=100, le=100_000)] = 2_000
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**32)] = 1
    coverage_min: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.8


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What things cost, in `currency`. engine_hour: of the accelerators that compute a prefill."""

    currency: str = "USD"
    engine_hour: Price = 0.0
    cpu_core_hour: Price = 0.0
    ram_gib_hour: Price = 0.0
    ssd_tib_written: Price = 0.0


class Review(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When to look again at the latest."""

    after_days: Annotated[int, msgspec.Meta(ge=1, le=3_650)] = 30


class Criterion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One comparison. metric: NAME.STATISTIC. Changes are applied / baseline - 1; of `ABSOLUTE`
    the difference in the metric's unit. Met: the whole interval is at most keep_at_most. Broken:
    the whole interval is above roll_back_above.
    """

    metric: str
    keep_at_most: float
    roll_back_above: float = 0.0


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of the daemons that may not be higher; one that is rolls back, whatever else."""

    metric: str
    at_most: float


class Criteria(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    name: str
    criterion: Annotated[list[Criterion], msgspec.Meta(min_length=1)]
    bound: list[Bound] = []
    sample: Sample = Sample()
    prices: Prices = Prices()
    review: Review = Review()


class Fixed(NamedTuple):
    """When and with what content criteria were fixed. problem: why not: no verdict."""

    digest: str
    fixed_at_s: float
    problem: str = ""


def read_criteria(path: Path) -> tuple[Criteria, str]:
    """The criteria and the digest of the file. CriteriaError: not there, or not understood."""
    try:
        data = path.read_bytes()
        raw: dict[str, Any] = tomllib.loads(data.decode())
        criteria = msgspec.convert(raw, Criteria)
    except OSError as error:
        raise CriteriaError(f"{path.name}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise CriteriaError(f"{path.name}: {error}") from error
    _check_finite(raw, "")
    for one in criteria.criterion:
        _check_criterion(one)
    for bound in criteria.bound:
        if bound.metric not in BOUNDS:
            raise CriteriaError(f"bound {bound.metric!r} is none of {', '.join(BOUNDS)}")
    return criteria, digest_of(data)


def _check_finite(value: Any, name: str) -> None:
    """TOML has inf and nan: no comparison with the one fails, none with the other holds."""
    if isinstance(value, float) and not math.isfinite(value):
        raise CriteriaError(f"{name} is {value}: take a number")
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value, 1):
            _check_finite(one, f"{name} {key}".strip())


def _check_criterion(one: Criterion) -> None:
    name, _, statistic = one.metric.partition(".")
    if name not in METRICS or statistic not in STATISTICS:
        known = f"{', '.join(METRICS)}, each with .{', .'.join(STATISTICS)}"
        raise CriteriaError(f"metric {one.metric!r} is none of {known}")
    if statistic == "worst":
        raise CriteriaError(f"{one.metric}: the worst of a sample has no interval; take p99")
    if name == "failed" and statistic != "mean":
        raise CriteriaError(f"{one.metric}: take failed.mean, the share that failed")
    if one.roll_back_above < one.keep_at_most:
        raise CriteriaError(f"{one.metric}: roll_back_above is below keep_at_most")


def digest_of(data: bytes) -> str:
    """How content is named here."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_path(path: Path) -> Path:
    """Where it is said that a file of criteria was fixed."""
    return path.with_name(f"{path.name}.digest")


def fix(path: Path, now_s: float, version: str) -> Fixed:
    """Fixes the criteria as they are now; those that are fixed with this content stay as they are.
    CriteriaError.
    """
    _, digest = read_criteria(path)
    before = fixed_of(path, digest)
    if not before.problem:
        return before
    row = {"digest": digest, "fixed_at_s": now_s, "kvstore": version}
    digest_path(path).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return Fixed(digest, now_s)


def fixed_of(path: Path, digest: str) -> Fixed:
    """Whether and when the criteria with this digest were fixed."""
    try:
        row = json.loads(digest_path(path).read_text(encoding="utf-8"))
        said, at_s = str(row["digest"]), float(row["fixed_at_s"])
    except OSError:
        return Fixed(digest, 0.0, "the criteria were not fixed: run `kvstore report --fix` first")
    except (ValueError, KeyError, TypeError):
        return Fixed(digest, 0.0, f"{digest_path(path).name} is damaged")
    if said != digest:
        return Fixed(digest, at_s, "the criteria were changed after they were fixed")
    return Fixed(digest, at_s)
