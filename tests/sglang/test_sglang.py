"""SGLang's own pools, keys, controller and storage threads with the store below them: what one rank
has backed up, another process' rank gets byte by byte, or it gets nothing.
"""

from __future__ import annotations

import logging
import random
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_context
from torch.multiprocessing import reductions

from kvstore_client.engines.sglang_0_5_23 import facts_of
from kvstore_client.engines.sglang_facts import weights_folder
from tests.daemon import Daemon
from tests.sglang.kit import PAGE_TOKENS, Handle, Rank, publish, update_weights, write_config

LAYOUTS = [
    *(
        (False, layout)
        for layout in ("page_first", "layer_first", "page_first_direct", "page_head")
    ),
    *((True, layout) for layout in ("page_first", "layer_first", "page_first_direct")),
]
PROMPTS = random.Random(7)
RANK = {"dcp_size": 1, "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_size": 1}


def prompt(pages: int) -> list[int]:
    return [PROMPTS.randrange(1000) for _ in range(pages * PAGE_TOKENS)]


@pytest.fixture(autouse=True)
def model(tmp_path: Path) -> Path:
    folder = write_config(tmp_path / "model")
    publish(folder)
    return folder


Start = Callable[..., Rank]


@pytest.fixture
def start(daemon: Daemon) -> Iterator[Start]:
    made: list[Rank] = []

    def start(**more: Any) -> Rank:
        made.append(Rank(**{"target": str(daemon.data_socket), **more}))
        return made[-1]

    yield start
    for rank in made:
        rank.close()


def stored(rank: Rank, tokens: list[int], seed: int = 1, **namespace: Any) -> list[bytes]:
    """Backs up a prompt; its pages."""
    slots = rank.fill(len(tokens), seed)
    assert rank.back_up(tokens, slots, **namespace) == len(tokens)
    return rank.content(slots)


def found(rank: Rank, tokens: list[int], **namespace: Any) -> list[bytes]:
    """Prefetches a prompt into slots that held something else; the pages that SGLang would use."""
    rank.host.free(rank.fill(len(tokens), 99))
    loaded, slots = rank.prefetch(tokens, **namespace)
    if slots is None:
        return []
    pages = rank.content(slots)
    assert len(pages) * PAGE_TOKENS == loaded
    return pages


def until_found(rank: Rank, key: str) -> None:
    """A client that had no answer for a while asks again only now and then."""
    for _ in range(400):
        if rank.backend.exists(key):
            return
        rank.controller.storage_stop_event.wait(0.05)
    raise AssertionError("the daemon was not found again")


@pytest.mark.parametrize(("mla", "layout"), LAYOUTS)
@pytest.mark.parametrize("v1", [True, False])
def test_pages_come_back_byte_by_byte(start: Start, mla: bool, layout: str, v1: bool) -> None:
    tokens = prompt(12)
    pages = stored(start(layout=layout, mla=mla, v1=v1), tokens)
    assert found(start(layout=layout, mla=mla, v1=v1), tokens) == pages


def test_the_check_sees_wrong_bytes(start: Start) -> None:
    """Negative control: nothing verifies what this backend alters, and the comparison tells."""
    tokens = prompt(12)
    pages = stored(start(), tokens)
    altered = found(start(backend="tests.sglang.corrupting:CorruptingBackend"), tokens)
    assert len(altered) == 12
    assert all(right != wrong for right, wrong in zip(pages, altered, strict=True))
    assert found(start(), tokens) == pages


def test_more_pages_than_a_batch_takes(start: Start) -> None:
    tokens = prompt(300)
    pages = stored(start(), tokens)
    assert found(start(), tokens) == pages


def test_only_the_leading_run_is_found(start: Start) -> None:
    writer, reader, tokens = start(), start(), prompt(9)
    keys = writer.keys(tokens)
    slots = writer.fill(len(tokens), 3)
    for first, end in ((0, 4), (5, 9)):
        part = slots[first * PAGE_TOKENS : end * PAGE_TOKENS]
        assert all(writer.backend.batch_set_v1(keys[first:end], part))
    assert found(reader, tokens) == writer.content(slots)[:4]
    assert reader.backend.batch_exists(keys[5:]) == 4
    # The pages behind one that is not there are not reported, whatever is stored.
    into = reader.fill(len(tokens), 98)
    assert reader.backend.batch_get_v1(keys, into) == [True] * 4 + [False] * 5


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 1},
        {"ranks": 1},
        {"dtype": torch.float16},
        {"layout": "page_first_direct"},
        {"weights_revision": "r2"},
        {"weight_epoch": 1},
        {"model_name": "n"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_differs_shares_nothing(start: Start, other: dict[str, Any]) -> None:
    tokens = prompt(4)
    mine = {"rank": 0, "ranks": 2}
    pages = stored(start(**mine), tokens)
    assert found(start(**{**mine, **other}), tokens) == []
    assert found(start(**mine), tokens) == pages


def test_ranks_of_mla_are_one_and_one_of_them_writes(start: Start) -> None:
    tokens = prompt(4)
    first, second = (start(mla=True, rank=rank, ranks=2) for rank in (0, 1))
    assert second.back_up(tokens, second.fill(len(tokens), 5)) == 0
    assert found(first, tokens) == []
    pages = stored(first, tokens)
    assert found(second, tokens) == pages


def test_another_configuration_shares_nothing(start: Start, tmp_path: Path) -> None:
    tokens = prompt(4)
    stored(start(), tokens)
    publish(write_config(tmp_path / "other", rope_theta=20000.0))
    assert found(start(), tokens) == []


def test_namespaces_of_requests_share_nothing(start: Start) -> None:
    rank, tokens = start(), prompt(4)
    pages = stored(rank, tokens, cache_salt="a")
    for other in (
        {},
        {"cache_salt": "b"},
        {"extra_key": "a"},
        {"cache_salt": "a", "extra_key": "x"},
    ):
        assert found(rank, tokens, **other) == []
    assert found(rank, tokens, cache_salt="a") == pages


def test_a_flush_and_an_update_of_weights_forget_what_was_stored(start: Start) -> None:
    rank, tokens, later = start(), prompt(4), prompt(4)
    pages = stored(rank, tokens)
    rank.flush()
    assert found(rank, tokens) == []
    mine = stored(rank, later, 2)
    assert found(rank, later) == mine
    # What it stores from now on is for it alone; the others still have theirs.
    other = start()
    assert found(other, later) == []
    assert found(other, tokens) == pages
    get_context().override("test", weight_version="2")
    assert found(other, tokens) == []


@pytest.fixture
def updates(tmp_path: Path) -> Iterator[None]:
    """What a process has only once is as before when the test has ended."""
    before = dict(sys.modules)
    for name in ("checkpoint_engine", "checkpoint_engine.worker", "httpx"):
        sys.modules.setdefault(name, types.ModuleType(name))
    vars(sys.modules["checkpoint_engine.worker"])["update_weights_from_ipc"] = print
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    dist.new_group([0])
    was = {name: getattr(reductions, name) for name in ("reduce_tensor", "rebuild_cuda_tensor")}
    yield
    dist.destroy_process_group()
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in ("checkpoint_engine", "httpx") or "checkpoint_engine" in name:
            del sys.modules[name]
    vars(reductions).update(was)
    vars(reductions).pop("_reduce_tensor_original", None)


@pytest.mark.parametrize("how", ["disk", "tensor", "ipc", "group"])
def test_other_weights_are_seen_without_a_version_and_a_flush(
    start: Start, updates: None, how: str, tmp_path: Path
) -> None:
    """Else their KV would be where engines with the first weights look for theirs."""
    rank, tokens, later = start(), prompt(4), prompt(4)
    stored(rank, tokens)
    another = start()
    update_weights(how)
    mine = stored(rank, later, 2)
    assert found(rank, later) == mine
    assert found(rank, tokens) == []
    assert found(another, later) == []
    # Nor does a name of the files tell the weights of a backend that is attached afterwards.
    facts = facts_of("0.5.23", SimpleNamespace(**RANK), rank.host, (), flat=False)
    assert facts.updated
    assert weights_folder(facts) is None


def test_clear_forgets_and_disturbs_nobody(start: Start) -> None:
    rank, other, tokens = start(), start(), prompt(4)
    pages = stored(rank, tokens)
    assert rank.controller.clear_storage_backend()
    assert found(rank, tokens) == []
    assert found(other, tokens) == pages


def test_weights_that_nothing_names_are_for_their_own_engine(start: Start) -> None:
    """The file was written after this process had begun, so it may not be what was loaded."""
    tokens = prompt(4)
    rank = start(weights_revision=None)
    pages = stored(rank, tokens)
    assert found(rank, tokens) == pages
    assert found(start(weights_revision=None), tokens) == []


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}, "LoRA"),
        ({"quantization_param_path": "/scales.json"}, "scales"),
    ],
)
def test_an_engine_whose_pages_a_key_does_not_tell_is_left_alone(
    start: Start, model: Path, settings: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(model, **settings)
    rank, tokens = start(), prompt(2)
    assert "kvstore is off" in caplog.text
    assert why in caplog.text
    assert rank.back_up(tokens, rank.fill(len(tokens), 1)) == 0
    assert found(rank, tokens) == []


def test_a_page_that_gets_a_second_part_is_not_stored_any_more(start: Start) -> None:
    rank, tokens = start(), prompt(2)
    stored(rank, tokens)
    rank.backend.register_mem_host_pool_v2(object(), "swa")
    assert found(rank, tokens) == []
    assert rank.back_up(tokens, rank.fill(len(tokens), 1)) == 0


def test_a_second_pool_is_asked_for_and_nothing_is_there(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """As the threads of a model with recurrent layers or windows would ask."""
    rank, tokens = start(), prompt(2)
    stored(rank, tokens)
    rank.backend.register_mem_host_pool_v2(object(), "mamba")
    moves = [PoolTransfer(name=PoolName.MAMBA, keys=rank.keys(tokens))]
    rank.controller.prefetch(Handle("r"), rank.key(tokens), extra_pools=moves)
    assert rank.controller.prefetch_hit_queue.get(timeout=30).storage_hit_count == 0
    assert rank.backend.batch_get_v2(moves) == {PoolName.MAMBA: [False] * 2}
    assert rank.backend.batch_set_v2(moves) == {PoolName.MAMBA: [False] * 2}
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "wrong", [{"no_such": 1}, {"target": ""}, {"load_deadline_ms": 60_000}, {"durable": "yes"}]
)
def test_an_option_that_is_wrong_switches_off(
    start: Start, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rank, tokens = start(**wrong), prompt(2)
    assert "kvstore is off" in caplog.text
    assert found(rank, tokens) == []


def test_pages_survive_the_daemon_and_it_may_be_away(start: Start, daemon: Daemon) -> None:
    writer, reader, tokens = start(durable=True), start(), prompt(8)
    pages = stored(writer, tokens)
    daemon.kill()
    assert found(reader, tokens) == []
    later = prompt(2)
    assert writer.back_up(later, writer.fill(len(later), 1)) == 0
    daemon.restart()
    assert found(start(), tokens) == pages
    until_found(reader, reader.keys(tokens)[0])
    assert found(reader, tokens) == pages


def test_a_daemon_that_stands_still_costs_the_deadlines_and_no_more(
    start: Start, daemon: Daemon
) -> None:
    """Stopped and woken again: what was asked meanwhile is a miss, and nothing is written late."""
    limits = dict.fromkeys(("lookup_deadline_ms", "load_deadline_ms", "store_deadline_ms"), 1_500)
    writer, reader, tokens = start(), start(**limits), prompt(6)
    pages = stored(writer, tokens)
    keys, into = reader.keys(tokens), reader.fill(len(tokens), 97)
    reader.backend.batch_exists(keys)
    before = reader.content(into)
    daemon.signal(signal.SIGSTOP)
    begun = time.monotonic()
    results = reader.backend.batch_get_v1(keys, into)
    reader.backend.batch_set_v1(reader.keys(prompt(2)), into[: 2 * PAGE_TOKENS])
    waited_s = time.monotonic() - begun
    daemon.signal(signal.SIGCONT)
    assert results == [False] * 6
    assert waited_s < 8, "SGLang gives its threads 10 s"
    until_found(reader, keys[0])
    assert reader.content(into) == before
    assert found(reader, tokens) == pages


def test_an_engine_starts_without_a_daemon(start: Start, tmp_path: Path) -> None:
    rank, tokens = start(target=str(tmp_path / "nobody.sock")), prompt(2)
    assert found(rank, tokens) == []
    assert rank.back_up(tokens, rank.fill(len(tokens), 1)) == 0


def test_with_failures_at_random_what_is_loaded_is_right(start: Start) -> None:
    """SGLang's own injector, around the backend."""
    writer = start()
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3):
        reader = start()
    assert type(reader.backend).__name__ == "HiCacheStorageFailureInjector"
    rounds = [prompt(6) for _ in range(20)]
    wanted = [stored(writer, tokens, seed) for seed, tokens in enumerate(rounds)]
    hits = 0
    for tokens, pages in zip(rounds, wanted, strict=True):
        got = found(reader, tokens)
        assert got == pages[: len(got)]
        hits += bool(got)
    assert 0 < hits < 20


def test_sglang_gets_figures_of_what_was_moved(start: Start) -> None:
    """For its own histograms of pages and rates, which want its own class."""
    rank, tokens = start(), prompt(6)
    stored(rank, tokens)
    found(rank, tokens)
    stats = rank.backend.get_stats()
    assert isinstance(stats, StorageMetrics)
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([6], [6])
    (written,), (read,) = stats.backup_bandwidth, stats.prefetch_bandwidth
    assert min(written, read) > 0
    assert rank.backend.get_stats().backup_pgs == []


def test_nothing_is_told_that_is_no_matter(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """A store that is in use says so, and its traceback would be a defect."""
    caplog.set_level(logging.INFO, "sglang.kvstore")
    rank, tokens = start(), prompt(2)
    stored(rank, tokens)
    assert "tp=0/1 pp=0/1 layers=0-4" in caplog.text
    assert "Traceback" not in caplog.text
