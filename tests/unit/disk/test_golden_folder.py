"""A folder that an earlier daemon wrote is read to the last byte; `tests/golden` says how it was
made.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.core import Core
from kvstore.ledger import LmdbLedger
from kvstore.model.fingerprint import Fingerprint
from kvstore.model.layout import layout_of
from kvstore.model.values import CoreLimits, TenantSpec, TierKind, TierSpec
from kvstore.testing.clock import ManualClock
from kvstore.tiers.disk.opening import DiskFolder
from kvstore.tiers.disk.pages import aligned_bytes
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.verify import verify

GOLDEN = Path(__file__).parents[2] / "golden"
CONTENT: dict[str, Any] = json.loads((GOLDEN / "folder_1.json").read_text())
CAPACITY_BYTES = 4 << 20
LMDB_FITS = sys.byteorder == "little" and struct.calcsize("P") == 8 and mmap.PAGESIZE == 4_096

pytestmark = pytest.mark.skipif(
    not LMDB_FITS, reason="LMDB's files are of the machine: little-endian, 64 bits, pages of 4 KiB"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden folder."""
    copy = tmp_path / "disk"
    copy.mkdir(mode=0o700)
    with tarfile.open(GOLDEN / "folder_1.tar.xz") as archive:
        archive.extractall(copy, filter="data")
    return copy


def fingerprint(one: dict[str, Any]) -> Fingerprint:
    return Fingerprint.from_dict(one["fingerprint"])


def opened(folder: Path) -> DiskTier:
    clock = ManualClock()
    made = DiskFolder(str(folder))
    tier = DiskTier(made, capacity_bytes=CAPACITY_BYTES, clock=clock, parallel=False)
    for one in CONTENT["spaces"]:
        described = fingerprint(one)
        slot_bytes = layout_of(described).slot_bytes
        tier.describe(one["space_id"], one["tenant"], described.digest, slot_bytes)
    assert tier.open()
    assert tier.load_index()
    return tier


def test_every_record_is_right_and_the_books_are_the_same(folder: Path) -> None:
    report = verify(str(folder), capacity_bytes=CAPACITY_BYTES)
    assert report.damages == ()
    assert {name: getattr(report, name) for name in CONTENT["counts"]} == CONTENT["counts"]
    assert report.folder_id == CONTENT["folder_id"]
    assert report.accounting.payload_bytes == CONTENT["payload_bytes"]
    assert report.accounting.record_bytes == CONTENT["record_bytes"]


def test_every_block_is_found_and_read_exactly(folder: Path) -> None:
    tier = opened(folder)
    assert tier.set_aside == ""
    for one in CONTENT["spaces"]:
        length = layout_of(fingerprint(one)).block_bytes
        for block in one["blocks"]:
            into = aligned_bytes(length)
            tier.load(one["space_id"], bytes.fromhex(block["key"]), into)
            assert hashlib.sha256(into.tobytes()).hexdigest() == block["sha256"]
    assert tier.usage().blocks == CONTENT["counts"]["rows"]
    assert tier.usage().used_bytes <= CAPACITY_BYTES
    assert tier.counts["corrupt_dropped"] == 0
    assert tier.stats().counters["rows_dropped"] == 0
    tier.close()


def test_what_was_invalidated_is_not_in_it(folder: Path) -> None:
    tier = opened(folder)
    assert tier.volume is not None
    names = {key for one in CONTENT["absent"] for key in one["keys"]}
    assert names
    for one in CONTENT["spaces"]:
        if any(gone["fingerprint"] == one["fingerprint"] for gone in CONTENT["absent"]):
            assert tier.volume.find(one["space_id"], [bytes.fromhex(key) for key in names]) == []
    tier.close()


def test_spaces_verdicts_and_epochs_are_the_same(folder: Path) -> None:
    ledger = LmdbLedger(str(folder / "ledger"))
    assert ledger.set_aside == ""
    tiers = [
        TierSpec("host", TierKind.POOL, 16 << 20, ingest=True),
        TierSpec("disk", TierKind.ARCHIVE, CAPACITY_BYTES),
    ]
    core = Core(tiers, [TenantSpec("alice"), TenantSpec("bob")], CoreLimits())
    core.restore(ledger.rows())
    ledger.close()
    found = {(space.space_id, space.tenant, space.fingerprint.digest) for space in core.spaces()}
    expected = {
        (one["space_id"], one["tenant"], fingerprint(one).digest) for one in CONTENT["spaces"]
    }
    assert found == expected
    assert core.epoch_floors() == CONTENT["epochs"]
    (verdict,) = core.reviews(include_decided=True)
    assert (verdict.tenant, verdict.state, verdict.revision) == ("bob", "approved", "r9")
