"""`python -m tests.torture [--stages A,B] [--scale 0.1] [--seed N] [--lanes 2] [--list]`

Runs the stages and writes build/torture.json: a list with one entry per stage, {"stage", "trials",
"wrong", "failed", "seeds", "skipped"}. Exits 1 if anything was wrong or failed. Each stage is a
process of its own, so that one that dies is a finding and no end; `--lanes` run side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.torture import mutants, stages
from tests.torture.base import SHOWN_MAX, Job, Outcome, Scale, Stage
from tests.torture.running import run_stage

OUT = Path("build") / "torture.json"
STAGE_S_MAX = 1_500.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", default="", help="letters, separated by commas; all if absent")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="part of the full number of trials"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--lanes", type=int, default=2, help="stages that run side by side")
    parser.add_argument("--mutant", default="", help="the planted bug of every daemon it starts")
    parser.add_argument(
        "--until-first", action="store_true", help="a stage ends at its first finding"
    )
    parser.add_argument("--list", action="store_true", help="says what there is, and ends")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    found = stages.load()
    if asked.list:
        for letter, stage in found.items():
            print(f"{letter:3} {stage.name:14} {stage.what}")
        return 0
    if asked.one:
        return _one(found[asked.one], asked)
    letters = asked.stages.split(",") if asked.stages else list(found)
    print(f"seed {asked.seed}, scale {asked.scale:g}", flush=True)
    began = time.monotonic()
    with ThreadPoolExecutor(asked.lanes) as lanes:
        entries = list(lanes.map(lambda letter: _in_process(letter, found[letter], asked), letters))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(entries, indent=1) + "\n")
    bad = [entry["stage"] for entry in entries if entry["wrong"] or entry["failed"]]
    print(f"{len(entries)} stages in {time.monotonic() - began:.0f} s, wrote {asked.out}")
    print(f"FAILED: {', '.join(bad)}" if bad else "nothing was wrong, nothing failed")
    return 1 if bad else 0


def _one(stage: Stage, asked: argparse.Namespace) -> int:
    """A stage in this process; its outcome is the last line of stdout."""
    mutants.plant(asked.mutant)
    with tempfile.TemporaryDirectory(prefix=f"kvstore-{stage.name}-") as name:
        job = Job(
            stage.name,
            Path(name),
            asked.seed,
            Scale(asked.scale),
            mutant=asked.mutant,
            until_first=asked.until_first,
        )
        outcome = stage.run(job)
    said = {**vars(outcome), "counts": dict(outcome.counts)}
    print(json.dumps(said))
    return 0


def _in_process(letter: str, stage: Stage, asked: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    outcome = run_stage(
        letter,
        seed=asked.seed,
        scale=asked.scale,
        mutant=asked.mutant,
        until_first=asked.until_first,
        limit_s=STAGE_S_MAX,
    )
    _say(letter, stage, outcome, asked.seed, time.monotonic() - began)
    return outcome.entry(stage.name, asked.seed)


def _say(letter: str, stage: Stage, outcome: Outcome, seed: int, took_s: float) -> None:
    verdict = "ok" if outcome.ok else "FAILED"
    found = f"{len(outcome.wrong)} wrong, {len(outcome.failed)} failed, seed {seed}"
    lines = [
        f"{letter:3} {stage.name:14} {verdict:7} {outcome.trials} trials, {found}, {took_s:.0f} s"
    ]
    counts = ", ".join(f"{name} {count}" for name, count in sorted(outcome.counts.items()))
    lines += [f"    {counts}"] if counts else []
    lines += [f"    skipped: {outcome.skipped}"] if outcome.skipped else []
    lines += [f"    WRONG: {text}" for text in outcome.wrong[:SHOWN_MAX]]
    lines += [f"    FAILED: {text}" for text in outcome.failed[:SHOWN_MAX]]
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main())
