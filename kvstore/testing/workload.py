"""What simulated clients store: small models, prompts that share prefixes, bytes that tell who
wrote them; and what a client remembers of its leases.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from random import Random

from kvstore.model.fingerprint import (
    ORDER_HEADS,
    Encoding,
    Fingerprint,
    Geometry,
    Identity,
    Placement,
)
from kvstore.model.layout import Layout
from kvstore.model.values import CoreLimits, Place, TenantSpec, TierKind, TierSpec

MS = 1_000_000
PROMPTS = 6
PROMPT_BLOCKS = 10


def fingerprint(
    *,
    model: str = "model",
    revision: str | None = "r1",
    epoch: int = 0,
    block_tokens: int = 16,
    ranks: int = 1,
) -> Fingerprint:
    """A small model: a block of 16 tokens is 4 KiB, and grows with `block_tokens`."""
    return Fingerprint(
        Identity(model, revision, epoch, config_digest="config"),
        Geometry("gqa", layers=2, kv_heads=2, head_size=16),
        Encoding("float16", block_tokens, element_order=ORDER_HEADS),
        Placement(tensor_parallel=ranks),
    )


def prompt_keys(prompt: int, blocks: int = PROMPT_BLOCKS) -> list[bytes]:
    """Keys of a prompt; neighbours share their first half, as chats share a system prompt."""
    keys: list[bytes] = []
    for index in range(blocks):
        owner = prompt // 2 if index < PROMPT_BLOCKS // 2 else 1_000 + prompt
        keys.append(hashlib.sha256(b"%d/%d" % (owner, index)).digest())
    return keys


def content(space_id: int, key: bytes, part: int, write: int, length: int) -> bytes:
    """The bytes of one part as one write made them."""
    line = hashlib.sha256(b"%d/%d/%d/" % (space_id, part, write) + key).digest()
    return line * (length // len(line))


@dataclass
class Write:
    """One attempt of an engine to push blocks: what `content` is told apart by.

    committed: bit masks of parts by key, as far as clients were told OK.
    """

    id: int
    space_id: int
    committed: dict[bytes, int] = field(default_factory=dict)
    void: set[bytes] = field(default_factory=set)


@dataclass
class Reservation:
    """A write lease as its client knows it."""

    lease_id: int
    session: int
    write: Write
    part: int
    keys: list[bytes]
    offsets: list[int]
    region_id: int
    part_bytes: int


@dataclass
class Reading:
    """A read lease as its client knows it. places: once it is settled. seen: what was read."""

    lease_id: int
    session: int
    space_id: int
    layout: Layout
    keys: list[bytes]
    all_or_nothing: bool
    places: list[Place | None] | None = None
    seen: dict[bytes, bytes] = field(default_factory=dict)


@dataclass
class Engine:
    """One engine instance: a group of one session a rank."""

    tenant: str
    group: bytes
    fingerprint: Fingerprint
    layout: Layout
    sessions: list[int] = field(default_factory=list)
    space_id: int = 0


@dataclass(frozen=True)
class Setting:
    """One configuration of the simulated daemon."""

    tiers: tuple[TierSpec, ...]
    tenants: tuple[TenantSpec, ...]
    limits: CoreLimits


def settings(random: Random) -> Setting:
    """A small daemon with one to three tiers and one to three tenants."""
    host = TierSpec("host", TierKind.POOL, random.choice([130, 200, 400]) * 1024, ingest=True)
    device = TierSpec("device", TierKind.POOL, random.choice([24, 48, 80]) * 1024)
    disk = TierSpec("disk", TierKind.ARCHIVE, 1 << 20)
    tiers = random.choice([(host,), (host, disk), (device, host), (device, host, disk)])
    tenants = tuple(TenantSpec(name) for name in ("a", "b", "c")[: random.choice([1, 2, 3])])
    limits = CoreLimits(
        leases_per_session_max=30,
        view_bytes_per_session_max=40 * 1024,
        staging_bytes=random.choice([24, 64]) * 1024,
        copies_in_flight_max=random.choice([2, 6, 50]),
        ghost_keys_max=50,
        sessions_max=12,
        spaces_max=14,
        region_slots_min=random.choice([2, 4]),
        save_ahead_share=random.choice([0.0, 0.0, 0.4]),
    )
    return Setting(tiers, tenants, limits)
