"""Planted bugs, to prove that the torture finds what it is there to find.

The product has none of them: a mutant is planted into a process of the torture, by replacing a
function of the product in it. `python -m tests.torture.mutants` runs, for each, the stages that
have to catch it until their first finding, and writes build/torture-mutants.json: a list of
{"mutant", "caught_by", "seed", "finding"}. A stage proves something only if it finds nothing where
nothing was planted, so each runs like that first. Exits 1 if a bug was caught by no stage, or a
stage found one of its own.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture.running import run_stage

VARIABLE = "TORTURE_MUTANT"
OUT = Path("build") / "torture-mutants.json"
STAGE_S_MAX = 600.0
LATE_COPY_S = 0.02


@dataclass(frozen=True)
class Mutant:
    """A bug. caught_by: letters of the stages that must find it, the likeliest first."""

    name: str
    what: str
    plant: Callable[[], None]
    caught_by: tuple[str, ...]


def plant(name: str) -> None:
    """Plants a bug into this process, for good. "": none. KeyError: there is no such mutant."""
    if name:
        BY_NAME[name].plant()


def _module(name: str) -> Any:
    return importlib.import_module(name)


# ---------------------------------------------------------------- the bugs


def _skip_checksum() -> None:
    _module("kvstore.tiers.disk.volume").check_record = lambda *_, **__: None


def _publish_before_copy() -> None:
    mover = _module("kvstore.mover")
    copy_one = mover.copy_one

    def late(source: Any, target: Any) -> None:
        threading.Timer(LATE_COPY_S, copy_one, (source, target)).start()

    mover.copy_one = late


def _abort_keeps_slots() -> None:
    writes = _module("kvstore.core.writes").Writes
    writes._lose_blocks = lambda self, lease, why, now_ns: None


def _lookup_without_tenant() -> None:
    # The call asks twice; a bug that forgets it in one place alone would show to nobody.
    reads = _module("kvstore.core.reads").Reads
    core = _module("kvstore.core.core").Core
    space_of = core.space_of

    def any_space(self: Any, session: int, space_id: int) -> Any:
        return self.books.spaces.get(space_id) or space_of(self, session, space_id)

    def lookup(self: Any, session: Any, space_id: int, keys: Any) -> bytes:
        space = self.books.spaces.get(space_id)
        if space is None:
            return bytes(len(keys))
        return bytes([0 if (slot := space.index.get(key)) is None else slot.code for key in keys])

    core.space_of = any_space
    reads.lookup = lookup


def _full_is_enospc_alone() -> None:
    files = _module("kvstore.tiers.disk.files")
    classify = files.classify

    def by_number(error: OSError, file_system: Any) -> Any:
        found = classify(error, None)
        full = found is files.Trouble.FULL
        return files.Trouble.IO if full and error.errno != errno.ENOSPC else found

    for name in ("files", "tier", "writer"):
        _module(f"kvstore.tiers.disk.{name}").classify = by_number


def _no_generations() -> None:
    pools = _module("kvstore.core.pools")
    place = pools.Slot.place

    def same(self: Any, *offset: int) -> Any:
        return place(self, *offset)._replace(generation=1)

    pools.Slot.place = same


def _prefix_with_holes() -> None:
    hits = _module("kvstore.model.hits")
    hits.leading_run = lambda codes: len(codes) - codes.count(hits.ABSENT)
    for name in list(sys.modules):
        if name.startswith("kvstore") and hasattr(sys.modules[name], "leading_run"):
            sys.modules[name].leading_run = hits.leading_run  # type: ignore[attr-defined]


def _unbounded_calls() -> None:
    boundary = _module("kvstore_server.boundary").Boundary
    start = boundary.__init__

    def unbounded(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.limits = self.limits._replace(concurrent_calls_max=sys.maxsize)

    boundary.__init__ = unbounded


def _ttl_by_the_wall() -> None:
    clock = _module("kvstore.clock").SystemClock
    clock.monotonic_ns = lambda self: int(self.wall_s() * 1e9)


def _ttl_never_fires() -> None:
    _module("kvstore.core.leases").LeaseTable.due = lambda self, now_ns: iter(())


def _hits_counted_twice() -> None:
    metrics = _module("kvstore_server.metrics").Metrics
    lookup = metrics.lookup

    def twice(self: Any, tenant: str, asked: int, hit: int, *more: Any) -> None:
        lookup(self, tenant, asked, hit, *more)
        lookup(self, tenant, 0, hit, *more)

    metrics.lookup = twice


def _sent_without_a_lease() -> None:
    # Both guards: each holds where the other one is forgotten.
    read = _module("kvstore_server.fdreads").Read
    read._why_over = lambda self: None
    read._why_changed = lambda self: None


def _no_deadline() -> None:
    deadline = _module("kvstore_client.session").Deadline
    deadline.left_s = lambda self: 60.0
    deadline.passed = property(lambda self: False)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "skip-checksum",
        "what is read from disk is not compared with its row and checksum",
        _skip_checksum,
        ("F2", "E"),
    ),
    Mutant(
        "publish-before-copy",
        "a block is readable before its bytes are there",
        _publish_before_copy,
        ("A", "I", "J"),
    ),
    Mutant(
        "abort-keeps-slots",
        "an aborted or expired reservation keeps its slots",
        _abort_keeps_slots,
        ("G", "H"),
    ),
    Mutant(
        "lookup-without-tenant",
        "one call does not ask whose space it is",
        _lookup_without_tenant,
        ("K",),
    ),
    Mutant(
        "full-is-enospc-alone",
        "no room is known by ENOSPC alone: not by EDQUOT, EFBIG, or LMDB's EIO",
        _full_is_enospc_alone,
        ("D",),
    ),
    Mutant(
        "no-generations",
        "a slot that is used again has the generation that it had",
        _no_generations,
        ("H", "I", "J"),
    ),
    Mutant(
        "prefix-with-holes",
        "blocks behind a hole count as hits",
        _prefix_with_holes,
        ("G", "A", "J"),
    ),
    Mutant(
        "unbounded-calls",
        "calls queue without a bound",
        _unbounded_calls,
        ("H",),
    ),
    Mutant(
        "ttl-by-the-wall",
        "deadlines follow the wall clock",
        _ttl_by_the_wall,
        ("L",),
    ),
    Mutant(
        "ttl-never-fires",
        "no lease and no reservation ever ends by itself",
        _ttl_never_fires,
        ("L", "H"),
    ),
    Mutant(
        "hits-counted-twice",
        "the metrics say more hits than there were",
        _hits_counted_twice,
        ("L",),
    ),
    Mutant(
        "sent-without-a-lease",
        "what is sent over the fd socket is sent although its lease has ended, and confirmed",
        _sent_without_a_lease,
        ("H",),
    ),
    Mutant(
        "no-deadline",
        "the client waits for an answer longer than it was told to",
        _no_deadline,
        ("E", "H"),
    ),
)
NONE = Mutant("", "", lambda: None, ())
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


# ---------------------------------------------------------------- the proof


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names, separated by commas; all if absent")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--scale", type=float, default=0.2)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument(
        "--every", action="store_true", help="run each stage, not until one catches"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    chosen = [BY_NAME[name] for name in asked.only.split(",")] if asked.only else list(MUTANTS)
    print(f"seed {asked.seed}, {len(chosen)} planted bugs", flush=True)
    with ThreadPoolExecutor(asked.lanes) as lanes:
        letters = sorted({letter for mutant in chosen for letter in mutant.caught_by})
        found = list(lanes.map(lambda letter: _run(NONE, letter, asked), letters))
        unsound = [letter for letter, finding in zip(letters, found, strict=True) if finding]
        entries = list(lanes.map(lambda mutant: _hunt(mutant, asked), chosen))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(entries, indent=1) + "\n")
    missed = [entry["mutant"] for entry in entries if not entry["caught_by"]]
    print(f"{len(entries) - len(missed)} of {len(entries)} caught, wrote {asked.out}")
    if unsound:
        print(f"FAILED: {', '.join(unsound)} found something where nothing was planted")
    return 1 if missed or unsound else 0


def _hunt(mutant: Mutant, asked: argparse.Namespace) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "mutant": mutant.name,
        "caught_by": [],
        "seed": asked.seed,
        "finding": "",
    }
    for letter in mutant.caught_by:
        if finding := _run(mutant, letter, asked):
            entry["caught_by"].append(letter)
            entry["finding"] = entry["finding"] or finding
            if not asked.every:
                break
    return entry


def _run(mutant: Mutant, letter: str, asked: argparse.Namespace) -> str:
    """The first finding of a stage with this bug; "": it saw nothing."""
    began = time.monotonic()
    outcome = run_stage(
        letter,
        seed=asked.seed,
        scale=asked.scale,
        mutant=mutant.name,
        until_first=True,
        limit_s=STAGE_S_MAX,
    )
    finding = (outcome.wrong + outcome.failed + [""])[0][:300]
    took_s = time.monotonic() - began
    name = mutant.name or "(nothing planted)"
    print(f"{name:22} {letter:3} {took_s:5.0f} s  {finding or 'nothing found'}", flush=True)
    return finding


if __name__ == "__main__":
    sys.exit(main())
