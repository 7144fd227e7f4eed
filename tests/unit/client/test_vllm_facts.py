"""What is read out of a vLLM engine decides who shares with whom; no vLLM is needed to tell."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.reviews import Review, Reviews
from kvstore.model.fingerprint import Verdict, compare
from kvstore.model.layout import layout_of
from kvstore.model.reasons import KVStoreError
from kvstore_client import Client
from kvstore_client.engines.async_tier import OUTCOMES
from kvstore_client.engines.model_spaces import ModelSpaces, changed_files, process_start_ns
from kvstore_client.engines.options import Options
from kvstore_client.engines.refused import Refused
from kvstore_client.engines.vllm_facts import (
    NO_GROUP,
    CacheGroup,
    Facts,
    fingerprint_of,
    group_of,
    key_of,
    leading_group,
    refusal,
    weights_folder,
    why_unnamed,
)
from kvstore_client.testing import FakeStore
from kvstore_client.weights import DigestMemory, WeightsDigest
from tests.client_kit import model

ROOT = Path(__file__).resolve().parent.parent.parent.parent
DOUBLE = {"content_bytes": 131_072, "row_bytes": 131_072}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def group(**changed: Any) -> CacheGroup:
    """4 layers, 2 KV heads of 64, blocks of 32 tokens in bfloat16: 64 KiB."""
    plain = CacheGroup(
        kind="full",
        window_tokens=0,
        layers=("0", "1", "2", "3"),
        block_tokens=32,
        kv_heads_per_rank=2,
        head_size=64,
        value_head_size=64,
        page_bytes=16_384,
        dtype="bfloat16",
        backend="CPU_ATTN",
        isa="vec/AVX512",
    )
    return dataclasses.replace(plain, **changed)


WINDOW = group(kind="window", window_tokens=128, layers=("4", "5", "6", "7"))
IN_GROUP = {field.name for field in dataclasses.fields(CacheGroup)}


def hybrid(**changed: Any) -> Facts:
    """With a sliding window in every second group; `changed`: of that group."""
    return facts(groups=(group(), dataclasses.replace(WINDOW, **changed)))


def facts(**changed: Any) -> Facts:
    """Of one group, whose own fields may be given, too."""
    of_group = {name: changed.pop(name) for name in IN_GROUP & set(changed)}
    plain = Facts(
        vllm_version="0.32.0",
        model="org/model",
        commit=COMMIT,
        config_from="",
        load_format="auto",
        config={"model_type": "llama", "rope_theta": 10000.0, "_name_or_path": "/a"},
        settings={"dtype": "torch.bfloat16", "quantization": None},
        updates="",
        draft="",
        adapters=False,
        multimodal=False,
        hash_algorithm="sha256_cbor",
        hash_seed="seed",
        hash_tokens=32,
        blocks_per_row=1,
        groups=(group(**of_group),),
        query_heads=4,
        kv_dtype="bfloat16",
        dynamic_scales=False,
        copies=1,
        content_bytes=65_536,
        row_bytes=65_536,
        tensor_parallel=1,
        pipeline_parallel=1,
        context_parallel=1,
        nodes=1,
        executor="uni",
        layout="LBHNC",
        canonical=False,
        on_cpu=True,
    )
    return dataclasses.replace(plain, **changed)


def test_the_fingerprint_is_complete_and_says_the_row() -> None:
    fingerprint = fingerprint_of(facts())
    assert fingerprint.missing() == ()
    assert layout_of(fingerprint).block_bytes == 65_536
    assert fingerprint.identity.weights_revision == f"commit:{COMMIT}"
    assert fingerprint.geometry.attention == "gqa"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"commit": COMMIT[::-1]}, "identity.weights_revision"),
        ({"config": {"model_type": "llama", "rope_theta": 1e6}}, "identity.config_digest"),
        ({"settings": {"dtype": "torch.float16"}}, "identity.config_digest"),
        ({"settings": {"dtype": "torch.bfloat16", "quantization": 8}}, "identity.config_digest"),
        ({"load_format": "safetensors"}, "identity.config_digest"),
        ({"hash_algorithm": "sha256"}, "encoding.layout_version"),
        ({"hash_seed": "another"}, "encoding.layout_version"),
        ({"hash_tokens": 16}, "encoding.layout_version"),
        ({"vllm_version": "0.32.1"}, "encoding.layout_version"),
        ({"layout": "LBNHC"}, "encoding.element_order"),
        ({"canonical": True}, "encoding.element_order"),
        ({"backend": "FLASH_ATTN"}, "encoding.attention_backend"),
        ({"isa": "amx/AVX512"}, "encoding.cpu_isa"),
        ({"on_cpu": False}, "encoding.cpu_isa"),
        ({"kv_dtype": "float16"}, "encoding.kv_dtype"),
        ({"block_tokens": 64, **DOUBLE}, "encoding.block_tokens"),
        ({"blocks_per_row": 2, **DOUBLE}, "encoding.block_tokens"),
        ({"layers": tuple("abcdefgh"), **DOUBLE}, "geometry.layers"),
        ({"tensor_parallel": 2, "copies": 2, "kv_heads_per_rank": 1}, "encoding.layout_version"),
    ],
)  # fmt: skip
def test_each_fact_that_decides_bytes_is_named(changed: dict[str, Any], field: str) -> None:
    differences = fingerprint_of(facts()).differences(fingerprint_of(facts(**changed)))
    assert field in [difference.field for difference in differences]


def test_where_the_model_lies_and_who_wrote_its_config_does_not_matter() -> None:
    other = facts(config={"_name_or_path": "/b", "rope_theta": 10000, "model_type": "llama"})
    assert fingerprint_of(other) == fingerprint_of(facts())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hash_algorithm": "xxhash"}, "use sha256_cbor"),
        ({"hash_algorithm": "xxhash_cbor"}, "use sha256_cbor"),
        ({"nodes": 2}, "several nodes"),
        ({"executor": "ray"}, "several nodes"),
        ({"adapters": True}, "enable_lora"),
        ({"draft": "org/draft"}, "org/draft speculates"),
        ({"multimodal": True}, "images or sounds"),
        ({"kind": "MambaSpec"}, "kind MambaSpec"),
        ({"kind": "CrossAttentionSpec"}, "kind CrossAttentionSpec"),
        ({"groups": (group(), group(kind="MambaSpec"))}, "group 1 of 2 is of the kind MambaSpec"),
        ({"groups": (group(), group(kind="draft"))}, "kind draft"),
        ({"groups": (group(), group(block_tokens=16))}, r"different sizes: \[16, 32\] tokens"),
        ({"groups": (group(), WINDOW), "pipeline_parallel": 2}, "pipeline stages"),
        ({"groups": (group(), group(page_bytes=16_448))}, "not K and V alone"),
        ({"groups": (group(), WINDOW), "content_bytes": 131_072, "row_bytes": 131_072}, "expected"),
        ({"groups": (group(), group(value_head_size=32))}, "different sizes"),
        ({"context_parallel": 2}, "context parallelism"),
        ({"kv_dtype": "fp4"}, "KV type fp4"),
        ({"dynamic_scales": True}, "calculate_kv_scales"),
        ({"value_head_size": 32}, "different sizes"),
        ({"content_bytes": 65_537}, "a row has"),
        ({"content_bytes": 0}, "a row has"),
        ({"content_bytes": 65_000}, "65536 are expected"),
        ({"kv_heads_per_rank": 0}, "kv_heads"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_the_reason(
    changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=said):
        fingerprint_of(facts(**changed))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"window_tokens": 256}, "geometry.cache_group"),
        ({"kind": "chunk"}, "geometry.cache_group"),
        ({"kind": "full", "window_tokens": 0}, "geometry.cache_group"),
        ({"layers": ("4", "5", "6")}, "geometry.cache_group"),
        ({"layers": ("4", "5", "6", "8")}, "geometry.cache_group"),
        ({"kv_heads_per_rank": 1, "head_size": 128, "value_head_size": 128},
         "geometry.cache_group"),
        ({"dtype": "float16"}, "geometry.cache_group"),
        ({"backend": "FLASH_ATTN"}, "geometry.cache_group"),
        ({"backend": "FLASH_ATTN"}, "encoding.attention_backend"),
        ({"isa": "amx/AVX512"}, "encoding.cpu_isa"),
    ],
)  # fmt: skip
def test_each_fact_of_each_group_is_named(changed: dict[str, Any], field: str) -> None:
    plain = fingerprint_of(hybrid())
    assert plain.missing() == ()
    assert layout_of(plain).block_bytes == 65_536, "a row holds a block of either group"
    differences = plain.differences(fingerprint_of(hybrid(**changed)))
    assert field in [difference.field for difference in differences]


def test_groups_in_another_order_and_another_grouping_are_other_models() -> None:
    """The index of a group is in the engine's keys."""
    half = {"content_bytes": 32_768, "row_bytes": 32_768}
    parts = [group(layers=("0", "1")), group(layers=("2", "3"))]
    two = [dataclasses.replace(WINDOW, layers=part.layers) for part in parts]
    made = [
        facts(),
        hybrid(),
        facts(groups=(WINDOW, group())),
        facts(groups=(WINDOW,)),
        facts(groups=(group(window_tokens=128),)),
        facts(groups=(*parts, *two), **half),
        facts(groups=(parts[0], *two, parts[1]), **half),
    ]
    prints = [fingerprint_of(one) for one in made]
    assert len({one.digest for one in prints}) == len(made)
    assert fingerprint_of(facts()).geometry.cache_group == "", "one group: as it always was"
    assert [leading_group(one) for one in made] == [0, 0, 1, NO_GROUP, 0, 0, 0]
    assert "2*full:2x2x64" in prints[5].geometry.cache_group
    assert prints[3].geometry.window_tokens == 128


def test_a_group_with_fewer_layers_leaves_some_of_its_row() -> None:
    ragged = hybrid(layers=("4",))
    assert layout_of(fingerprint_of(ragged)).block_bytes == 65_536
    assert fingerprint_of(facts(groups=(WINDOW, group(layers=("0",))))).geometry.layers == 4


def test_many_groups_have_a_name_that_the_daemon_takes() -> None:
    many = [
        group(layers=(str(index),), kind="chunk", window_tokens=index + 1) for index in range(40)
    ]
    sizes = {"content_bytes": 16_384, "row_bytes": 16_384}
    name = fingerprint_of(facts(groups=tuple(many), **sizes)).geometry.cache_group
    assert len(name.encode()) <= 256
    many[-1] = dataclasses.replace(many[-1], window_tokens=77)
    assert fingerprint_of(facts(groups=tuple(many), **sizes)).geometry.cache_group != name


def test_one_prefix_has_a_key_for_each_group() -> None:
    first, second = (bytes(32) + index.to_bytes(4, "big") for index in (0, 1))
    assert (group_of(first), group_of(second)) == (0, 1)
    assert key_of(first) != key_of(second)


def test_padding_and_ranks_and_latents_are_understood() -> None:
    assert not refusal(facts(row_bytes=69_632))
    two = facts(tensor_parallel=2, copies=2, kv_heads_per_rank=1)
    assert fingerprint_of(two).geometry.kv_heads == 2
    doubled = facts(tensor_parallel=4, copies=4, kv_heads_per_rank=1, content_bytes=131_072,
                    row_bytes=131_072)  # fmt: skip
    assert fingerprint_of(doubled).geometry.kv_heads == 4, "replicas are in the row, too"
    latent = facts(
        kind="mla", kv_heads_per_rank=1, head_size=576, value_head_size=512,
        content_bytes=4 * 32 * 576 * 2, row_bytes=151_552,
    )  # fmt: skip
    assert layout_of(fingerprint_of(latent)).block_bytes == 147_456


def test_what_is_unknown_is_held_not_guessed() -> None:
    assert fingerprint_of(facts(commit="")).missing() == ("identity.weights_revision",)
    assert fingerprint_of(facts(backend="")).missing() == ("encoding.attention_backend",)
    assert fingerprint_of(facts(isa="")).missing() == ("encoding.cpu_isa",)
    odd = facts(config={"a": object()})
    assert fingerprint_of(odd).missing() == ("identity.config_digest",)
    assert fingerprint_of(facts(kv_dtype="fp8", content_bytes=32_768)).missing() == ()


def test_what_the_operator_says_counts() -> None:
    named = fingerprint_of(facts(), model_name="m", weights_revision="r7", weight_epoch=3)
    identity = named.identity
    assert (identity.model_name, identity.weights_revision, identity.weight_epoch) == ("m", "r7", 3)


def test_a_folder_is_called_by_its_name_and_its_files_are_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "name"
    folder.mkdir()
    local = facts(model=str(folder), commit="")
    assert fingerprint_of(local).identity.model_name == "name"
    assert weights_folder(local) == folder
    assert weights_folder(facts(model=str(folder), load_format="dummy")) is None
    assert weights_folder(facts()) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"load_format": "dummy"},
        {"load_format": "tensorizer"},
        {"load_format": "sharded_state"},
        {"load_format": "a plugin's"},
        {"load_format": "gguf"},
        {"settings": {"quantization": "gguf"}},
        {"config_from": "/elsewhere"},
    ],
)
def test_a_commit_names_weights_only_if_its_files_were_loaded(changed: dict[str, Any]) -> None:
    assert fingerprint_of(facts(**changed)).missing() == ("identity.weights_revision",)


def test_weights_that_others_may_change_have_only_the_name_that_is_given(tmp_path: Path) -> None:
    """No hook tells of such a change, so what the engine started from says nothing later."""
    changing = facts(updates="weight_transfer_config", model=str(tmp_path))
    assert fingerprint_of(changing).missing() == ("identity.weights_revision",)
    assert weights_folder(changing) is None
    assert weights_folder(dataclasses.replace(changing, updates="")) == tmp_path
    assert "weight_transfer_config is set" in why_unnamed(changing)
    assert "load_format dummy" in why_unnamed(facts(load_format="dummy"))
    named = fingerprint_of(changing, weights_revision="step-7")
    assert named.identity.weights_revision == "step-7"


# ---------------------------------------------------------------- the space in use


def weights_of(folder: Path, content: bytes) -> WeightsDigest:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    digest = WeightsDigest(folder, memory=DigestMemory(folder.parent / "memory")).start()
    digest.wait(30)
    return digest


def test_blocks_are_shared_once_the_weights_are_known(tmp_path: Path) -> None:
    store = FakeStore()
    client = Client("/fake", transport=store.transport)
    spaces = ModelSpaces(client, model(revision=None), weights=weights_of(tmp_path / "m", b"one"))
    assert spaces.fingerprint.missing() == ("identity.weights_revision",)
    spaces.current()
    revision = spaces.fingerprint.identity.weights_revision
    assert revision is not None
    assert revision.startswith("sha256:")
    other = ModelSpaces(client, model(revision=None), weights=weights_of(tmp_path / "m", b"two"))
    other.current()
    assert other.fingerprint.identity.weights_revision not in (None, revision)
    spaces.close()
    store.close()


def test_weights_in_doubt_stay_unknown(tmp_path: Path) -> None:
    store = FakeStore()
    client = Client("/fake", transport=store.transport)
    doubts = ["m changed"]
    spaces = ModelSpaces(
        client,
        model(revision=None),
        weights=weights_of(tmp_path / "m", b"one"),
        doubt=doubts.pop,
    )
    for _ in range(3):
        spaces.current()
        assert spaces.fingerprint.identity.weights_revision is None
    assert not doubts
    empty = tmp_path / "empty"
    empty.mkdir()
    failing = WeightsDigest(empty).start()
    failing.wait(30)
    without = ModelSpaces(client, model(revision=None), weights=failing)
    without.current()
    assert without.fingerprint.identity.weights_revision is None
    spaces.close()
    store.close()


def test_a_reset_is_another_space_each_time() -> None:
    store = FakeStore()
    spaces = ModelSpaces(Client("/fake", transport=store.transport), model())
    seen = [spaces.fingerprint]
    for epoch in (1, 2):
        spaces.reset()
        assert spaces.fingerprint.identity.weight_epoch == epoch
        assert spaces.fingerprint.identity.weights_revision is None
        assert spaces.fingerprint not in seen
        seen.append(spaces.fingerprint)
    spaces.close()
    store.close()


def test_after_a_reset_a_digest_of_files_says_nothing_any_more(tmp_path: Path) -> None:
    store = FakeStore()
    client = Client("/fake", transport=store.transport)
    spaces = ModelSpaces(client, model(revision=None), weights=weights_of(tmp_path / "m", b"one"))
    spaces.reset()
    spaces.current()
    assert spaces.fingerprint.identity.weights_revision is None
    spaces.close()
    store.close()


def test_an_approval_speaks_for_one_object_and_no_later_one() -> None:
    """Other weights may lie in the same folder by then, and nothing in the offer tells them."""
    store = FakeStore()
    client = Client("/fake", transport=store.transport)
    first, later = (ModelSpaces(client, model(revision=None)) for _ in range(2))
    first.reset()
    later.reset()
    approved, offered = first.fingerprint, later.fingerprint
    reviews = Reviews()
    reviews.add(Review(1, "", approved, 0, state="approved", revision="v1"))
    assert reviews.resolve("", approved).missing() == ()
    assert reviews.resolve("", offered).missing() == ("identity.weights_revision",)
    verdict = compare(reviews.resolve("", approved), offered, frozenset({"encoding.codec"})).verdict
    assert verdict is Verdict.INCOMPATIBLE
    again = ModelSpaces(client, model())
    assert again.fingerprint == model(), "weights with a name are offered by it alone"
    long = dataclasses.replace(model(revision=None).identity, config_digest="\u00e4" * 128)
    marked = ModelSpaces(client, dataclasses.replace(model(), identity=long)).fingerprint
    assert marked.identity.config_digest is not None
    assert len(marked.identity.config_digest.encode()) <= 256
    client.close()
    store.close()


def test_files_that_changed_since_a_moment(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    changed_ns = file.stat().st_ctime_ns
    assert changed_files(tmp_path, changed_ns - 1) == ["model.safetensors"]
    assert changed_files(tmp_path, changed_ns) == []
    os.utime(file, ns=(0, 0))
    assert changed_files(tmp_path, changed_ns) != [] or file.stat().st_ctime_ns == changed_ns
    assert changed_files(tmp_path / "nowhere", 0) == [str(tmp_path / "nowhere")]


def test_the_process_began_before_now() -> None:
    now_ns = time.time_ns()
    assert now_ns - 86_400_000_000_000 < process_start_ns() < now_ns


# ---------------------------------------------------------------- options and their page


def test_options_are_those_of_the_page() -> None:
    page = (ROOT / "deploy/docs/vllm.md").read_text(encoding="utf-8")
    table = page.partition("| option of the tier |")[2].partition("\n\n")[0]
    listed = {name: row for row in table.splitlines()[2:] for name in _names(row.split("|")[1])}
    assert set(listed) == {field.name for field in dataclasses.fields(Options)}
    for field in dataclasses.fields(Options):
        if isinstance(field.default, bool | int | float) and field.default:
            assert f"| {field.default} |" in listed[field.name]
    (example,) = re.findall(r"(?ms)^```json\n(.*?)^```", page)
    (tier,) = json.loads(example)["kv_connector_extra_config"]["secondary_tiers"]
    assert (tier.pop("type"), tier.pop("module_path")) == (
        "KVStoreTier",
        "kvstore_client.engines.vllm_tier",
    )
    assert Options.of(tier) == Options(target="/run/kvstore/data.sock")


def test_outcomes_are_those_of_the_page() -> None:
    page = (ROOT / "deploy/docs/vllm.md").read_text(encoding="utf-8")
    table = page.partition("| outcome |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in _names(row.split("|")[1])]
    assert sorted(listed) == sorted(OUTCOMES)


def _names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "target is missing"),
        ({"target": ""}, "target is missing"),
        ({"target": "/s", "modelname": "m"}, "modelname: no such option"),
        ({"target": "/s", "durable": "false"}, "durable is of type bool, not str"),
        ({"target": "/s", "weight_epoch": True}, "weight_epoch is of type int, not bool"),
        ({"target": 7}, "target is of type str"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        Options.of(given)


def test_options_become_a_client_that_makes_no_call() -> None:
    options = Options.of({"target": "/nowhere", "prefill_us_per_token": 3})
    options.client("engine" * 100).close()
    with pytest.raises(KVStoreError):
        Options.of({"target": "/nowhere", "prefill_us_per_token": -1.0}).client("e")
