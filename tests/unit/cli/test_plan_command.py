"""`kvstore plan`: tables of KV sizes, transfer times and break-even lengths, by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import catalogue
from kvstore.model.cost import PrefillCost
from kvstore.model.kv_bytes import ModelShape
from kvstore.model.reasons import Reason
from tests.unit.cli.conftest import Run

# From published configurations: name, bytes a token in bf16, MiB of a 512-token block.
KV_TABLE = [
    ("Llama-2-7B", 524_288, 256),
    ("Llama-3.2-1B", 32_768, 16),
    ("Llama-3.2-3B", 114_688, 56),
    ("Llama-3.1-8B", 131_072, 64),
    ("Mistral-7B-v0.3", 131_072, 64),
    ("Mixtral-8x7B", 131_072, 64),
    ("Llama-3.1-70B", 327_680, 160),
    ("Qwen2.5-72B", 327_680, 160),
    ("Llama-3.1-405B", 516_096, 252),
    ("Mixtral-8x22B", 229_376, 112),
    ("Qwen2.5-7B", 57_344, 28),
    ("Qwen2.5-14B", 196_608, 96),
    ("Qwen2.5-32B", 262_144, 128),
    ("Qwen3-0.6B", 114_688, 56),
    ("Qwen3-8B", 147_456, 72),
    ("Qwen3-32B", 262_144, 128),
    ("Qwen3-30B-A3B", 98_304, 48),
    ("Qwen3-235B-A22B", 192_512, 94),
    ("Qwen3-Coder-480B-A35B", 253_952, 124),
    ("MiniMax-M2.5", 253_952, 124),
    ("Phi-4-14B", 204_800, 100),
    ("DeepSeek-V2-Lite", 31_104, 15.2),
    ("DeepSeek-V3", 70_272, 34.3),
    ("DeepSeek-R1", 70_272, 34.3),
    ("Kimi-K2", 70_272, 34.3),
    ("DeepSeek-V3.2", 78_080, 38.1),
    ("GLM-5", 99_840, 48.8),
    ("gpt-oss-20b", 24_576, 12),
    ("gpt-oss-120b", 36_864, 18),
    ("Qwen3.5-27B", 65_536, 32),
    ("Qwen3.5-397B-A17B", 30_720, 15),
    ("Nemotron-H-56B", 40_960, 20),
    ("Gemma-4-26B-A4B", 20_480, 10),
]


def planned(run: Run, *arguments: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(run("plan", *arguments, "--json").output)
    return fields


@pytest.mark.parametrize("row", KV_TABLE, ids=lambda row: row[0])
def test_kv_bytes_of_every_model(run: Run, row: tuple[str, int, float]) -> None:
    name, bytes_per_token, block_mib = row
    fields = planned(run, "--model", name, "--tokens", "512")
    assert fields["bytes_per_token"] == bytes_per_token
    growing = fields["total_bytes"] - fields["fixed_bytes"]
    assert growing == 512 * bytes_per_token
    assert growing / (1 << 20) == pytest.approx(block_mib, abs=0.05)


def test_every_known_model_is_in_the_table() -> None:
    # Llama-2-13B is known beside those of the table.
    names = {catalogue.model(name).name for name, _, _ in KV_TABLE} | {"Llama-2-13B"}
    assert names == {known.name for known in catalogue.models()}
    assert len(names) == 33


def test_8_gib_over_20_gib_a_second_are_400_ms(run: Run) -> None:
    (link,) = planned(run, "--kv-bytes", "8GiB", "--link", "20GiB/s")["links"]
    assert link["ideal_ms"] == pytest.approx(400.0)
    assert link["load_ms"] == pytest.approx(400.0)
    assert "400 ms" in run("plan", "--kv-bytes", "8GiB", "--link", "20GiB/s").output


# seed, model, B* in GB/s, thousands of tokens from which loading wins at each rate; 0: always
BREAK_EVEN = [
    ("Llama-3.1-8B 1xH100", "Llama-3.1-8B", 6.3, (281, 58, 0, 0)),
    ("Llama-3.1-8B 1xA100", "Llama-3.1-8B", 2.3, (51, 0, 0, 0)),
    ("Qwen3-8B 1xH100", "Qwen3-8B", 7.0, (292, 65, 4, 0)),
    ("Qwen3-32B 2xH100", "Qwen3-32B", 5.0, (272, 46, 0, 0)),
    ("Llama-3.1-70B 4xH100", "Llama-3.1-70B", 5.1, (559, 97, 0, 0)),
    ("Llama-3.1-70B 8xH100", "Llama-3.1-70B", 8.0, (1_332, 318, 45, 0)),
    ("Llama-3.1-70B 4xA100", "Llama-3.1-70B", 2.1, (98, 0, 0, 0)),
]
RATES = ("1", "3", "6.5", "12.5")


@pytest.mark.parametrize("row", BREAK_EVEN, ids=lambda row: row[0])
def test_break_even_table(run: Run, row: tuple[str, str, float, tuple[int, ...]]) -> None:
    seed, name, always, thousands = row
    rates = [part for rate in RATES for part in ("--link", rate)]
    fields = planned(run, "--model", name, "--tokens", "8192", "--prefill-seed", seed, *rates)
    assert round(fields["always_faster_bytes_per_second"] / 1e9, 1) == always
    for link, expected in zip(fields["links"], thousands, strict=True):
        # The table was made from fits with more digits than the catalogue keeps.
        assert link["break_even_tokens"] / 1e3 == pytest.approx(expected, abs=0.55)
        advice = Reason[link["reason"]]
        wins = link["break_even_tokens"] < 8_192
        assert advice is (Reason.OK if wins else Reason.DECLINED_RECOMPUTE_FASTER)
        assert (link["load_ms"] < link["recompute_ms"]) is wins


def test_the_text_says_the_same(run: Run) -> None:
    seed = ("--prefill-seed", "llama-3.1-8b 1xh100")
    links = ("--link", "disk=3GB/s", "--link", "pcie-gen5")
    output = run("plan", "--model", "llama-3.1-8b", "--tokens", "32000", *seed, *links).output
    disk, pcie = output.splitlines()[-2:]
    assert disk.split()[:2] == ["disk", "recompute"]
    assert disk.endswith("58k")
    assert pcie.split()[:2] == ["pcie-gen5", "load"]
    assert pcie.endswith("always")
    assert "131,072 bytes" in output
    assert "from 6.3 GB/s on" in output


def test_without_a_cost_the_plan_says_so_and_names_the_fits(run: Run) -> None:
    output = run("plan", "--model", "qwen3-8b", "--tokens", "9000").output
    assert "COST_UNKNOWN" in output
    assert "Qwen3-8B 1xH100" in output
    assert "nvme-gen4-read" in output
    assert "write" not in output
    for link in planned(run, "--model", "qwen3-8b", "--tokens", "9000")["links"]:
        assert link["reason"] == "COST_UNKNOWN"
        assert link["break_even_tokens"] is None


def test_a_cost_of_ones_own(run: Run) -> None:
    seeded = planned(
        run, "--model", "llama-3.1-8b", "--tokens", "8000", "--prefill-seed", "Llama-3.1-8B 1xH100"
    )
    given = planned(
        run, "--model", "llama-3.1-8b", "--tokens", "8000", "--prefill", "20.76,3.926e-4"
    )
    assert seeded == given
    never = planned(
        run, "--model", "llama-3.1-8b", "--tokens", "8000", "--prefill", "20,0", "--link", "1"
    )
    assert never["links"][0]["break_even_tokens"] == "never"


def test_latency_and_overlap_count(run: Run) -> None:
    base = ("--model", "llama-3.1-8b", "--tokens", "30000", "--link", "3", "--prefill", "20.8,4e-4")
    serial = planned(run, *base)["links"][0]
    late = planned(run, *base, "--latency-us", "5000")["links"][0]
    beside = planned(run, *base, "--overlap", "layerwise")["links"][0]
    assert late["load_ms"] == pytest.approx(serial["load_ms"] + 5)
    assert serial["reason"] == "DECLINED_RECOMPUTE_FASTER"
    assert beside["reason"] == "OK"
    assert beside["total_ms"] < serial["total_ms"]
    assert "recompute 1" in run("plan", *base, "--overlap", "layerwise").output


def test_windows_count_once(run: Run) -> None:
    short = planned(run, "--model", "gpt-oss-20b", "--tokens", "100")
    long = planned(run, "--model", "gpt-oss-20b", "--tokens", "100000")
    assert short["fixed_bytes"] == 100 * 24_576
    assert long["fixed_bytes"] == 128 * 24_576
    assert long["total_bytes"] == 100_128 * 24_576
    rate = ("--link", "10", "--prefill", "1000,0")
    timed = planned(run, "--model", "gpt-oss-20b", "--tokens", "100000", *rate)["links"][0]
    assert timed["load_ms"] == pytest.approx(long["total_bytes"] / 10e9 * 1e3)


def test_dtype(run: Run) -> None:
    for name in ("fp8", "float8_e4m3fn", "int8"):
        fields = planned(run, "--model", "llama-3.1-8b", "--tokens", "10", "--dtype", name)
        assert fields["bytes_per_token"] == 65_536
    wide = planned(run, "--model", "llama-3.1-8b", "--tokens", "10", "--dtype", "fp32")
    assert wide["bytes_per_token"] == 262_144
    unknown = run("plan", "--model", "llama-3.1-8b", "--tokens", "10", "--dtype", "fp7", code=2)
    assert "fp7" in unknown.stderr


LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


@pytest.mark.parametrize(
    ("config", "kind", "bytes_per_token"),
    [
        (LLAMA_8B, "gqa", 131_072),
        ({**LLAMA_8B, "num_key_value_heads": 32}, "mha", 524_288),
        ({**LLAMA_8B, "num_key_value_heads": 1}, "mqa", 16_384),
        (DEEPSEEK_V3, "mla", 70_272),
        (
            {**LLAMA_8B, "layer_types": ["full_attention", "sliding_attention"] * 16,
             "sliding_window": 128},
            "hybrid",
            65_536,
        ),
    ],
)  # fmt: skip
def test_a_configuration_file(
    run: Run, tmp_path: Path, config: dict[str, Any], kind: str, bytes_per_token: int
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    fields = planned(run, "--config", str(file), "--tokens", "32000")
    assert (fields["kind"], fields["bytes_per_token"]) == (kind, bytes_per_token)


def test_a_configuration_that_cannot_be_read_names_the_field(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**DEEPSEEK_V3, "qk_rope_head_dim": None}))
    error = run("plan", "--config", str(file), "--tokens", "9", code=2).stderr
    assert "qk_rope_head_dim" in error
    file.write_text("no json")
    assert "is no JSON" in run("plan", "--config", str(file), "--tokens", "9", code=2).stderr
    file.write_text("[]")
    run("plan", "--config", str(file), "--tokens", "9", code=2)


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("20", 20e9),
        ("2.5GB/s", 2.5e9),
        ("20GiB/s", 20 * 2.0**30),
        ("400Gb/s", 50e9),
        ("800MB/s", 8e8),
        ("12 GBps", 12e9),
        ("disk=3GB/s", 3e9),
        ("PCIE-Gen5", 64e9),
        ("100g", 12.5e9),
    ],
)
def test_rates(text: str, bytes_per_second: float) -> None:
    assert catalogue.link(text).theory == pytest.approx(bytes_per_second)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tokens", "9"),
        ("--model", "llama-3.1-8b"),
        ("--model", "llama-3.1-8b", "--kv-bytes", "1GiB", "--tokens", "9"),
        ("--model", "no-such", "--tokens", "9"),
        ("--model", "llama-3.1-8b", "--tokens", "0"),
        ("--model", "llama-3.1-8b", "--tokens", "9", "--link", "fast"),
        ("--model", "llama-3.1-8b", "--tokens", "9", "--link", "0"),
        ("--model", "llama-3.1-8b", "--tokens", "9", "--prefill", "20"),
        ("--model", "llama-3.1-8b", "--tokens", "9", "--prefill", "nan,1"),
        ("--model", "llama-3.1-8b", "--tokens", "9", "--prefill-seed", "gpu"),
        ("--model", "llama-3.1-8b", "--tokens", "9", "--prefill", "1,1", "--prefill-seed", "x"),
        ("--kv-bytes", "0"),
        ("--kv-bytes", "many"),
        ("--kv-bytes", "8GiB", "--prefill", "20,0"),
        ("--kv-bytes", "8GiB", "--latency-us", "nan"),
        ("--kv-bytes", "8GiB", "--latency-us", "inf"),
        ("--kv-bytes", "8GiB", "--link", "9" * 400),
    ],
)
def test_wrong_usage_is_code_2(run: Run, arguments: tuple[str, ...]) -> None:
    assert "Error" in run("plan", *arguments, code=2).stderr


def test_the_nearest_name_is_offered(run: Run) -> None:
    error = run("plan", "--model", "llama-31-8b", "--tokens", "9", code=2).stderr
    assert "Llama-3.1-8B" in error


def test_list(run: Run) -> None:
    output = run("plan", "--list").output
    for text in ("Kimi-K2", "70,272", "nvme-gen5-read", "Qwen3-32B 2xA100", "aiconfigurator"):
        assert text in output
    fields = json.loads(run("plan", "--list", "--json").output)
    assert len(fields["models"]) == 33
    assert len(fields["links"]) == 10
    assert len(fields["prefill"]) == 9


def test_the_catalogue_is_sound() -> None:
    for known in catalogue.models():
        assert isinstance(known.shape, ModelShape)
        assert known.shape.bytes_per_token("bfloat16") > 0
    for speed in catalogue.links():
        assert 0 < speed.usable <= speed.theory
    names = {known.name for known in catalogue.models()}
    for fit in catalogue.fits():
        assert fit.model in names
        assert isinstance(fit.cost, PrefillCost)
        assert fit.cost.valid()
