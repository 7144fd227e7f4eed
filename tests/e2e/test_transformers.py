"""A transformers model and a real daemon: what one process saves another restores, bit for bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import grpc  # noqa: E402

from kvstore.model.fingerprint import Fingerprint  # noqa: E402
from kvstore.wire.v1 import admin_pb2, admin_pb2_grpc  # noqa: E402
from kvstore_client import Client, ClientConfig  # noqa: E402
from kvstore_client.engines.prefix_cache import PrefixCache  # noqa: E402
from kvstore_client.engines.transformers import (  # noqa: E402
    BlockCutter,
    cut_blocks,
    fingerprint_of,
    generate,
    state_digest,
)
from tests.daemon import Daemon  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.torch]

Daemons = Callable[..., Daemon]
SEED = 3
BLOCK_TOKENS = 16
VOCABULARY = 151
CALL_S = 10.0
# A machine that runs other things must not turn a slow call into a miss here.
CONFIG = ClientConfig(deadline_ms=20_000)


def tiny(dtype: Any, seed: int = SEED) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.08,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).to(dtype).eval()


def fingerprint(model: Any, **changes: Any) -> Fingerprint:
    revision = state_digest(model.state_dict().items())
    options = {"model_name": "tiny", "weights_revision": revision, **changes}
    return fingerprint_of(model, block_tokens=BLOCK_TOKENS, **options)


def tokens(count: int, seed: int = SEED) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def blobs(cache: Any, blocks: int) -> bytes:
    out = np.zeros(blocks * BlockCutter(cache, BLOCK_TOKENS).shape.block_bytes, np.uint8)
    cut_blocks(cache, 0, blocks, BLOCK_TOKENS, out)
    return out.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_engine_restores_the_same_bits_and_answers_equally(
    daemons: Daemons, dtype: str
) -> None:
    daemon = daemons()
    model, ids = tiny(getattr(torch, dtype)), tokens(150)
    with Client(daemon.data_socket, config=CONFIG) as writer:
        cache = PrefixCache(writer, model, fingerprint(model))
        live = generate(model, ids[:144], None, 1).cache
        saved = cache.save(ids, live)
        assert saved.pushed is not None
        assert (saved.pushed.stored, saved.pushed.skipped) == (9, 0)
    with Client(daemon.data_socket, config=CONFIG) as reader:
        restored = PrefixCache(reader, model, fingerprint(model)).restore(ids)
        arriving = PrefixCache(reader, model, fingerprint(model)).restore(ids, layerwise=True)
        by_layer = generate(model, ids, arriving.cache, 16)
    assert restored.tokens == arriving.tokens == 144
    assert restored.cache is not None
    assert blobs(restored.cache, 9) == blobs(live, 9)
    from_store = generate(model, ids, restored.cache, 16)
    assert from_store.token_ids == generate(model, ids, live, 16).token_ids
    assert blobs(by_layer.cache, 9) == blobs(live, 9)
    assert by_layer.token_ids == from_store.token_ids
    assert torch.equal(by_layer.first_logits, from_store.first_logits)


def test_a_conversation_saves_only_what_is_new(daemons: Daemons) -> None:
    daemon = daemons()
    model = tiny(torch.float32)
    with Client(daemon.data_socket, config=CONFIG) as client:
        cache = PrefixCache(client, model, fingerprint(model))
        prompt, stored = tokens(100), []
        for turn in range(3):
            restored = cache.restore(prompt)
            made = generate(model, prompt, restored.cache, 20)
            assert made.token_ids == generate(model, prompt, None, 20).token_ids
            saved = cache.save([*prompt, *made.token_ids], made.cache, from_token=restored.tokens)
            assert saved.pushed is not None
            stored.append((restored.tokens, saved.pushed.stored))
            prompt = [*prompt, *made.token_ids, *tokens(30, turn)]
        assert stored == [(0, 7), (112, 3), (160, 3)]


def test_what_differs_is_a_miss_that_names_the_field(daemons: Daemons) -> None:
    daemon = daemons()
    model, ids = tiny(torch.float32), tokens(100)
    base = fingerprint(model)
    with Client(daemon.data_socket, config=CONFIG) as client:
        live = generate(model, ids, None, 1).cache
        PrefixCache(client, model, base).save(ids, live)
        other = fingerprint(tiny(torch.float32, SEED + 1))
        offers = {
            "identity.weights_revision": other,
            "identity.model_name": fingerprint(model, model_name="other"),
            "encoding.attention_backend": dataclasses.replace(
                base, encoding=dataclasses.replace(base.encoding, attention_backend="other")
            ),
        }
        for field, offered in offers.items():
            missed = PrefixCache(client, model, offered).restore(ids)
            assert missed.tokens == 0
            assert missed.hit is not None
            assert [each.field for each in missed.hit.differences] == [field]
        assert PrefixCache(client, model, base).restore(ids).tokens == 96


def test_a_raised_epoch_ends_every_restore(daemons: Daemons) -> None:
    daemon = daemons()
    model, ids = tiny(torch.float32), tokens(100)
    with Client(daemon.data_socket, config=CONFIG) as client:
        cache = PrefixCache(client, model, fingerprint(model))
        cache.save(ids, generate(model, ids, None, 1).cache)
        assert cache.restore(ids).tokens == 96
        with grpc.insecure_channel(f"unix:{daemon.admin_socket}") as channel:
            request = admin_pb2.SetWeightEpochRequest(model_name="tiny", epoch=1, why="test")
            admin_pb2_grpc.AdminStub(channel).SetWeightEpoch(request, timeout=CALL_S)
        assert cache.restore(ids).tokens == 0
        again = cache.restore(ids)
        assert again.tokens == 0
        assert again.hit is not None
        assert [each.field for each in again.hit.differences] == ["identity.weight_epoch"]
        newer = PrefixCache(client, model, fingerprint(model, weight_epoch=1))
        assert newer.restore(ids).tokens == 0


def test_unknown_weights_stay_with_their_engine(daemons: Daemons) -> None:
    daemon = daemons()
    model, ids = tiny(torch.float32), tokens(100)
    unknown = fingerprint(model, weights_revision=None)
    with (
        Client(daemon.data_socket, config=CONFIG) as one,
        Client(daemon.data_socket, config=CONFIG) as other,
    ):
        held = PrefixCache(one, model, unknown)
        held.save(ids, generate(model, ids, None, 1).cache)
        assert held.restore(ids).tokens == 96
        assert PrefixCache(other, model, unknown).restore(ids).tokens == 0


def test_no_daemon_is_a_miss_and_a_skipped_save(tmp_path: Path) -> None:
    model, ids = tiny(torch.float32), tokens(100)
    with Client(str(tmp_path / "absent.sock"), config=ClientConfig(deadline_ms=500)) as client:
        cache = PrefixCache(client, model, fingerprint(model))
        missed = cache.restore(ids)
        assert (missed.cache, missed.tokens, missed.why) == (None, 0, "UNAVAILABLE")
        saved = cache.save(ids, generate(model, ids, missed.cache, 1).cache)
        assert saved.pushed is not None
        assert saved.pushed.stored == 0
