"""`python -m tests.bench.engines MODELS [--out FILE]`: time to first token of vLLM on the CPU, with
and without stores below it. Run by `make bench-engines`, in vLLM's environment.

One engine for each side, all of the same settings and threads; one engine more has computed all
prompts before and stored them for all sides. In each round every side is asked the same prompt,
which none of them has seen: so it comes from the side's store, from its first block on, and not out
of vLLM's own memory. Whose turn is first changes from round to round. Tokens are compared each
time: to be equal to the last bit, what is computed has to be computed in equal pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from kvstore_client.demo.document import DOCUMENT
from tests.bench.engine_model import folder_of
from tests.bench.harness import Results
from tests.daemon import Daemon, start_daemon
from tests.engines.kit import PATIENT, Engine, EngineDied, kvstore_tier, stored_blocks

PROMPT_TOKENS: Final = 2_000
ANSWER_TOKENS: Final = 4
BLOCK_TOKENS: Final = 32
BLOCKS_PER_CHUNK: Final = 2
CHUNK_TOKENS: Final = BLOCK_TOKENS * BLOCKS_PER_CHUNK
RESTORED_TOKENS: Final = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
DEVICE_BLOCKS: Final = 160
"""Of two prompts and a little; four engines have to fit into the machine's memory."""
STEP_TOKENS: Final = RESTORED_TOKENS
"""Computed in a step: the engine that recomputes ends with the same short step as those that
restore. In one step of 2,000 tokens sums are rounded in another order, and one of 64 tokens was
another one, whichever store the others had. It costs that engine one short step.
"""
ROUNDS: Final = 10
WARMUP: Final = 1
HOST_TIER_BYTES: Final = 128 << 20
"""vLLM's own host tier of an engine that is measured: under three prompts."""
WRITER_TIER_BYTES: Final = 1 << 30
STORED_S: Final = 120.0
IDLE_WINDOW_S: Final = 0.25
IDLE_SHARE: Final = 0.1
"""Of a core, that all engines together take at most when they are idle."""
IDLE_S: Final = 30.0

RECOMPUTE, FS, HOST, DISK = "recompute", "fs", "kvstore_host", "kvstore_disk"
SIDES: Final = (RECOMPUTE, FS, HOST, DISK)
HOST_OVER_RECOMPUTE_MAX: Final = 0.35
HOST_OVER_FS_MAX: Final = 1.0


class Failed(Exception):
    """A measurement would mean nothing; says why."""


@dataclass
class Bench:
    """What all sides share. `times`: where tiers write how long they held the scheduler."""

    folder: Path
    model: Path
    host: Daemon
    disk: Daemon
    threads: int = field(default_factory=lambda: max(1, len(os.sched_getaffinity(0)) - 1))
    """Of each engine's computation. A core is left to scheduler, daemon and copies: threads that
    wait for one another at each layer stand still when one of them has no core."""

    def engine(self, name: str, tiers: Sequence[dict[str, Any]], tier_bytes: int) -> Engine:
        """An engine in processes of its own, as `vllm serve` makes them."""
        settings = {
            "secondary_tiers": list(tiers),
            "cpu_bytes_to_use": tier_bytes,
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
        }
        return Engine(
            self.model,
            target=None,
            log=self.folder / f"{name}.log",
            extra=settings if tiers else None,
            environ={
                "OMP_NUM_THREADS": str(self.threads),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            },
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=DEVICE_BLOCKS,
            max_num_batched_tokens=STEP_TOKENS,
            disable_log_stats=False,
        )

    def tier(self, side: str, **more: Any) -> dict[str, Any]:
        """The entry of `secondary_tiers` for a side."""
        timed = {"module_path": "tests.bench.engine_tiers", "times": str(self.times(side)), **more}
        if side == FS:
            return {"type": "TimedFsTier", "root_dir": str(self.folder / "fs"), **timed}
        daemon = self.host if side == HOST else self.disk
        named = {"weights_revision": self.model.name, "type": "TimedKVStoreTier", **PATIENT}
        return kvstore_tier(daemon.data_socket, **named, **timed)

    def times(self, side: str) -> Path:
        return self.folder / f"{side}.times"


def prompts_of(model: Path, count: int) -> list[list[int]]:
    """Prompts of exactly PROMPT_TOKENS that differ from the first block on: the demo's handbook,
    its sentences in another order each.
    """
    sentences = DOCUMENT.replace("\n", " ").split(". ")
    made = []
    for number in range(count):
        chance = random.Random(number)
        text = f"Copy {number} of the handbook."
        ids: list[int] = []
        while len(ids) < PROMPT_TOKENS:
            chance.shuffle(sentences)
            text = f"{text} {'. '.join(sentences)}."
            ids = _ids_of(model, text)
        made.append(ids[:PROMPT_TOKENS])
    return made


def _ids_of(model: Path, text: str) -> list[int]:
    tokenizer = model / "tokenizer.json"
    if not tokenizer.is_file():  # of random weights: bytes are its tokens
        return list(text.encode())
    from tokenizers import Tokenizer

    return [int(i) for i in Tokenizer.from_file(str(tokenizer)).encode(text).ids]


# ------------------------------------------------------------------------------- storing


def store(bench: Bench, prompts: Sequence[Sequence[int]]) -> None:
    """One engine computes all prompts and stores them for every side."""
    tiers = [bench.tier(FS), bench.tier(HOST), bench.tier(DISK, durable=True)]
    engine = bench.engine("writer", tiers, WRITER_TIER_BYTES)
    try:
        for prompt in prompts:
            engine.generate([prompt], ANSWER_TOKENS)
        chunks = len(prompts) * (RESTORED_TOKENS // CHUNK_TOKENS)
        _wait_stored(bench, chunks)
    finally:
        _end(engine)
    for side in (FS, HOST, DISK):
        bench.times(side).unlink()
    bench.disk.restart()


def _wait_stored(bench: Bench, chunks: int) -> None:
    end = time.monotonic() + STORED_S
    while time.monotonic() < end:
        stored = {
            FS: len(list((bench.folder / "fs").rglob("*.bin"))),
            HOST: stored_blocks(bench.host),
            DISK: stored_blocks(bench.disk),
        }
        if all(count >= chunks for count in stored.values()):
            return
        time.sleep(0.2)
    raise Failed(f"of {chunks} chunks only {stored} were stored")


# ------------------------------------------------------------------------------- measuring


@dataclass
class Taken:
    """Of one side: seconds to the first token of each round, and in how many it was restored."""

    seconds: list[float] = field(default_factory=list)
    restored: int = 0


def measure(bench: Bench, prompts: Sequence[Sequence[int]]) -> dict[str, Taken]:
    """By side. Raises Failed if tokens differ in a round."""
    taken = {side: Taken() for side in SIDES}
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for side in SIDES:
            tiers = [] if side == RECOMPUTE else [bench.tier(side)]
            engines[side] = bench.engine(side, tiers, HOST_TIER_BYTES)
            stack.callback(_end, engines[side])
        for engine in engines.values():
            engine.wait_up()
        for number, prompt in enumerate(prompts):
            done = _round(engines, prompt, number)
            if number < WARMUP:
                continue
            for side, answer in done.items():
                taken[side].seconds.append(answer["first_s"][0])
                taken[side].restored += answer["cached"] == [RESTORED_TOKENS]
            told = (f"{side} {1e3 * taken[side].seconds[-1]:.0f} ms" for side in SIDES)
            print(f"round {number}: {', '.join(told)}", flush=True)
    return taken


def _round(
    engines: dict[str, Engine], prompt: Sequence[int], number: int
) -> dict[str, dict[str, Any]]:
    first = number % len(SIDES)
    done = {}
    for side in (*SIDES[first:], *SIDES[:first]):
        _until_idle(engines.values())
        done[side] = engines[side].generate([prompt], ANSWER_TOKENS)
    right = done[RECOMPUTE]["tokens"]
    wrong = {side: answer["tokens"] for side, answer in done.items() if answer["tokens"] != right}
    if wrong:
        raise Failed(f"round {number}: tokens are not {right}: {wrong}")
    if done[RECOMPUTE]["cached"] != [0]:
        raise Failed(f"round {number}: the engine without a store has not computed all")
    return done


def _until_idle(engines: Iterable[Engine]) -> None:
    """A worker of vLLM looks for work without a pause for a second after its last step, so that who
    has just answered would take a core from who is asked next.
    """
    tops = [psutil.Process(engine.process.pid) for engine in engines]
    processes = [each for top in tops for each in (top, *top.children(recursive=True))]
    end, before_s = time.monotonic() + IDLE_S, 0.0
    while time.monotonic() < end:
        times = [each.cpu_times() for each in processes]
        used_s = sum(one.user + one.system for one in times)
        if used_s - before_s < IDLE_SHARE * IDLE_WINDOW_S:
            return
        before_s = used_s
        time.sleep(IDLE_WINDOW_S)
    raise Failed(f"the engines are not idle after {IDLE_S} s")


def _end(engine: Engine) -> None:
    """In an orderly way: whoever is killed leaves shared memory behind."""
    with contextlib.suppress(EngineDied):
        engine.stop()


# ------------------------------------------------------------------------------- reporting


def report(bench: Bench, taken: dict[str, Taken], results: Results) -> list[str]:
    """Adds the entries; returns the bounds that are missed."""
    real = f"{bench.model.name}, {PROMPT_TOKENS} tokens, threads: {bench.threads}"
    notes = {
        RECOMPUTE: "no store",
        FS: f"vLLM's own tier of files, {_how_fs_reads(bench)}",
        HOST: "the daemon's memory",
        DISK: "the daemon's disk (O_DIRECT), restarted before",
    }
    for side in SIDES:
        seconds, rounds = taken[side].seconds, len(taken[side].seconds)
        low, middle, high = (1e3 * at for at in statistics.quantiles(seconds, n=4))
        note = f"{notes[side]}; quartiles {low:.1f}-{high:.1f}; {real}; tokens equal"
        if side != RECOMPUTE:
            note = f"{note}; restored in {taken[side].restored} of {rounds} rounds"
        results.add(f"engine_first_token_{side}_ms", middle, "ms", rounds, note)
    missed = []
    for side, base, bound in (
        (HOST, RECOMPUTE, HOST_OVER_RECOMPUTE_MAX),
        (HOST, FS, HOST_OVER_FS_MAX),
        (DISK, RECOMPUTE, None),
        (DISK, FS, None),
        (FS, RECOMPUTE, None),
    ):
        ratios = [a / b for a, b in zip(taken[side].seconds, taken[base].seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        name = f"engine_first_token_{side}_over_{base}"
        told = "" if bound is None else f", bound {bound}"
        note = f"median of {len(ratios)} rounds, quartiles {low:.3f}-{high:.3f}{told}"
        results.add(name, middle, "ratio", len(ratios), note)
        if bound is not None and middle > bound:
            missed.append(f"{name} is {middle:.3f}, not <= {bound}")
    for side in (FS, HOST, DISK):
        _report_times(bench.times(side), side, results)
    return missed


def _how_fs_reads(bench: Bench) -> str:
    log = (bench.folder / f"{FS}.log").read_text(errors="replace")
    return "through the page cache" if "O_DIRECT is not supported" in log else "O_DIRECT"


def _report_times(path: Path, side: str, results: Results) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()][WARMUP:]
    lookups_us = sorted(ns / 1e3 for line in lines for ns in line["lookups_ns"])
    cuts = statistics.quantiles(lookups_us, n=100)
    note = f"the scheduler's thread in one lookup of one key, over {len(lines)} prompts"
    results.add(f"engine_lookup_{side}_p50_us", cuts[49], "us", len(lookups_us), note)
    results.add(f"engine_lookup_{side}_p99_us", cuts[98], "us", len(lookups_us), note)
    whole_ms = [(sum(line["lookups_ns"]) + line["hooks_ns"]) / 1e6 for line in lines]
    note = (
        f"the scheduler's thread in all of the tier's hooks, of a prompt; most {max(whole_ms):.2f}"
    )
    name = f"engine_scheduler_{side}_ms"
    results.add(name, statistics.median(whole_ms), "ms", len(whole_ms), note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/bench-engines.json"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    model = folder_of(asked.models.resolve())
    if model is None:
        sys.exit(f"no model in {asked.models}: python -m tests.bench.engine_model {asked.models}")
    results = Results()
    # Beside the results and not in /tmp, which may be memory: files have to be read from a disk.
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=asked.out.parent.resolve()) as name:
        missed = _run(Path(name), model, asked.rounds, results)
    results.write(asked.out)
    print(f"wrote {asked.out}")
    if missed and not folder_is_random(model):
        sys.exit("; ".join(missed))


def folder_is_random(model: Path) -> bool:
    return not (model / "tokenizer.json").is_file()


def _run(folder: Path, model: Path, rounds: int, results: Results) -> list[str]:
    prompts = prompts_of(model, WARMUP + rounds)
    for name in ("host", "disk"):
        (folder / name).mkdir()
    with (
        start_daemon(folder / "host", host__capacity_bytes="1GiB") as host,
        start_daemon(
            folder / "disk",
            host__capacity_bytes="1GiB",
            disk__path=str(folder / "disk" / "tier"),
            disk__capacity_bytes="2GiB",
        ) as disk,
    ):
        bench = Bench(folder, model, host, disk)
        store(bench, prompts)
        return report(bench, measure(bench, prompts), results)


if __name__ == "__main__":
    main()
