"""One vLLM engine as a process that obeys lines of JSON on its standard input.

    {"prompts": [[ids], ...], "max_tokens": n, "salt": s}  ->  {"tokens": ..., "cached": ..., ...}
        further: "logprobs": how many of each token; "adapter": [name, number, path]
    {"keys": [ids], "salt": s, "group": n}  ->  the store's keys of its whole blocks in cache group
        n, in hexadecimal
    {"metrics": prefix}  ->  vLLM's own counters whose names begin so; needs disable_log_stats False
    {"reset": true}  ->  vLLM's own caches are emptied, the connector's included if "connector"

Each answer is one line that starts with MARK. The first line says that the engine is up.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

MARK = "@@"

QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "DO_NOT_TRACK": "1",
    # What little is left to compile (log-probabilities) takes longer than a test.
    "TORCHDYNAMO_DISABLE": "1",
}


def main() -> None:
    """Reads the engine's arguments from the first line."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    arguments: dict[str, Any] = json.loads(sys.stdin.readline())
    from vllm import LLM

    begun = time.monotonic()
    llm = LLM(
        **{
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "block_size": 32,
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "prefix_caching_hash_algo": "sha256_cbor",
            "disable_log_stats": True,
            "kv_cache_memory_bytes": 64 << 20,
            **arguments,
        }
    )
    answer({"up": True, "start_s": time.monotonic() - begun})
    for line in sys.stdin:
        command = json.loads(line)
        if "prompts" in command:
            answer(generate(llm, command))
        elif "keys" in command:
            found = keys_of(llm, command["keys"], command.get("salt"), command.get("group", 0))
            answer({"keys": found})
        elif "metrics" in command:
            answer({"metrics": metrics(llm, command["metrics"])})
        elif "reset" in command:
            answer({"reset": llm.reset_prefix_cache(reset_connector=command.get("connector"))})
        else:
            answer({"error": f"unknown command {command}"})


def generate(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of each prompt, how many tokens of it were not computed, and the time taken."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0,
        max_tokens=command.get("max_tokens", 32),
        ignore_eos=True,
        detokenize=False,
        extra_args=command.get("extra_args"),
        logprobs=command.get("logprobs"),
    )
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in command["prompts"]]
    for prompt in prompts:
        if command.get("salt"):
            prompt["cache_salt"] = command["salt"]
    begun = time.monotonic()
    outputs = llm.generate(prompts, parameters, use_tqdm=False, lora_request=_adapter(command))
    return {
        "ids": [output.request_id for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "finish": [output.outputs[0].finish_reason for output in outputs],
        "cached": [int(output.num_cached_tokens or 0) for output in outputs],
        "logprobs": [_logprobs(output) for output in outputs],
        "first_s": [_first_token_s(output) for output in outputs],
        "s": time.monotonic() - begun,
    }


def _adapter(command: dict[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(*command["adapter"]) if "adapter" in command else None


def _logprobs(output: Any) -> list[list[float]]:
    """Of each token that was made: what was asked for, best first."""
    return [
        sorted((found.logprob for found in token.values()), reverse=True)
        for token in output.outputs[0].logprobs or ()
    ]


def _first_token_s(output: Any) -> float | None:
    """From the request's arrival, as vLLM measures it where `disable_log_stats` is False."""
    return None if output.metrics is None else float(output.metrics.first_token_latency)


def metrics(llm: Any, prefix: str) -> dict[str, float]:
    """By name and the label `outcome` where there is one: "name outcome"."""
    return {
        f"{metric.name} {metric.labels.get('outcome', '')}".strip(): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(prefix) and hasattr(metric, "value")
    }


def keys_of(llm: Any, ids: list[int], salt: str | None, group: int) -> list[str]:
    """By vLLM's own hashing of blocks, and the tier's key of each hash and the group."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    from kvstore_client.engines.vllm_facts import key_of

    cache = llm.llm_engine.vllm_config.cache_config
    hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    parent, keys = None, []
    for start in range(0, len(ids) - cache.block_size + 1, cache.block_size):
        extra = (salt,) if salt and not start else None
        block = tuple(ids[start : start + cache.block_size])
        parent = hash_block_tokens(hash_function, parent, block, extra)
        keys.append(key_of(bytes(parent) + group.to_bytes(4, "big")).hex())
    return keys


def answer(value: dict[str, Any]) -> None:
    """One line, whatever else is printed around it."""
    sys.stdout.write(f"\n{MARK}{json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
