"""The tier's hooks as vLLM calls them, without an engine: nothing is raised, every job ends."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import vllm
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob

from kvstore_client.engines import vllm_tier
from kvstore_client.engines.vllm_tier import KVStoreTier

ROWS, ROW_BYTES = 8, 4096
KEY = make_offload_key(bytes(range(32)), 0)
STEP = ScheduleEndContext((), ())


def tier(**options: Any) -> KVStoreTier:
    """One that is off: no connector makes it, so there is no configuration to be found."""
    view = np.zeros((ROWS, ROW_BYTES), np.int8).data
    return KVStoreTier(object(), view, "KVStoreTier", **options)


def job(job_id: int, *, load: bool) -> TransferJob:
    return TransferJob(job_id, [KEY], np.array([3], np.int32), load, ReqContext("r"))


class Broken:
    """An AsyncTier of which everything raises."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def raising(*args: Any, **more: Any) -> Any:
            raise RuntimeError(f"planted in {name}")

        return raising


def check_hooks(one: KVStoreTier) -> None:
    """Whatever is wrong inside, vLLM sees a tier that has nothing."""
    context = ReqContext("r")
    assert one.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
    assert one.lookup(KEY, context) is LookupResult.MISS
    one.submit_load(job(1, load=True))
    one.submit_store(job(2, load=False))
    ended = list(one.get_finished_jobs())
    assert [(done.job_id, done.success) for done in ended] == [(1, False), (2, False)]
    assert not list(one.get_finished_jobs())
    one.touch([KEY], context)
    one.on_schedule_end(STEP)
    one.on_request_finished(context)
    one.drain_jobs()
    assert one.get_stats() is None
    assert not one.has_pending_work()
    one.shutdown()
    one.shutdown()
    assert one.lookup(KEY, context) is LookupResult.MISS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": "/nowhere.sock"}, "not made by vLLM's OffloadingConnector"),
        ({}, "target is missing"),
        ({"target": "/nowhere.sock", "colour": "red"}, "colour: no such option"),
        ({"target": "/nowhere.sock", "lookup_deadline_ms": 0}, "lookup_ms"),
    ],
)
def test_a_tier_that_cannot_work_is_off_and_says_why(
    options: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.ERROR):
        one = tier(**options)
    assert said in caplog.text
    assert "kvstore is off" in caplog.text
    check_hooks(one)


def test_another_version_of_vllm_is_refused() -> None:
    minor = ".".join(vllm.__version__.split(".")[:2])
    assert minor in vllm_tier.VERSIONS, "the version that is tested is supported"
    assert vllm_tier.reader_of("0.31.4") is None
    assert vllm_tier.reader_of("1.32.0") is None
    assert vllm_tier.reader_of("0.32.7rc1") == vllm_tier.VERSIONS["0.32"]


def test_whatever_breaks_inside_does_not_get_into_vllm(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").propagate = True
    one = tier()
    one._tier = Broken()  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert one.lookup(KEY, ReqContext("r")) is LookupResult.MISS
        check_hooks_of_broken(one)
    assert caplog.text.count("lookup failed; told once") == 1


def check_hooks_of_broken(one: KVStoreTier) -> None:
    context = ReqContext("r")
    one.submit_load(job(1, load=True))
    one.submit_store(job(2, load=False))
    one.on_schedule_end(STEP)
    one.on_request_finished(context)
    one.drain_jobs()
    assert one.get_stats() is None
    # `finished` raises, too: what had failed before is still to be reported, and only once.
    assert not list(one.get_finished_jobs())
    one._tier = None
    assert [done.job_id for done in one.get_finished_jobs()] == [1, 2]
    one.shutdown()


def test_every_hook_takes_what_vllm_gives_it() -> None:
    """The contract with this version: no abstract method is left, no parameter has another name."""
    assert not KVStoreTier.__abstractmethods__
    for name, method in inspect.getmembers(SecondaryTierManager, inspect.isfunction):
        if name == "__init__":
            continue
        theirs = list(inspect.signature(method).parameters)
        ours = list(inspect.signature(getattr(KVStoreTier, name)).parameters)
        assert ours == theirs, name
    constructor = inspect.signature(SecondaryTierManager.__init__).parameters
    assert list(inspect.signature(KVStoreTier.__init__).parameters)[: len(constructor)] == list(
        constructor
    )


def test_metrics_are_defined_before_they_are_counted() -> None:
    (name,) = KVStoreTier.build_metric_definitions({})
    assert name == vllm_tier.METRIC
