"""The fingerprint: what has to agree before stored KV may be reused, field by field.

Four groups: identity (which model made it), geometry (its shape), encoding (how values became
bytes) and placement (how ranks shared them). It promises one canonical form: equal fingerprints
have equal digests in every process, and a difference in any one field gives another digest and
names that field. A required field that is absent is never guessed: `missing` names it, and the
offer is held. None means absent; whether that has a definite meaning (no adapter) or not (unknown
revision) is decided here.

Engines build it, the daemon compares it, the client checks answers against its digest. Values are
immutable.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from kvstore.model.fields import (
    CANONICAL_ORDERS,
    NO_CPU_ISA,
    ORDER_HEADS,
    ORDER_LATENT,
    UNIT_SCALES,
    Encoding,
    Geometry,
    Group,
    Identity,
    Placement,
    Value,
    attention_kind,
    bad_field,
    check_name,
)
from kvstore.model.framing import frame

__all__ = [
    "CANONICAL_ORDERS",
    "CONVERTIBLE_FIELDS",
    "FIELDS",
    "NO_CPU_ISA",
    "ORDER_HEADS",
    "ORDER_LATENT",
    "UNIT_SCALES",
    "Compatibility",
    "Difference",
    "Encoding",
    "Fingerprint",
    "Geometry",
    "Identity",
    "Placement",
    "Value",
    "Verdict",
    "attention_kind",
    "check_name",
    "compare",
]


class Verdict(enum.Enum):
    """The answer of the compatibility check."""

    MATCH = "match"
    CONVERTIBLE = "convertible"
    INCOMPATIBLE = "incompatible"
    HELD = "held"


@dataclass(frozen=True)
class Difference:
    """One field that differs. `field` is dotted, such as "identity.weights_revision"."""

    field: str
    stored: Value
    offered: Value
    group: str

    def __str__(self) -> str:
        return f"{self.field}: stored {self.stored!r}, offered {self.offered!r}"


@dataclass(frozen=True)
class Compatibility:
    """A verdict and all fields that differ, in the order of the groups."""

    verdict: Verdict
    differences: tuple[Difference, ...]


GROUPS = ("identity", "geometry", "encoding", "placement")

_FIELD_TYPES: dict[str, type[Group]] = {
    "identity": Identity,
    "geometry": Geometry,
    "encoding": Encoding,
    "placement": Placement,
}

FIELDS: tuple[str, ...] = tuple(
    f"{group}.{field.name}"
    for group, kind in _FIELD_TYPES.items()
    for field in dataclasses.fields(kind)  # type: ignore[arg-type]
)
"""All fields by dotted name."""

CONVERTIBLE_FIELDS: frozenset[str] = frozenset(
    name for name in FIELDS if name.startswith(("encoding.", "placement."))
)
"""The fields that a converter may bridge; a difference in any other is incompatible for good."""


@dataclass(frozen=True)
class Fingerprint:
    """The compatibility contract of a block. Equality and hash are by value."""

    identity: Identity
    geometry: Geometry
    encoding: Encoding
    placement: Placement = dataclasses.field(default_factory=Placement)

    def __post_init__(self) -> None:
        for name, kind in _FIELD_TYPES.items():
            if type(getattr(self, name)) is not kind:
                raise bad_field(name, f"must be {kind.__name__}")
        latent = self.geometry.attention == "mla"
        if self.encoding.element_order == (ORDER_HEADS if latent else ORDER_LATENT):
            raise bad_field(
                "encoding.element_order",
                f"{self.encoding.element_order} is not an order of {self.geometry.attention}",
            )

    def groups(self) -> tuple[Identity, Geometry, Encoding, Placement]:
        """The four groups in canonical order."""
        return self.identity, self.geometry, self.encoding, self.placement

    @cached_property
    def canonical(self) -> bytes:
        """frame(domain tag, canonical bytes of each group)."""
        return frame(b"kvstore/fingerprint/1", *(group.canonical() for group in self.groups()))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes: 32 bytes over all fields."""
        return hashlib.sha256(self.canonical).digest()

    def group_digests(self) -> dict[str, bytes]:
        """32 bytes for each group, by its name."""
        return {group.GROUP: group.digest() for group in self.groups()}

    @cached_property
    def _values(self) -> dict[str, Value]:
        return {
            f"{group.GROUP}.{name}": value
            for group in self.groups()
            for name, value in group.values()
        }

    def value(self, field: str) -> Value:
        """The value of a dotted field; BadRequest if there is no such field."""
        try:
            return self._values[field]
        except KeyError:
            raise bad_field(field, "is no field of a fingerprint") from None

    def missing(self) -> tuple[str, ...]:
        """Dotted names of required fields that are absent; not empty: the offer is held."""
        return tuple(f"{g.GROUP}.{name}" for g in self.groups() for name in g.missing())

    def differences(self, offered: Fingerprint) -> tuple[Difference, ...]:
        """The fields in which `offered` differs from this (stored) one, in canonical order."""
        theirs = offered._values
        return tuple(
            Difference(field, value, theirs[field], field.partition(".")[0])
            for field, value in self._values.items()
            if value != theirs[field]
        )

    def complete(self, revision: str) -> Fingerprint:
        """A copy with the weights revision that an operator vouches for.

        BadRequest if there is one already. Other fields may still be `missing`: an approval vouches
        for the weights and for nothing else.
        """
        if self.identity.weights_revision is not None:
            raise bad_field("identity.weights_revision", "is given already")
        check_name(revision, "identity.weights_revision")
        identity = dataclasses.replace(self.identity, weights_revision=revision)
        return dataclasses.replace(self, identity=identity)

    def to_dict(self) -> dict[str, dict[str, str | int]]:
        """Plain nested form for JSON and TOML; absent fields are left out."""
        return {group.GROUP: group.to_dict() for group in self.groups()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fingerprint:
        """Inverse of `to_dict`; None counts as absent.

        BadRequest for an unknown group or field, a wrong type, or an absent name or size.
        """
        if not isinstance(data, Mapping):
            raise bad_field("fingerprint", "must be a table")
        for name in data:
            if name not in GROUPS:
                raise bad_field(_quoted(name), f"is no group; they are {', '.join(GROUPS)}")
        return cls(
            _group_from_dict(Identity, data),
            _group_from_dict(Geometry, data),
            _group_from_dict(Encoding, data),
            _group_from_dict(Placement, data),
        )


def compare(
    stored: Fingerprint, offered: Fingerprint, convertible: frozenset[str] = frozenset()
) -> Compatibility:
    """May a reader with `offered` use what was stored with `stored`?

    convertible: dotted names of encoding and placement fields that registered converters bridge.
    In this order: a known difference in identity or geometry, or in a field that no converter
    bridges, is INCOMPATIBLE; a required field that is missing on either side is HELD; known
    differences that converters bridge are CONVERTIBLE; else MATCH.
    """
    for field in convertible:
        if field not in CONVERTIBLE_FIELDS:
            raise bad_field(field, "is no field that can be converted")
    differences = stored.differences(offered)
    unknown = {*stored.missing(), *offered.missing()}
    known = [d for d in differences if d.field not in unknown]
    if any(d.field not in convertible for d in known):
        verdict = Verdict.INCOMPATIBLE
    elif unknown:
        verdict = Verdict.HELD
    elif known:
        verdict = Verdict.CONVERTIBLE
    else:
        verdict = Verdict.MATCH
    return Compatibility(verdict, differences)


_G = TypeVar("_G", bound=Group)


def _quoted(name: object) -> str:
    """A name from outside that is safe to print: it may hold anything."""
    return ascii(str(name)[:64])


def _group_from_dict(kind: type[_G], data: Mapping[str, Any]) -> _G:
    values = data.get(kind.GROUP, {})
    if not isinstance(values, Mapping):
        raise bad_field(kind.GROUP, "must be a table")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise bad_field(f"{kind.GROUP}.{_quoted(name)}", "is no field of a fingerprint")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and values.get(name) is None:
            raise bad_field(f"{kind.GROUP}.{name}", "is required")
    return kind(**{name: value for name, value in values.items() if value is not None})
