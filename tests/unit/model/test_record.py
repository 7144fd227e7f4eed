"""Records: five stages, the first departure, bounded memory, lines that a simulator can replay."""

from __future__ import annotations

import gc
import hashlib
import json
import timeit

import pytest

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


def finished(request_id: str = "r", count: int = 3, reason: Reason = Reason.HIT) -> Record:
    builder = RecordBuilder("lookup", request_id, "default", 1_000)
    builder.prompt(7, keys(count), 16)
    builder.stage("input", 3_000)
    builder.count("tokens", count * 16, 0 if reason.is_miss else count * 16)
    return builder.finish(reason, 4_000)


def test_a_request_through_all_stages() -> None:
    settings = (("lease_ttl_ms", 30_000),)
    builder = RecordBuilder("fetch", "req-7", "a", 5_000_000, 1_700_000_000.25, settings=settings)
    builder.engine_id = "engine-1"
    builder.prompt(9, keys(4), 16, 70)
    builder.stage("input", 5_002_500)
    builder.stage("preconditions", 5_003_000)
    advice = plan([(0, 4)], 16, 1 << 20, [Link("host", bytes_per_second=4 << 20)], None, 70)
    builder.planned(advice)
    builder.stage(Stage.PLAN, 5_010_000)
    builder.loaded(
        "req-7", 4, 4 << 20, 2_000_000, Reason.OK, load_us=2_500_000, predicted_us=2_000_000
    )
    builder.stage("movement", 2_005_010_000)
    builder.count("blocks", 4, 4)
    record = builder.finish(Reason.HIT, 2_005_012_000)

    line = json.loads(record.to_json_line())
    assert line["timestamp"] == 1_700_000_000_250
    assert (line["input_length"], line["tokens_per_block"]) == (70, 16)
    assert (line["unit"], line["asked"], line["handed_on"]) == ("blocks", 4, 4)
    assert line["stages_us"] == {
        "input": 2.5,
        "preconditions": 0.5,
        "plan": 7.0,
        "movement": 2_000_000.0,
        "verification": 2.0,
    }
    assert line["total_us"] == record.elapsed_us == 2_000_012.0
    assert line["plan"]["ideal_load_ms"] == pytest.approx(1_000.0)
    assert line["plan"]["reason"] == "COST_UNKNOWN"
    loaded = {"blocks": 4, "bytes": 4 << 20, "us": 2_000_000}
    assert line["loaded"] == {**loaded, "load_us": 2_500_000, "predicted_us": 2_000_000}
    assert (line["outcome"], line["reason"], line["departed"]) == ("hit", "HIT", None)
    assert line["settings"] == {"lease_ttl_ms": 30_000}
    assert (line["request_id"], line["tenant"], line["engine_id"]) == ("req-7", "a", "engine-1")
    assert line["space_id"] == 9
    assert builder.tenant == "a"


def test_the_first_departure_is_named_not_the_last() -> None:
    builder = RecordBuilder("lookup", "", "a", 0)
    builder.stage("input", 1)
    builder.stage("preconditions", 2, Reason.HELD_FOR_REVIEW)
    builder.stage("plan", 3, Reason.NO_SPACE)
    record = builder.finish(Reason.MISS_NEVER_STORED, 4)
    assert record.departed is Stage.PRECONDITIONS
    assert record.reason is Reason.MISS_NEVER_STORED
    assert record.origin is Origin.DATA


def test_a_departed_stage_gives_the_reason_that_the_end_does_not() -> None:
    builder = RecordBuilder("open", "", "a", 0)
    builder.stage("preconditions", 2, Reason.HELD_FOR_REVIEW)
    record = builder.finish(Reason.OK, 4)
    assert (record.reason, record.outcome) == (Reason.HELD_FOR_REVIEW, Outcome.DONE)


@pytest.mark.parametrize(
    ("passed", "stage"),
    [
        ([], Stage.INPUT),
        ([Stage.INPUT], Stage.PRECONDITIONS),
        ([Stage.INPUT, Stage.PRECONDITIONS, Stage.PLAN], Stage.MOVEMENT),
        (list(Stage), Stage.VERIFICATION),
    ],
)
def test_an_error_belongs_to_the_stage_under_way(passed: list[Stage], stage: Stage) -> None:
    builder = RecordBuilder("reserve", "", "a", 0)
    for n, done in enumerate(passed):
        builder.stage(done, n + 1)
    builder.fail(Reason.INTERNAL, "see the log")
    record = builder.finish(Reason.INTERNAL, 100)
    assert (record.departed, record.outcome) == (stage, Outcome.FAILED)
    assert (record.origin, record.detail) == (Origin.DEFECT, "see the log")
    assert sum(e for e in record.elapsed_ns if e >= 0) == record.total_ns == 100


@pytest.mark.parametrize(
    ("reason", "stage"),
    [
        (Reason.MISS_EVICTED, Stage.PLAN),
        (Reason.MISS_INCOMPATIBLE, Stage.PRECONDITIONS),
        (Reason.MISS_CORRUPT, Stage.VERIFICATION),
        (Reason.DECLINED_RECOMPUTE_FASTER, Stage.PLAN),
        (Reason.HELD_FOR_REVIEW, Stage.PRECONDITIONS),
        (Reason.STAGING_BUSY, Stage.PLAN),
        (Reason.COPY_FAILED, Stage.MOVEMENT),
        (Reason.GENERATION_CHANGED, Stage.VERIFICATION),
        (Reason.DEADLINE_EXCEEDED, Stage.MOVEMENT),
        (Reason.COST_UNKNOWN, None),
    ],
)
def test_a_reason_in_the_reply_belongs_to_its_stage(reason: Reason, stage: Stage | None) -> None:
    builder = RecordBuilder("acquire", "", "a", 0)
    for done in (Stage.INPUT, Stage.PRECONDITIONS, Stage.PLAN):
        builder.stage(done, 1)
    assert builder.finish(reason, 2).departed is stage


@pytest.mark.parametrize(
    ("verb", "asked", "handed_on", "reason", "outcome"),
    [
        ("lookup", 64, 64, Reason.HIT, Outcome.HIT),
        ("lookup", 64, 32, Reason.HIT, Outcome.PARTIAL),
        ("lookup", 64, 0, Reason.MISS_EVICTED, Outcome.MISS),
        ("lookup", 64, 64, Reason.DECLINED_RECOMPUTE_FASTER, Outcome.DECLINED),
        ("acquire", 4, 0, Reason.DEADLINE_EXCEEDED, Outcome.FAILED),
        ("acquire", 4, 2, Reason.DEADLINE_EXCEEDED, Outcome.PARTIAL),
        ("commit", 4, 4, Reason.OK, Outcome.STORED),
        ("commit", 4, 0, Reason.COPY_FAILED, Outcome.FAILED),
        ("reserve", 4, 0, Reason.STAGING_BUSY, Outcome.SKIPPED),
        ("reserve", 4, 0, Reason.ALREADY_PRESENT, Outcome.SKIPPED),
        ("open", 0, 0, Reason.OK, Outcome.DONE),
    ],
)
def test_outcomes(verb: str, asked: int, handed_on: int, reason: Reason, outcome: Outcome) -> None:
    builder = RecordBuilder(verb, "", "a", 0)
    builder.count("blocks", asked, handed_on)
    assert builder.finish(reason, 1).outcome is outcome


def test_a_refused_request_is_not_a_failed_one() -> None:
    for reason, outcome in (
        (Reason.TOO_MANY_KEYS, Outcome.REFUSED),
        (Reason.SESSION_UNKNOWN, Outcome.REFUSED),
        (Reason.DEADLINE_EXCEEDED, Outcome.FAILED),
    ):
        builder = RecordBuilder("lookup", "", "a", 0)
        builder.fail(reason)
        assert builder.finish(reason, 1).outcome is outcome


def test_stages_and_counts_add_up() -> None:
    builder = RecordBuilder("push", "", "a", 0)
    builder.stage("movement", 10)
    builder.stage("verification", 12, Reason.COPY_FAILED)
    builder.count("blocks", 3, 2)
    builder.stage("movement", 20)
    builder.stage("verification", 21)
    builder.count("blocks", 2, 2)
    record = builder.finish(Reason.OK, 25)
    assert record.elapsed_ns[Stage.MOVEMENT] == 18
    assert record.elapsed_ns[Stage.VERIFICATION] == 7
    assert record.elapsed_ns[Stage.PLAN] == -1
    assert record.departed is Stage.VERIFICATION
    assert (record.asked, record.handed_on, record.outcome) == (5, 4, Outcome.STORED)
    assert set(record.to_dict()["stages_us"]) == {"movement", "verification"}


def test_a_report_of_the_client_that_departs_is_named() -> None:
    builder = RecordBuilder("release", "", "a", 0)
    builder.loaded("req-1", 3, 300, 20, Reason.GENERATION_CHANGED)
    builder.loaded("req-2", 4, 400, 30, Reason.OK)
    record = builder.finish(Reason.OK, 1)
    assert record.departed is Stage.VERIFICATION
    assert record.reason is Reason.GENERATION_CHANGED
    assert (record.request_id, record.loaded_blocks, record.loaded_us) == ("req-1", 7, 50)


def test_fields_that_differ_are_kept() -> None:
    builder = RecordBuilder("open", "", "a", 0)
    builder.differ(["identity.weights_revision"])
    builder.differ(["encoding.kv_dtype"])
    record = builder.finish(Reason.MISS_INCOMPATIBLE, 1)
    assert record.to_dict()["fields"] == ["identity.weights_revision", "encoding.kv_dtype"]


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
    ring = Ring(3)
    for n in range(5):
        ring.append(finished(f"r{n}"))
    assert [record.request_id for record in ring] == ["r2", "r3", "r4"]
    assert (len(ring), ring.dropped) == (3, 2)
    assert ring.bytes == sum(record.size_bytes for record in ring)


def test_the_ring_is_bounded_in_bytes() -> None:
    one = finished().size_bytes
    ring = Ring(100, 2 * one)
    for n in range(5):
        ring.append(finished(f"r{n}"))
        assert ring.bytes <= 2 * one
    assert len(ring) == 2
    ring.append(finished("too long", count=200))
    assert (len(ring), ring.bytes) == (0, 0)
    nothing = Ring(0)
    nothing.append(finished())
    assert len(nothing) == 0


def test_the_ring_answers_filters_oldest_first() -> None:
    ring = Ring(100)
    for n in range(6):
        ring.append(finished(f"r{n % 2}", reason=Reason.MISS_EVICTED if n == 2 else Reason.HIT))

    def ids(last: int = 0, request_id: str = "", outcome: str = "") -> list[str]:
        return [record.request_id for record in ring.select(last, request_id, outcome)]

    assert ids() == ["r0", "r1", "r0", "r1", "r0", "r1"]
    assert ids(last=2) == ["r0", "r1"]
    assert ids(request_id="r0") == ["r0"] * 3
    assert ids(outcome="MISS_EVICTED") == ids(outcome="miss") == ["r0"]
    assert ids(outcome="hit", last=1) == ["r1"]
    assert ids(request_id="none") == []


def test_building_a_record_is_cheap() -> None:
    packed = keys(32)
    ring = Ring(1_000)

    def request() -> None:
        builder = RecordBuilder("lookup", "r", "t", 0)
        builder.prompt(3, packed, 16)
        for stage in ("input", "preconditions", "plan", "movement", "verification"):
            builder.stage(stage, 5)
        builder.count("tokens", 512, 512)
        ring.append(builder.finish(Reason.HIT, 9))

    gc.collect()
    best_s = min(timeit.repeat(request, number=500, repeat=9)) / 500
    assert best_s < 50e-6, f"{best_s * 1e6:.1f} us a request; 5 us are usual"
    print(f"{best_s * 1e6:.1f} us a request")
