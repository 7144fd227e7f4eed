"""Records: five stages, the first departure, bounded memory, lines that a simulator can replay."""

from __future__ import annotations

import gc
import hashlib
import json
import timeit

import pytest

from kvstore.model.cost import PrefillCost
from kvstore.model.reasons import Origin, Reason
from kvstore.model.record import (
    KEY_BYTES,
    Outcome,
    Record,
    RecordBuilder,
    Ring,
    Stage,
    hash_ids,
)
from kvstore.policy.links import Link
from kvstore.policy.plan import plan


def keys(count: int) -> bytes:
    return b"".join(hashlib.sha256(bytes([n])).digest() for n in range(count))


def finished(request_id: str = "r", count: int = 3, reason: Reason = Reason.OK) -> Record:
    builder = RecordBuilder("lookup", 1_000, request_id=request_id, tenant="default")
    builder.input("keys", count, keys=keys(count), block_tokens=16)
    builder.passed(Stage.INPUT, 3_000, count, "keys")
    return builder.finish(4_000, Outcome.MISS if reason.is_miss else Outcome.HIT, reason)


def test_a_request_through_all_stages() -> None:
    settings = (("lease_ttl_ms", 30_000),)
    builder = RecordBuilder(
        "fetch", 5_000_000, request_id="req-7", tenant="a", engine_id="e", settings=settings
    )
    builder.input("keys", 4, keys=keys(4), tokens=70, block_tokens=16)
    builder.passed(Stage.INPUT, 5_002_500, 4, "keys")
    builder.passed(Stage.PRECONDITIONS, 5_003_000, 9, "space")
    advice = plan([(0, 4)], 16, 1 << 20, [Link("host", bytes_per_second=4 << 20)], None, 70)
    builder.planned(advice)
    builder.passed(Stage.PLAN, 5_010_000, 4, "blocks")
    builder.measured(4 << 20, 2_000_000_000)
    builder.passed(Stage.MOVEMENT, 2_005_010_000, 4 << 20, "bytes")
    builder.passed(Stage.VERIFICATION, 2_005_011_000, 4, "blocks")
    record = builder.finish(2_005_012_000, Outcome.HIT, Reason.HIT, space_id=9)

    line = json.loads(record.to_json_line(origin_ns=2_000_000))
    assert line["timestamp"] == 3
    assert (line["input_length"], line["tokens_per_block"]) == (70, 16)
    assert line["input"] == {"kind": "keys", "count": 4}
    assert [stage["stage"] for stage in line["stages"]] == [s.name.lower() for s in Stage]
    assert [stage["us"] for stage in line["stages"]] == [2.5, 0.5, 7.0, 2_000_000.0, 1.0]
    assert [stage["unit"] for stage in line["stages"]] == [
        "keys", "space", "blocks", "bytes", "blocks",
    ]  # fmt: skip
    assert line["stages"][3]["value"] == 4 << 20
    assert line["total_us"] == 2_000_012.0
    assert line["plan"]["ideal_load_ms"] == pytest.approx(1_000.0)
    assert line["plan"]["measured_over_ideal"] == pytest.approx(2.0)
    assert line["plan"]["reason"] == "COST_UNKNOWN"
    assert (line["outcome"], line["reason"], line["departed"]) == ("hit", "HIT", None)
    assert line["settings"] == {"lease_ttl_ms": 30_000}
    assert (line["request_id"], line["tenant"], line["engine_id"]) == ("req-7", "a", "e")
    assert line["space_id"] == 9


def test_the_first_departure_is_named_not_the_last() -> None:
    builder = RecordBuilder("lookup", 0)
    builder.passed(Stage.INPUT, 1, 2, "keys")
    builder.passed(Stage.PRECONDITIONS, 2, 0, "space", Reason.HELD_FOR_REVIEW)
    builder.passed(Stage.PLAN, 3, 0, "blocks", Reason.MISS_NEVER_STORED)
    record = builder.finish(4, Outcome.MISS, Reason.MISS_NEVER_STORED)
    assert record.departed is Stage.PRECONDITIONS
    assert record.origin is Origin.DATA


@pytest.mark.parametrize(
    ("passed", "stage"),
    [
        ([], Stage.INPUT),
        ([Stage.INPUT], Stage.PRECONDITIONS),
        ([Stage.INPUT, Stage.PRECONDITIONS, Stage.PLAN], Stage.MOVEMENT),
        (list(Stage), Stage.VERIFICATION),
    ],
)
def test_a_failure_belongs_to_the_stage_under_way(passed: list[Stage], stage: Stage) -> None:
    builder = RecordBuilder("reserve", 0)
    for n, done in enumerate(passed):
        builder.passed(done, n + 1, 0, "")
    record = builder.finish(100, Outcome.FAILED, Reason.INTERNAL)
    assert record.departed is stage
    assert record.origin is Origin.DEFECT
    assert sum(e for e in record.elapsed_ns if e >= 0) == record.total_ns == 100


def test_a_stage_that_is_passed_again_adds_up() -> None:
    builder = RecordBuilder("push", 0)
    builder.passed(Stage.MOVEMENT, 10, 100, "bytes")
    builder.passed(Stage.VERIFICATION, 12, 1, "blocks", Reason.COPY_FAILED)
    builder.passed(Stage.MOVEMENT, 20, 50, "bytes")
    builder.passed(Stage.VERIFICATION, 21, 2, "blocks")
    record = builder.finish(21, Outcome.PARTIAL, Reason.OK)
    assert record.elapsed_ns[Stage.MOVEMENT] == 18
    assert record.values[Stage.MOVEMENT] == 150
    assert record.elapsed_ns[Stage.VERIFICATION] == 3
    assert record.departed is Stage.VERIFICATION
    assert record.elapsed_ns[Stage.PLAN] == -1
    assert len(record.to_dict()["stages"]) == 2


def test_a_miss_departs_and_a_plain_hit_does_not() -> None:
    assert finished(reason=Reason.MISS_EVICTED).departed is Stage.PRECONDITIONS
    assert finished(reason=Reason.HIT).departed is None


def test_lines_show_no_key_and_the_same_id_for_the_same_block() -> None:
    packed = keys(40)
    line = finished(count=40).to_json_line()
    for n in range(40):
        whole = packed[n * KEY_BYTES : (n + 1) * KEY_BYTES].hex()
        assert not any(whole[at : at + 9] in line for at in range(56))
    fields = json.loads(line)
    assert fields["first_key"] == packed[:4].hex()
    assert fields["last_key"] == packed[-32:-28].hex()
    assert fields["hash_ids"] == hash_ids(packed)
    assert fields["hash_ids"][:7] == hash_ids(packed[: 7 * KEY_BYTES])
    assert len(set(fields["hash_ids"])) == 40
    assert all(0 <= n < 2**53 for n in fields["hash_ids"])
    assert fields["input_length"] == 40 * 16


def test_ids_are_the_same_everywhere() -> None:
    key = bytes(range(32))
    words = [int.from_bytes(key[at : at + 8], "little") for at in (0, 8, 16, 24)]
    assert hash_ids(key) == [(words[0] ^ words[1] ^ words[2] ^ words[3]) >> 11]
    assert hash_ids(b"") == []


def test_the_ring_is_bounded_in_records() -> None:
    ring = Ring(3, 1 << 20)
    for n in range(5):
        ring.add(finished(f"r{n}"))
    assert [record.request_id for record in ring] == ["r2", "r3", "r4"]
    assert (len(ring), ring.dropped) == (3, 2)
    assert ring.bytes == sum(record.size_bytes for record in ring)


def test_the_ring_is_bounded_in_bytes() -> None:
    one = finished().size_bytes
    ring = Ring(100, 2 * one)
    for n in range(5):
        ring.add(finished(f"r{n}"))
        assert ring.bytes <= 2 * one
    assert len(ring) == 2
    ring.add(finished("too long", count=200))
    assert (len(ring), ring.bytes) == (0, 0)
    nothing = Ring(0, 1 << 20)
    nothing.add(finished())
    assert len(nothing) == 0


def test_the_ring_answers_filters_oldest_first() -> None:
    ring = Ring(100, 1 << 20, origin_ns=0)
    for n in range(6):
        ring.add(finished(f"r{n % 2}", reason=Reason.MISS_EVICTED if n == 2 else Reason.OK))

    def ids(**filters: str | int) -> list[str]:
        return [json.loads(line)["request_id"] for line in ring.lines(**filters)]  # type: ignore[arg-type]

    assert ids() == ["r0", "r1", "r0", "r1", "r0", "r1"]
    assert ids(last=2) == ["r0", "r1"]
    assert ids(request_id="r0") == ["r0"] * 3
    assert ids(outcome="MISS_EVICTED") == ids(outcome="miss") == ["r0"]
    assert ids(outcome="hit", last=1) == ["r1"]
    assert ids(request_id="none") == []


def test_building_a_record_is_cheap() -> None:
    packed = keys(32)
    advice = plan([(0, 1)], 16, 1, [Link("host", bytes_per_second=1e9)], PrefillCost(1.0, 1.0))
    ring = Ring(1_000, 1 << 30)

    def request() -> None:
        builder = RecordBuilder("lookup", 0, request_id="r", tenant="t")
        builder.input("keys", 32, keys=packed, block_tokens=16)
        for stage in Stage:
            builder.passed(stage, stage, 1, "blocks")
        builder.planned(advice)
        ring.add(builder.finish(9, Outcome.HIT, Reason.OK, 3))

    gc.collect()
    best_s = min(timeit.repeat(request, number=500, repeat=9)) / 500
    assert best_s < 50e-6, f"{best_s * 1e6:.1f} us a request; 5 us are usual"
