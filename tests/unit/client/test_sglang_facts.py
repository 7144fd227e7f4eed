"""What is read out of a rank of SGLang decides who shares with whom; it takes no SGLang to tell."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.fingerprint import Verdict, compare
from kvstore.model.layout import layout_of
from kvstore.model.reasons import KVStoreError
from kvstore_client.engines.options import Options
from kvstore_client.engines.refused import Refused
from kvstore_client.engines.sglang_facts import (
    LAYOUTS,
    Facts,
    fingerprint_of,
    key_of,
    refusal,
    weights_folder,
    why_unnamed,
)
from kvstore_client.engines.tier_values import OUTCOMES

PAGE = Path(__file__).resolve().parent.parent.parent.parent / "deploy/docs/sglang.md"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def facts(**changed: Any) -> Facts:
    """4 layers, 2 KV heads of 64 on each of 2 ranks, pages of 16 tokens in bfloat16: 32 KiB."""
    plain = Facts(
        sglang_version="0.5.23",
        model="org/model",
        commit=COMMIT,
        load_format="auto",
        loader="",
        updated="",
        config={"model_type": "llama", "rope_theta": 10000.0},
        settings={"dtype": "torch.bfloat16", "quantization": None},
        adapters=False,
        multimodal=False,
        pool="mha",
        other_pools=(),
        layout="page_first",
        flat=False,
        page_tokens=16,
        first_layer=0,
        layers=4,
        draft_layers=0,
        query_heads=8,
        kv_heads=2,
        head_size=64,
        page_bytes=32_768,
        kv_dtype="bfloat16",
        scales="",
        tensor_rank=0,
        tensor_parallel=2,
        pipeline_rank=0,
        pipeline_parallel=1,
        context_parallel=1,
        attention_backend="fa3+flashinfer",
        cpu_isa="",
        on_cpu=False,
    )
    return dataclasses.replace(plain, **changed)


MLA = {"pool": "mla", "head_size": 576, "kv_heads": 1, "page_bytes": 4 * 16 * 576 * 2}
DIFFERENT: list[dict[str, Any]] = [
    {"sglang_version": "0.5.24"},
    {"model": "org/other"},
    {"commit": COMMIT[::-1]},
    {"config": {"model_type": "llama", "rope_theta": 20000.0}},
    {"settings": {"dtype": "torch.bfloat16", "quantization": "fp8"}},
    {"load_format": "safetensors"},
    {"layout": "page_first_direct"},
    {"layout": "layer_first"},
    {"layout": "page_head"},
    {"page_tokens": 32, "page_bytes": 65_536},
    {"first_layer": 4},
    {"layers": 8, "page_bytes": 65_536},
    {"kv_heads": 4, "page_bytes": 65_536},
    {"head_size": 128, "page_bytes": 65_536},
    {"kv_dtype": "float16"},
    {"kv_dtype": "float8_e4m3fn", "page_bytes": 16_384},
    {"kv_dtype": "float8_e5m2", "page_bytes": 16_384},
    {"tensor_rank": 1},
    {"tensor_parallel": 4},
    {"pipeline_rank": 1, "pipeline_parallel": 2},
    {"pipeline_parallel": 2},
    {"attention_backend": "triton"},
    {"on_cpu": True, "cpu_isa": "AVX512"},
    dict(MLA),
]


def test_a_rank_has_the_bytes_of_its_own_pages() -> None:
    made = fingerprint_of(facts())
    assert not made.missing()
    assert layout_of(made).block_bytes == facts().page_bytes
    assert layout_of(fingerprint_of(facts(**MLA))).block_bytes == MLA["page_bytes"]


@pytest.mark.parametrize("changed", DIFFERENT, ids=str)
def test_each_of_these_makes_another_model(changed: dict[str, Any]) -> None:
    verdict = compare(fingerprint_of(facts()), fingerprint_of(facts(**changed))).verdict
    assert verdict is Verdict.INCOMPATIBLE


def test_the_layouts_differ_among_each_other() -> None:
    for pool, more in (("mha", {}), ("mla", MLA)):
        made = [fingerprint_of(facts(**{**more, "layout": layout})) for layout in LAYOUTS[pool]]
        assert len({fingerprint.digest for fingerprint in made}) == len(LAYOUTS[pool])


@pytest.mark.parametrize("layout", LAYOUTS["mha"])
def test_flat_pages_are_others_where_their_bytes_have_another_order(layout: str) -> None:
    pieces, flat = (fingerprint_of(facts(layout=layout, flat=flat)) for flat in (False, True))
    assert (pieces != flat) == (layout == "layer_first")


def test_ranks_of_mla_share_one() -> None:
    first, second = (fingerprint_of(facts(**MLA, tensor_rank=rank)) for rank in (0, 1))
    assert first == second
    assert first != fingerprint_of(facts(**MLA, tensor_parallel=4))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"adapters": True}, "LoRA"),
    ({"multimodal": True}, "images"),
    ({"pool": "MambaPoolHost"}, "MambaPoolHost"),
    ({"other_pools": ("swa",)}, "swa"),
    ({"draft_layers": 1}, "speculates"),
    ({"layout": "page_unified"}, "page_unified"),
    ({**MLA, "layout": "page_head"}, "page_head"),
    ({"context_parallel": 2}, "context"),
    ({"kv_dtype": "nvfp4"}, "nvfp4"),
    ({"scales": "/s.json"}, "/s.json"),
]


@pytest.mark.parametrize(("changed", "named"), REFUSED, ids=str)
def test_what_cannot_be_told_apart_is_refused(changed: dict[str, Any], named: str) -> None:
    assert not refusal(facts())
    assert named in refusal(facts(**changed))
    with pytest.raises(Refused, match=named.replace("/", ".")):
        fingerprint_of(facts(**changed))


def test_a_page_with_more_in_it_than_is_known_is_refused() -> None:
    with pytest.raises(Refused, match="not known"):
        fingerprint_of(facts(page_bytes=32_768 + 64))


@pytest.mark.parametrize(
    "changed",
    [
        {"commit": ""},
        {"load_format": "dummy"},
        {"load_format": "gguf"},
        {"settings": {"quantization": "gguf"}},
        {"loader": "custom_weight_loader"},
        {"updated": "2"},
    ],
    ids=str,
)
def test_weights_that_nothing_names_are_unknown(changed: dict[str, Any]) -> None:
    assert fingerprint_of(facts()).identity.weights_revision == f"commit:{COMMIT}"
    made = fingerprint_of(facts(**changed))
    assert "identity.weights_revision" in made.missing()
    told = fingerprint_of(facts(**changed), weights_revision="r1", model_name="m", weight_epoch=3)
    assert not told.missing()
    assert (told.identity.model_name, told.identity.weight_epoch) == ("m", 3)


@pytest.mark.parametrize("unknown", [{"attention_backend": ""}, {"on_cpu": True}], ids=str)
def test_what_is_unknown_is_held(unknown: dict[str, Any]) -> None:
    assert fingerprint_of(facts(**unknown)).missing()


def test_files_are_the_weights_only_as_they_were_loaded(tmp_path: Path) -> None:
    here = str(tmp_path)
    assert weights_folder(facts(model=here)) == tmp_path
    for changed in ({"load_format": "dummy"}, {"loader": "rl_quant_profile"}, {"updated": "2"}):
        made = facts(model=here, **changed)
        assert weights_folder(made) is None
        assert next(iter(changed.values())) in why_unnamed(made)
    assert weights_folder(facts()) is None
    assert fingerprint_of(facts(model=here)).identity.model_name == tmp_path.name


def test_keys_are_those_of_the_whole_prefix() -> None:
    keys = {key_of(f"{number:064x}") for number in range(100)}
    assert len(keys) == 100
    assert all(len(key) == 32 for key in keys)


@pytest.mark.parametrize("wrong", ["", "zz" * 32, "abc", "00" * 8])
def test_what_is_no_hash_is_no_key(wrong: str) -> None:
    with pytest.raises((ValueError, KVStoreError)):
        key_of(wrong)


# ---------------------------------------------------------------- the page


def test_options_are_those_of_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("| option in the extra config |")[2].partition("\n\n")[0]
    listed = {name: row for row in table.splitlines()[2:] for name in _names(row.split("|")[1])}
    assert set(listed) == {field.name for field in dataclasses.fields(Options)}
    for field in dataclasses.fields(Options):
        if isinstance(field.default, bool | int | float) and field.default:
            assert f"| {field.default} |" in listed[field.name]
    (example,) = re.findall(r"--hicache-storage-backend-extra-config '(.*)'", page)
    given = json.loads(example)
    assert [given.pop(name) for name in ("backend_name", "interface_v1")] == ["kvstore", 1]
    assert (given.pop("module_path"), given.pop("class_name")) == (
        "kvstore_client.engines.sglang",
        "KVStoreBackend",
    )
    assert Options.of(given) == Options(target="/run/kvstore/data.sock")


def test_outcomes_are_those_of_the_page() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| outcome |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines()[2:] for name in _names(row.split("|")[1])}
    # A page store waits for each answer: none comes late.
    assert listed == {*OUTCOMES} - {"lookup_late"}


def _names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)
