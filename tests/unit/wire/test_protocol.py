"""The wire contract is the accepted one, and what would break a peer is seen as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

from tests.golden import generate_protocol as protocol

HOW = "python tests/golden/generate_protocol.py --write accepts additions"


def test_nothing_breaks_a_peer_of_the_accepted_contract() -> None:
    assert protocol.breaks(protocol.golden(), protocol.current()) == []


def test_the_accepted_contract_is_the_one_of_now() -> None:
    assert protocol.encoded(protocol.current()) == protocol.GOLDEN.read_bytes(), HOW


def test_the_contract_is_whole() -> None:
    found = protocol.current()
    assert [file.package for file in found.file] == ["kvstore.v1"] * 3
    named = {name for file in found.file for name in protocol.names(file)}
    assert "kvstore.v1.AcquireReply.places" in named
    assert "kvstore.v1.FdRequest.hello" in named
    assert "kvstore.v1.Admin/Review" in named
    assert "kvstore.v1.Reason.REASON_MISS_EVICTED" in named


# ---------------------------------------------------------------- changes that are seen


def message(contract: FileDescriptorSet, name: str) -> Any:
    return next(m for file in contract.file for m in file.message_type if m.name == name)


def field(contract: FileDescriptorSet, of: str, name: str) -> Any:
    return next(f for f in message(contract, of).field if f.name == name)


def enum(contract: FileDescriptorSet, name: str) -> Any:
    return next(e for file in contract.file for e in file.enum_type if e.name == name)


def method(contract: FileDescriptorSet, name: str) -> Any:
    return next(m for m in contract.file[0].service[0].method if m.name == name)


def remove(items: Any, name: str) -> None:
    kept = [item for item in items if item.name != name]
    del items[:]
    items.extend(kept)


def set_to(target: Any, name: str, value: object) -> None:
    setattr(target, name, value)


Change = Callable[[FileDescriptorSet], None]

BREAKING: dict[str, Change] = {
    "AcquireReply.places: removed": lambda c: remove(message(c, "AcquireReply").field, "places"),
    "AcquireReply.places: number 2 is now spots": lambda c: set_to(
        field(c, "AcquireReply", "places"), "name", "spots"
    ),
    "AcquireReply.lease_id: removed": lambda c: set_to(
        field(c, "AcquireReply", "lease_id"), "number", 99
    ),
    "AcquireReply.lease_id: was LABEL_OPTIONAL TYPE_UINT64": lambda c: set_to(
        field(c, "AcquireReply", "lease_id"), "type", FieldDescriptorProto.TYPE_SINT64
    ),
    "ReleaseRequest.lease_ids: was LABEL_REPEATED": lambda c: set_to(
        field(c, "ReleaseRequest", "lease_ids"), "label", FieldDescriptorProto.LABEL_OPTIONAL
    ),
    "AttachEvent.notice: was LABEL_OPTIONAL TYPE_MESSAGE .kvstore.v1.Notice oneof event": (
        lambda c: field(c, "AttachEvent", "notice").ClearField("oneof_index")
    ),
    "GroupHit.reason: was LABEL_OPTIONAL TYPE_ENUM .kvstore.v1.Reason": lambda c: set_to(
        field(c, "GroupHit", "reason"), "type_name", ".kvstore.v1.Verdict"
    ),
    "v1.Plan: removed": lambda c: remove(c.file[0].message_type, "Plan"),
    "v1.Verdict: removed": lambda c: remove(c.file[0].enum_type, "Verdict"),
    "Reason.REASON_HIT: removed": lambda c: remove(enum(c, "Reason").value, "REASON_HIT"),
    "Reason.REASON_HIT: was 2, is 999": lambda c: set_to(
        next(v for v in enum(c, "Reason").value if v.name == "REASON_HIT"), "number", 999
    ),
    "Store/Explain: removed": lambda c: remove(c.file[0].service[0].method, "Explain"),
    "Store/Fetch: server_streaming was True, is False": lambda c: set_to(
        method(c, "Fetch"), "server_streaming", False
    ),
    "Store/Open: output_type was": lambda c: set_to(
        method(c, "Open"), "output_type", ".kvstore.v1.LookupReply"
    ),
}


@pytest.mark.parametrize("line", BREAKING)
def test_a_breaking_change_is_seen(line: str) -> None:
    changed = protocol.current()
    BREAKING[line](changed)
    found = protocol.breaks(protocol.current(), changed)
    assert len(found) == 1, found
    assert line in found[0]


def test_a_reserved_number_may_not_be_used_again() -> None:
    old = protocol.current()
    reserved = message(old, "AcquireReply")
    reserved.reserved_range.add(start=50, end=52)
    new = protocol.current()
    message(new, "AcquireReply").field.add(name="later", number=51, label=1, type=4)
    assert protocol.breaks(old, new) == ["kvstore.v1.AcquireReply.later: number 51 was reserved"]


def test_what_is_reserved_may_be_removed() -> None:
    new = protocol.current()
    gone = message(new, "AcquireReply")
    remove(gone.field, "places")
    gone.reserved_range.add(start=2, end=3)
    assert protocol.breaks(protocol.current(), new) != []
    gone.reserved_name.append("places")
    assert protocol.breaks(protocol.current(), new) == []


def test_additions_break_nothing() -> None:
    new = protocol.current()
    message(new, "AcquireReply").field.add(name="later", number=900, label=1, type=4)
    enum(new, "Reason").value.add(name="REASON_LATER", number=900)
    new.file[0].message_type.add(name="Later")
    new.file[0].service[0].method.add(
        name="Later", input_type=".kvstore.v1.Later", output_type=".kvstore.v1.Later"
    )
    assert protocol.breaks(protocol.current(), new) == []
