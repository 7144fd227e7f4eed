"""What a look-up of a withheld side leaves in its record, in the counts and in its session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.model.hits import HitRule
from kvstore.model.plan import Overlap, Plan, Split
from kvstore.model.reasons import Reason
from kvstore.model.record import RecordBuilder
from kvstore.model.sampling import Arm
from kvstore.store.withheld import Withheld
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_server.boundary import Call
from kvstore_server.evidence import Evidence
from kvstore_server.metrics import Metrics

LAYOUT: Any = SimpleNamespace(block_tokens=16)
FOUND = Plan(4, 0, 1.0, 1.0, 5.0, Reason.OK, 1e9, Split(Overlap.SERIAL, 4, 0, 0, 1.0, 5.0))
NOTHING = FOUND._replace(load_blocks=0, reason=Reason.NOTHING_TO_DO)
ID = "r-1"
LOOKUPS = 'kvstore_withheld_lookups_total{arm="held_out"}'
TOKENS = 'kvstore_withheld_tokens_total{arm="held_out"}'


class Bench:
    """One session's look-ups of one request."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.session: Any = SimpleNamespace(withheld=Withheld())
        boundary = cast(Any, SimpleNamespace(metrics=self.metrics))
        self.evidence = Evidence(cast(Any, None), boundary, "default")

    def look_up(
        self, arm: Arm, advice: Plan, *, before_tokens: int = 0, rule: HitRule = HitRule.PREFIX
    ) -> tuple[Plan, dict[str, Any] | None]:
        call = Call(0, RecordBuilder("lookup", ID, "default", 0, 0.0), cast(Any, None))
        call.session = self.session
        query = pb.Query(rule=cast(Any, int(rule)))
        request = pb.LookupRequest(queries=[query], prompt_tokens=300, before_tokens=before_tokens)
        shown = self.evidence.withhold(call, arm, advice, LAYOUT, request)
        return shown, call.record.record.evidence

    def flat(self, name: str) -> float:
        return self.metrics.flat().get(name, 0)

    @property
    def declined(self) -> Reason | None:
        return cast("Reason | None", self.session.withheld.why(ID))


@pytest.mark.parametrize("arm", [Arm.HELD_OUT, Arm.SHADOW])
def test_a_withheld_miss_is_recorded_on_its_side(arm: Arm) -> None:
    bench = Bench()
    shown, evidence = bench.look_up(arm, NOTHING)
    assert (shown, evidence) == (NOTHING, {"arm": arm.name.lower()})
    assert not bench.flat(LOOKUPS)


def test_what_is_withheld_is_counted_once_a_prompt() -> None:
    bench = Bench()
    shown, evidence = bench.look_up(Arm.HELD_OUT, FOUND)
    assert (shown.load_blocks, shown.recompute_tokens) == (0, 300)
    assert evidence is not None
    assert (evidence["arm"], evidence["would_load"]["tokens"]) == ("held_out", 64)
    assert "part" not in evidence
    _, later = bench.look_up(Arm.HELD_OUT, FOUND, before_tokens=64)
    assert later is not None
    assert (later["part"], later["would_load"]["tokens"]) == (True, 64)
    assert (bench.flat(LOOKUPS), bench.flat(TOKENS)) == (1, 128)


def test_what_a_push_asks_counts_as_nothing_and_changes_no_mark() -> None:
    bench = Bench()
    bench.look_up(Arm.HELD_OUT, FOUND)
    for arm in (Arm.HELD_OUT, Arm.APPLIED):
        _, evidence = bench.look_up(arm, FOUND, rule=HitRule.BITMAP)
        assert evidence == {"arm": arm.name.lower(), "part": True}
        assert bench.declined is Reason.DECLINED_HOLDOUT
    assert (bench.flat(LOOKUPS), bench.flat(TOKENS)) == (1, 64)
    other = Bench()
    other.look_up(Arm.HELD_OUT, FOUND, rule=HitRule.BITMAP)
    assert other.declined is None, "a push of a served request leaves it served"


def test_a_served_prompt_leaves_no_mark_but_of_its_parts() -> None:
    bench = Bench()
    assert bench.look_up(Arm.APPLIED, FOUND) == (FOUND, None)
    assert bench.look_up(Arm.APPLIED, FOUND, before_tokens=64) == (
        FOUND,
        {"arm": "applied", "part": True},
    )


def test_a_later_part_that_finds_nothing_leaves_the_request_held_out() -> None:
    bench = Bench()
    bench.look_up(Arm.HELD_OUT, FOUND)
    bench.look_up(Arm.HELD_OUT, NOTHING, before_tokens=64)
    assert bench.declined is Reason.DECLINED_HOLDOUT
    bench.look_up(Arm.APPLIED, NOTHING)
    assert bench.declined is None, "a name that is used again for a served request"
