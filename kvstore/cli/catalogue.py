"""Known models, links and prefill fits (`models.json`), and what a user may write instead of them.

For `kvstore plan`. A name that is not there is an error that tells the nearest ones, never a guess.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import click

from kvstore.model.cost import PrefillCost
from kvstore.model.kv_bytes import AttentionLayers, ModelShape
from kvstore.model.seeds import SEEDS

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?(B|b|bit)?(?:/s|ps)?")
_PREFIX = {
    "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model's shape under its name; `note` says what the shape leaves out."""

    name: str
    kind: str
    shape: ModelShape
    note: str


@dataclass(frozen=True)
class LinkSpeed:
    """Bytes a second of a path: what its data sheet says, and what is usually reached."""

    name: str
    what: str
    theory: float
    usable: float
    writes: bool = False
    """A rate of writing: no load goes over it."""


@dataclass(frozen=True)
class Fit:
    """A prefill fit under the name "MODEL GPUS"."""

    name: str
    model: str
    cost: PrefillCost
    max_error_percent: float


@cache
def _document() -> dict[str, Any]:
    text = importlib.resources.files(__package__).joinpath("models.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def sources() -> dict[str, str]:
    """Where the figures come from, by kind."""
    return dict(_document()["sources"])


@cache
def models() -> tuple[Model, ...]:
    """All known models."""
    return tuple(
        Model(
            row["name"],
            row["kind"],
            ModelShape(tuple(AttentionLayers(**layers) for layers in row["attention"])),
            row.get("note", ""),
        )
        for row in _document()["models"]
    )


def model(name: str) -> Model:
    """The model with this name or alias, whatever the case; the part after a slash counts."""
    by_name = {_plain(known.name): known for known in models()}
    for row in _document()["models"]:
        for alias in row.get("aliases", ()):
            by_name[_plain(alias)] = by_name[_plain(row["name"])]
    wanted = _plain(name.rpartition("/")[2])
    if wanted not in by_name:
        raise _unknown("--model", name, [known.name for known in models()], by_name, wanted)
    return by_name[wanted]


@cache
def links() -> tuple[LinkSpeed, ...]:
    """All known links, in bytes a second."""
    return tuple(
        LinkSpeed(
            row["name"],
            row["what"],
            row["theory_gb_per_s"] * 1e9,
            row["usable_gb_per_s"][0] * 1e9,  # the low end: a plan should not be beaten by it
            row.get("writes", False),
        )
        for row in _document()["links"]
    )


def link(text: str) -> LinkSpeed:
    """A link by name, or a rate: "20" and "20GB/s" are 20e9 bytes a second; "20GiB/s", "400Gb/s"
    (bits) and "disk=3GB/s" (a name of one's own) are understood."""
    by_name = {_plain(known.name): known for known in links()}
    if _plain(text) in by_name:
        return by_name[_plain(text)]
    name, _, rate = text.rpartition("=")
    match = _RATE.fullmatch(rate.strip())
    if match is None:
        raise _unknown("--link", text, [known.name for known in links()], by_name, _plain(text))
    number, prefix, unit = match.groups()
    if prefix is None and unit is None:
        prefix = "G"
    rate_bytes = float(number) * (_PREFIX[prefix] if prefix else 1.0)
    if unit in ("b", "bit"):
        rate_bytes /= 8
    if not 0 < rate_bytes < math.inf:
        raise click.BadParameter(f"{text} is no rate above 0", param_hint="--link")
    return LinkSpeed(name or rate, "", rate_bytes, rate_bytes)


@cache
def fits() -> tuple[Fit, ...]:
    """All known prefill fits."""
    return tuple(Fit(seed.name, seed.model, seed.cost, seed.max_error_percent) for seed in SEEDS)


def fit(name: str) -> Fit:
    """The fit with this name, as "Llama-3.1-8B 1xH100"."""
    by_name = {_plain(known.name): known for known in fits()}
    if _plain(name) not in by_name:
        names = [known.name for known in fits()]
        raise _unknown("--prefill-seed", name, names, by_name, _plain(name))
    return by_name[_plain(name)]


def prefill(text: str) -> PrefillCost:
    """A cost written as "a,b": microseconds a token, microseconds a token squared."""
    try:
        a, b = (float(part) for part in text.split(","))
        cost = PrefillCost(a, b)
    except ValueError:
        cost = PrefillCost(math.nan, math.nan)
    if not cost.valid():
        raise click.BadParameter(
            f'{text!r} is not "a,b": microseconds a token and microseconds a token squared, such '
            'as "20.76,3.926e-4"',
            param_hint="--prefill",
        )
    return cost


def dtype(text: str) -> str:
    """The canonical name of a KV type; short names are understood."""
    return _DTYPES.get(text.lower(), text.lower())


def _plain(name: str) -> str:
    return re.sub(r"[\s_,-]+", "", name).lower()


def _unknown(
    option: str, name: str, names: list[str], by_plain: dict[str, Any], wanted: str
) -> click.BadParameter:
    near = difflib.get_close_matches(wanted, by_plain, n=3, cutoff=0.5)
    hint = ", ".join(dict.fromkeys([by_plain[match].name for match in near] or names))
    return click.BadParameter(
        f"{name!r} is not known; {'nearest' if near else 'known'}: {hint}",
        param_hint=option,
    )
