"""The backend as SGLang drives it, without SGLang: loaded by the three names of a dynamic backend,
given a host pool, asked by keys and slots, with real servicers below. The interface is that of
`sglang_double`; `python -m tests.sglang` drives SGLang's own.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.model.reasons import Reason
from tests.integration.polling import within
from tests.integration.stack import Stack

pytestmark = pytest.mark.torch

DOUBLE = Path(__file__).resolve().parent / "sglang_double"
PAGE, PAGES, LAYERS, HEADS, HEAD_SIZE, LATENT = 4, 40, 2, 2, 64, 96
PAGE_BYTES = 2 * LAYERS * HEADS * HEAD_SIZE * PAGE * 2
LAYOUTS = ["page_first", "page_first_direct", "page_head", "layer_first"]
KEYS = [f"{number:064x}" for number in range(1, 33)]
SETTINGS: dict[str, Any] = {
    "model_path": "org/model",
    "load_format": "auto",
    "weight_version": "default",
    "attention_backend": "fa3",
    "device": "cuda",
    "kv_cache_dtype": "auto",
    "enable_lora": False,
    "lora_paths": None,
    "speculative_algorithm": None,
}


class HostPool:
    """Host memory of one rank: K and V of 2 layers, in the order that the layout says."""

    def __init__(self, layout: str, mla: bool = False, dtype: str = "bfloat16") -> None:
        import torch

        self.layout, self.page_size, self.layer_num = layout, PAGE, LAYERS
        self.size = PAGES * PAGE
        self.target_layer_num, self.start_layer = LAYERS, 0
        self.dtype = getattr(torch, dtype)
        self._sides, self._width = (1, LATENT) if mla else (2, HEADS * HEAD_SIZE)
        if mla:
            self.kv_cache_dim = LATENT
        else:
            self.head_num, self.head_dim = HEADS, HEAD_SIZE
        shape = (self._sides, PAGES * PAGE * LAYERS * self._width)
        self.kv_buffer: Any = torch.zeros(shape, dtype=self.dtype)
        self.clear()

    def clear(self) -> None:
        import torch

        self.slot_used = torch.zeros(PAGES * PAGE, dtype=torch.bool)

    def get_size_per_token(self) -> int:
        return int(self._sides * LAYERS * self._width * self.dtype.itemsize)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        row = self._width * self.dtype.itemsize
        side = PAGES * PAGE * LAYERS * row
        layers, each = (LAYERS, 1) if self.layout == "layer_first" else (1, LAYERS)
        addresses = []
        for slot in indices.tolist()[::PAGE]:
            for layer in range(layers):
                begin = (layer * PAGES * PAGE + slot * each) * row
                addresses += [
                    self.kv_buffer.data_ptr() + begin + number * side
                    for number in range(self._sides)
                ]
        return addresses, [PAGE * each * row] * len(addresses)

    def memory(self) -> Any:
        import torch

        return self.kv_buffer.view(torch.uint8).numpy()

    def content(self, slots: Any) -> list[bytes]:
        flat, first = self.memory().reshape(-1), self.kv_buffer.data_ptr()
        addresses, sizes = self.get_page_buffer_meta(slots)
        pieces = [
            flat[address - first : address - first + size].tobytes()
            for address, size in zip(addresses, sizes, strict=True)
        ]
        each = len(pieces) // (len(slots) // PAGE)
        return [b"".join(pieces[at : at + each]) for at in range(0, len(pieces), each)]

    def put(self, slots: Any, pages: list[bytes]) -> None:
        """The reverse of `content`."""
        flat, first = self.memory().reshape(-1), self.kv_buffer.data_ptr()
        data, begin = np.frombuffer(b"".join(pages), np.uint8), 0
        for address, size in zip(*self.get_page_buffer_meta(slots), strict=True):
            flat[address - first : address - first + size] = data[begin : begin + size]
            begin += size

    def noise(self, seed: int) -> None:
        memory = self.memory()
        memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape, np.uint8)


class MHATokenToKVPoolHost(HostPool):
    """By SGLang's name of it: a backend knows a pool by its class."""


class MLATokenToKVPoolHost(HostPool):
    """See above."""


def Pool(layout: str, mla: bool = False, dtype: str = "bfloat16") -> HostPool:
    made = MLATokenToKVPoolHost if mla else MHATokenToKVPoolHost
    return made(layout, mla, dtype)


class Engine:
    """What of SGLang a backend sees."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.interface: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")
        self._create = factory.StorageBackendFactory.create_backend
        self.context: Any = importlib.import_module("sglang.srt.runtime_context")
        self._made: list[Any] = []
        self.publish()

    def publish(self, *, multimodal: bool = False, **settings: Any) -> None:
        config = SimpleNamespace(to_dict=lambda: {"model_type": "llama"}, _commit_hash=None)
        self.context.model_config = SimpleNamespace(
            hf_config=config, dtype="bf16", is_multimodal=multimodal, num_attention_heads=HEADS
        )
        self.context.started.clear()
        self.context.started.update({**SETTINGS, **settings})
        self.context.now.clear()
        self.context.overrides.clear()

    def load_files(self, path: str) -> None:
        """What an update of the weights from disk leaves, whether its flush is refused or not."""
        self.context.now["model_path"] = path
        self.context.overrides.append(("model_runner.update_model_fields", {"model_path": path}))

    def start(
        self, pool: Any, *, rank: int = 0, ranks: int = 1, others: tuple[str, ...] = (), **more: Any
    ) -> Any:
        extra = {
            "backend_name": "kvstore",
            "module_path": "kvstore_client.engines.sglang",
            "class_name": "KVStoreBackend",
            "interface_v1": 1,
            "target": self._target,
            "weights_revision": "r1",
            # A machine that is slow decides no test.
            "lookup_deadline_ms": 8_000,
            "load_deadline_ms": 8_000,
            "store_deadline_ms": 8_000,
            **more,
        }
        config = self.interface.HiCacheStorageConfig(
            tp_rank=rank, tp_size=ranks, extra_config=json.loads(json.dumps(extra))
        )
        backend = self._create("dynamic", config, pool)
        self._made.append(backend)
        backend.register_mem_pool_host(pool)
        for name in ("kv", *others):
            backend.register_mem_host_pool_v2(pool if name == "kv" else object(), name)
        backend.on_host_pools_registered()
        return backend

    def close(self) -> None:
        for backend in self._made:
            backend.close()
            backend.close()


@pytest.fixture(scope="module")
def double() -> Iterator[None]:
    """`import sglang` is the double while these tests run, and nothing afterwards."""
    sys.path.insert(0, str(DOUBLE))
    yield
    sys.path.remove(str(DOUBLE))
    ours = ("kvstore_client.engines.sglang", "kvstore_client.engines.sglang_0_5_23")
    for name in list(sys.modules):
        if name in ours or name.split(".")[0] == "sglang":
            del sys.modules[name]


@pytest.fixture
def engine(double: None, stack: Stack) -> Iterator[Engine]:
    made = Engine(stack.socket())
    yield made
    made.close()


def slots(first: int, pages: int) -> Any:
    """Of pages that follow one another from page `first` on."""
    import torch

    return torch.arange(first * PAGE, (first + pages) * PAGE)


def scattered(pages: int) -> Any:
    """Of pages here and there, the last ones first."""
    import torch

    starts = [PAGES - 1 - 2 * number for number in range(pages)]
    return torch.cat([torch.arange(start * PAGE, (start + 1) * PAGE) for start in starts])


MLA = [(True, layout) for layout in LAYOUTS if layout != "page_head"]


@pytest.mark.parametrize(("mla", "layout"), [*((False, layout) for layout in LAYOUTS), *MLA])
def test_pages_come_back_byte_by_byte(engine: Engine, mla: bool, layout: str) -> None:
    source, target = Pool(layout, mla), Pool(layout, mla)
    source.noise(1)
    target.noise(2)
    before = target.memory().copy()
    writer, reader = engine.start(source), engine.start(target)
    assert writer.batch_set_v1(KEYS[:6], slots(3, 6)) == [True] * 6
    assert reader.batch_exists(KEYS[:8]) == 6
    into = scattered(6)
    assert reader.batch_get_v1(KEYS[:6], into) == [True] * 6
    assert target.content(into) == source.content(slots(3, 6))
    # Nothing else was written to: with those pages as they were, all is as it was.
    undo = Pool(layout, mla)
    undo.memory()[:] = before
    target.put(into, undo.content(into))
    assert (target.memory() == before).all()


def test_the_check_sees_wrong_bytes(engine: Engine) -> None:
    """Negative control: one bit altered after the load."""
    source, target = Pool("page_first"), Pool("page_first")
    source.noise(1)
    assert all(engine.start(source).batch_set_v1(KEYS[:2], slots(0, 2)))
    assert all(engine.start(target).batch_get_v1(KEYS[:2], slots(0, 2)))
    assert target.content(slots(0, 2)) == source.content(slots(0, 2))
    target.memory().reshape(-1)[7] ^= 1
    assert target.content(slots(0, 2)) != source.content(slots(0, 2))


def test_nothing_after_the_first_miss_counts(engine: Engine) -> None:
    pool = Pool("page_first")
    pool.noise(1)
    backend = engine.start(pool)
    assert all(backend.batch_set_v1(KEYS[:2], slots(0, 2)))
    assert all(backend.batch_set_v1(KEYS[3:6], slots(3, 3)))
    assert backend.batch_exists(KEYS[:6]) == 2
    assert backend.batch_exists(KEYS[3:6]) == 3
    assert backend.batch_get_v1(KEYS[:6], slots(10, 6)) == [True, True] + [False] * 4
    assert pool.content(slots(10, 2)) == pool.content(slots(0, 2))
    assert backend.batch_exists(KEYS[2:]) == 0
    assert backend.batch_exists([]) == 0


def test_the_keys_before_a_batch_are_the_prompts(engine: Engine, stack: Stack) -> None:
    pool = Pool("page_first")
    backend = engine.start(pool)
    extra = engine.interface.HiCacheStorageExtraInfo(prefix_keys=KEYS[:2])
    assert all(backend.batch_set_v1(KEYS[:2], slots(0, 2)))
    assert all(backend.batch_set_v1(KEYS[2:4], slots(2, 2), extra))
    assert backend.batch_exists(KEYS[:4]) == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_pages_are_served_where_they_are_chosen(engine: Engine, layout: str) -> None:
    import torch

    pool = Pool(layout)
    backend = engine.start(pool, interface_v1=0)
    size = pool.get_size_per_token() * PAGE // 2
    pages = [torch.randn(size).to(torch.bfloat16) for _ in range(3)]
    assert backend.batch_set(KEYS[:3], pages)
    assert backend.set(KEYS[3], pages[0])
    assert backend.exists(KEYS[3])
    assert not backend.exists(KEYS[4])
    into = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(5)]
    got = backend.batch_get(KEYS[:5], into)
    assert [page is target for page, target in zip(got, into, strict=True)] == [True] * 4 + [False]
    assert all(torch.equal(page, target) for page, target in zip(pages, into, strict=False))
    assert torch.equal(backend.get(KEYS[1], torch.zeros_like(pages[1])), pages[1])
    assert backend.get(KEYS[1]) is None
    assert backend.get(KEYS[9], into[0]) is None
    assert backend.batch_get_v1(KEYS[:1], slots(0, 1)) == [False]
    assert backend.batch_set_v1(KEYS[:1], slots(0, 1)) == [False]


def test_flat_pages_of_another_order_are_not_served(engine: Engine) -> None:
    import torch

    pool = Pool("layer_first")
    backend = engine.start(pool)
    page = torch.zeros(pool.get_size_per_token() * PAGE // 2, dtype=torch.bfloat16)
    assert all(backend.batch_set_v1(KEYS[:1], slots(0, 1)))
    assert backend.batch_get(KEYS[:1], [page]) == [None]
    assert not backend.batch_set(KEYS[1:2], [page])


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 1, "ranks": 2},
        {"ranks": 4},
        {"layout": "page_head"},
        {"dtype": "float16"},
        {"weights_revision": "r2"},
        {"weight_epoch": 1},
        {"interface_v1": 0},
    ],
    ids=str,
)
def test_what_differs_shares_nothing(engine: Engine, other: dict[str, Any]) -> None:
    given = {"layout": "layer_first", "dtype": "bfloat16", "ranks": 2, **other}
    mine = engine.start(Pool("layer_first"), ranks=2)
    assert all(mine.batch_set_v1(KEYS[:2], slots(0, 2)))
    pool = Pool(given.pop("layout"), dtype=given.pop("dtype"))
    assert engine.start(pool, **given).batch_exists(KEYS[:2]) == 0
    assert engine.start(Pool("layer_first"), ranks=2).batch_exists(KEYS[:2]) == 2


def test_ranks_of_mla_share(engine: Engine) -> None:
    first, second = (engine.start(Pool("page_first", True), rank=r, ranks=2) for r in (0, 1))
    assert all(first.batch_set_v1(KEYS[:2], slots(0, 2)))
    assert second.batch_exists(KEYS[:2]) == 2


@pytest.mark.parametrize("how", ["flush", "version", "files", "clear"])
def test_what_was_stored_before_other_weights_is_not_found(engine: Engine, how: str) -> None:
    pool, untouched = Pool("page_first"), engine.start(Pool("page_first"))
    backend = engine.start(pool)
    assert all(backend.batch_set_v1(KEYS[:2], slots(0, 2)))
    if how == "flush":
        pool.clear()
    elif how == "clear":
        backend.clear()
    elif how == "files":  # of the same path, and the flush was refused
        engine.load_files(SETTINGS["model_path"])
    else:
        engine.context.now["weight_version"] = "2"
    assert backend.batch_get_v1(KEYS[:2], slots(0, 2)) == [False] * 2
    assert all(backend.batch_set_v1(KEYS[2:4], slots(0, 2)))
    assert backend.batch_exists(KEYS[2:4]) == 2
    expected = 0 if how in ("version", "files") else 2
    assert untouched.batch_exists(KEYS[:2]) == expected
    assert untouched.batch_exists(KEYS[2:4]) == 0


def test_weights_without_a_name_are_for_their_own_engine(engine: Engine) -> None:
    first, second = (engine.start(Pool("page_first"), weights_revision="") for _ in range(2))
    assert all(first.batch_set_v1(KEYS[:2], slots(0, 2)))
    assert first.batch_exists(KEYS[:2]) == 2
    assert second.batch_exists(KEYS[:2]) == 0


@pytest.mark.parametrize(
    ("settings", "more", "named"),
    [
        ({"enable_lora": True}, {}, "LoRA"),
        ({"lora_paths": ["a"]}, {}, "LoRA"),
        ({"multimodal": True}, {}, "images"),
        ({"quantization_param_path": "/s"}, {}, "/s"),
        ({}, {"others": ("swa",)}, "swa"),
        ({}, {"no_such": 1}, "no_such"),
        ({}, {"target": ""}, "target"),
        ({}, {"store_deadline_ms": 9_000}, "deadline"),
        ({}, {"durable": "yes"}, "durable"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_be_served_goes_on_without(
    engine: Engine,
    settings: dict[str, Any],
    more: dict[str, Any],
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.publish(**settings)
    backend = engine.start(Pool("page_first"), **more)
    assert "kvstore is off" in caplog.text
    assert named in caplog.text
    assert backend.batch_set_v1(KEYS[:2], slots(0, 2)) == [False] * 2
    assert backend.batch_exists(KEYS[:2]) == 0
    assert backend.batch_get_v1(KEYS[:2], slots(0, 2)) == [False] * 2
    assert not backend.exists(KEYS[0])


def test_a_model_of_several_pools_is_told_that_nothing_is_there(engine: Engine) -> None:
    backend = engine.start(Pool("page_first"), others=("mamba",))
    moves = [SimpleNamespace(name="mamba", keys=KEYS[:2]), SimpleNamespace(name="swa", keys=None)]
    nothing = {"mamba": [False, False], "swa": []}
    assert backend.batch_exists_v2(KEYS[:2], moves).kv_hit_pages == 0
    assert backend.batch_get_v2(moves) == backend.batch_set_v2(moves) == nothing


def test_nothing_is_raised_whatever_is_asked(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool("page_first")
    pool.noise(1)
    before = pool.memory().copy()
    backend = engine.start(pool)
    for keys, where in (
        (["no hash"], slots(0, 1)),
        (KEYS[:2], slots(0, 1)),
        (KEYS[:1], slots(PAGES, 1)),
        (KEYS[:1], slots(-1, 1)),
        (KEYS[:1], slots(-2, 1)),
        (KEYS[:2], slots(PAGES - 1, 2)),
        (KEYS[:1], None),
    ):
        assert backend.batch_set_v1(keys, where) == [False] * len(keys)
        assert backend.batch_get_v1(keys, where) == [False] * len(keys)
    assert backend.batch_exists(["no hash"]) == 0
    assert backend.batch_get(KEYS[:2], [object(), object()]) == [None, None]
    assert not backend.batch_set(KEYS[:1], [object()])
    assert (pool.memory() == before).all()
    assert caplog.text.count("batch_set_v1 failed") == 1, "told once"
    assert all(backend.batch_set_v1(KEYS[:2], slots(0, 2))), "and it goes on"


def test_a_daemon_that_is_away_is_a_miss(double: None, tmp_path: Path) -> None:
    engine = Engine(str(tmp_path / "nobody.sock"))
    backend = engine.start(Pool("page_first"))
    assert backend.batch_exists(KEYS[:2]) == 0
    assert backend.batch_get_v1(KEYS[:2], slots(0, 2)) == [False] * 2
    assert backend.batch_set_v1(KEYS[:2], slots(0, 2)) == [False] * 2
    engine.close()
    assert backend.batch_exists(KEYS[:2]) == 0


def test_a_copy_that_does_not_end_is_a_miss_in_time(engine: Engine, stack: Stack) -> None:
    """The daemon answers and does not publish: the push ends by its deadline, and is no success."""
    backend = engine.start(Pool("page_first"), store_deadline_ms=200)
    assert all(backend.batch_set_v1(KEYS[:1], slots(0, 1)))
    stack.hold()
    assert backend.batch_set_v1(KEYS[1:3], slots(0, 2)) == [False] * 2
    stack.let_go()


@pytest.mark.parametrize("pages_in_view", [1, 3])
def test_more_pages_than_may_be_looked_at_in_place(
    double: None, make_stack: Callable[..., Stack], pages_in_view: int
) -> None:
    """What a session may not look at in the daemon's memory at once goes through its own."""
    stack = make_stack(view_bytes_per_session_max=pages_in_view * PAGE_BYTES)
    engine = Engine(stack.socket())
    source, target = Pool("page_first"), Pool("page_first")
    source.noise(1)
    assert all(engine.start(source).batch_set_v1(KEYS[:10], slots(0, 10)))
    assert all(engine.start(target).batch_get_v1(KEYS[:10], slots(5, 10)))
    assert target.content(slots(5, 10)) == source.content(slots(0, 10))
    assert any(record.reason is Reason.VIEW_LIMIT for record in stack.records("acquire"))
    engine.close()
    assert within(10, lambda: not any(stack.held())), "leases are left"


def test_a_version_that_was_not_tried_is_refused(engine: Engine) -> None:
    module = importlib.import_module("kvstore_client.engines.sglang")
    assert list(module.VERSIONS) == [importlib.import_module("sglang.version").__version__]
    for path in module.VERSIONS.values():
        assert importlib.import_module(path).facts_of
