"""Engines as processes, for tests: started, spoken to in lines of JSON, killed by their own pid.

engine = Engine(model, target=daemon.data_socket, log=folder / "engine.log")
done = engine.generate(prompts); done["cached"]
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.model.reasons import Reason
from tests.daemon import Daemon, _python_path
from tests.engines.engine_child import MARK, QUIET
from tests.engines.models import VOCABULARY
from tests.engines.nursery import fork
from tests.rawclient import RawAdmin

START_S = 300.0
ANSWER_S = 180.0
STORED_S = 60.0
PATIENT = {"lookup_deadline_ms": 20_000, "load_deadline_ms": 60_000, "store_deadline_ms": 60_000}
"""So that a busy machine does not decide what is restored. Not for outages."""
BLOCK_TOKENS = 32
PROMPT_TOKENS = 300
ANSWER_TOKENS = 32
"""Unless a test says otherwise."""
STORED_TOKENS = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
"""Of a prompt: its whole blocks."""


_fresh = itertools.count(1_000_000)
"""Seeds of prompts that no test has."""


class EngineDied(AssertionError):
    """The engine ended, or did not answer in time. Carries the end of what it wrote."""


def prompts(count: int, seed: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """Random prompts, the same for the same seed."""
    chance = random.Random(seed)
    return [[chance.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def connector(tier: dict[str, Any] | None, **extra: Any) -> dict[str, Any]:
    """vLLM's kv_transfer_config: tiering with a host tier of 16 MiB, and `tier` below it."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.cpu_spec",
            "cpu_bytes_to_use": 16 << 20,
            "offload_prompt_only": False,
            "secondary_tiers": [] if tier is None else [tier],
            **extra,
        },
    }


def kvstore_tier(target: str, **options: Any) -> dict[str, Any]:
    """The entry of `secondary_tiers` that users write."""
    return {
        "type": "KVStoreTier",
        "module_path": "kvstore_client.engines.vllm_tier",
        "target": target,
        **options,
    }


def operator(daemon: Daemon, *command: str, stdin: str = "") -> dict[str, Any]:
    """What the operator's tool prints as JSON, whatever its exit code."""
    argv = [sys.executable, "-m", "kvstore.cli", *command]
    run = subprocess.run(
        [*argv, "--admin-socket", daemon.admin_socket, "--json"],
        input=stdin,
        env={**os.environ, "PYTHONPATH": _python_path(os.environ)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout, run.stderr
    printed: dict[str, Any] = json.loads(run.stdout)
    return printed


def stored_blocks(daemon: Daemon) -> int:
    """In all spaces."""
    with RawAdmin(daemon.admin_socket) as admin:
        return sum(int(space.blocks) for space in admin.call("Spaces").spaces)


def has(daemon: Daemon, keys: Sequence[str]) -> bool:
    """Whether one of its spaces has all of them."""
    packed = b"".join(map(bytes.fromhex, keys))
    with RawAdmin(daemon.admin_socket) as admin:
        spaces = [space.space_id for space in admin.call("Spaces").spaces]
        told = [admin.call("Explain", space_id=space_id, keys=packed).keys for space_id in spaces]
    return any(all(Reason.from_wire(key.reason) is Reason.HIT for key in each) for each in told)


def until_has(engine: Engine, daemon: Daemon, *asked: Sequence[int]) -> None:
    """Until the daemon has all whole blocks of these prompts. What a request has computed last vLLM
    hands over in a later step, so that further ones are made, of a prompt too short to be stored.
    """
    end = time.monotonic() + STORED_S
    for prompt in asked:
        keys = engine.keys(prompt)
        while not has(daemon, keys):
            assert time.monotonic() < end, f"not stored:\n{engine.log()[-3000:]}"
            engine.generate(prompts(1, seed=0, length=BLOCK_TOKENS // 4), max_tokens=4)


def until_in_use(engine: Engine, daemon: Daemon) -> None:
    """Until what the engine computes is stored (again), tried with one new prompt after another."""
    end, before = time.monotonic() + STORED_S, stored_blocks(daemon)
    while stored_blocks(daemon) <= before:
        assert time.monotonic() < end, f"not in use after {STORED_S} s:\n{engine.log()[-3000:]}"
        engine.generate(prompts(1, seed=next(_fresh), length=2 * BLOCK_TOKENS))


class Engine:
    """One engine process. `target` None: without a store. `tier`: options of the tier. `extra`:
    settings of vLLM's connector, which there is without a target only if there are any.
    """

    def __init__(
        self,
        model: Path,
        *,
        target: str | None,
        log: Path,
        tier: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        entry = None if target is None else kvstore_tier(target, **{**PATIENT, **(tier or {})})
        self.engine_id = f"test-{secrets.token_hex(8)}"
        self._log = log
        environment = {**os.environ, **QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment.update(environ or {})
        environment["PYTHONPATH"] = _python_path(environment)
        to_stdin, self._stdin = os.pipe()
        self._stdout, from_stdout = os.pipe()
        with log.open("ab") as sink:
            self._mark = sink.tell()
            self.process = fork(
                "tests.engines.engine_child",
                environ=environment,
                stdin=to_stdin,
                stdout=from_stdout,
                stderr=sink.fileno(),
            )
        os.close(to_stdin)
        os.close(from_stdout)
        self._closed: set[int] = set()
        self._seen = b""
        transfer = {}
        if entry is not None or extra is not None:
            settings = {**connector(entry, **extra or {}), "engine_id": self.engine_id}
            transfer = {"kv_transfer_config": settings}
        self.send({"model": str(model), **transfer, **arguments})
        self._up = False

    def wait_up(self) -> Engine:
        """Until the engine takes prompts."""
        if not self._up:
            self._up = bool(self.receive(START_S)["up"])
        return self

    def send(self, command: dict[str, Any]) -> None:
        """Without waiting for the answer."""
        line = json.dumps(command).encode() + b"\n"
        while line:
            line = line[os.write(self._stdin, line) :]

    def receive(self, deadline_s: float = ANSWER_S) -> dict[str, Any]:
        """The next answer. Raises EngineDied."""
        end = time.monotonic() + deadline_s
        while True:
            head, line_end, rest = self._seen.partition(b"\n")
            if line_end:
                self._seen = rest
                if head.startswith(MARK.encode()):
                    answer: dict[str, Any] = json.loads(head[len(MARK) :])
                    return answer
                continue
            if not select.select([self._stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise EngineDied(f"no answer within {deadline_s} s:\n{self.log()[-4000:]}")
            piece = os.read(self._stdout, 1 << 16)
            if not piece:
                raise EngineDied(f"the engine ended:\n{self.log()[-4000:]}")
            self._seen += piece

    def has_answered(self) -> bool:
        """Something that `receive` has not taken yet."""
        return bool(select.select([self._stdout], [], [], 0)[0])

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = ANSWER_TOKENS, **more: Any
    ) -> dict[str, Any]:
        """Greedy tokens of each prompt; see `engine_child.generate`."""
        self.wait_up()
        self.send({"prompts": prompts, "max_tokens": max_tokens, **more})
        return self.receive()

    def keys(self, prompt: Sequence[int], salt: str = "", group: int = 0) -> list[str]:
        """The store's keys of a prompt's whole blocks in a cache group, in hexadecimal."""
        self.wait_up()
        self.send({"keys": prompt, "salt": salt, "group": group})
        keys: list[str] = self.receive()["keys"]
        return keys

    def metrics(self, prefix: str) -> dict[str, float]:
        """See `engine_child.metrics`."""
        self.wait_up()
        self.send({"metrics": prefix})
        metrics: dict[str, float] = self.receive()["metrics"]
        return metrics

    def reset(self, *, connector: bool) -> None:
        """vLLM's own prefix cache forgets all, and the connector too if it is to."""
        self.wait_up()
        self.send({"reset": True, "connector": connector})
        assert self.receive()["reset"]

    def log(self) -> str:
        """What this engine has written."""
        with self._log.open("rb") as source:
            source.seek(self._mark)
            return source.read().decode(errors="replace")

    def rows(self) -> bytes:
        """vLLM's rows as they are now: the memory that all its processes share."""
        (file,) = self._row_files()
        return file.read_bytes()

    def _row_files(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"vllm_offload_{self.engine_id}*.mmap"))

    def stop(self) -> int:
        """Ends it in an orderly way; returns the exit code."""
        if self.process.poll() is None:
            self._close(self._stdin)
            try:
                self.process.wait(60)
            except TimeoutError:
                self.kill()
                raise EngineDied(f"did not end:\n{self.log()[-4000:]}") from None
        self._close(self._stdin, self._stdout)
        return self.process.wait(0)

    def kill(self) -> None:
        """SIGKILL for all its processes: nothing is tidied up but the file of its rows, by us."""
        self.process.kill()
        self.process.wait(30)
        self._close(self._stdin, self._stdout)
        for file in self._row_files():
            file.unlink()

    def _close(self, *descriptors: int) -> None:
        for descriptor in set(descriptors) - self._closed:
            os.close(descriptor)
            self._closed.add(descriptor)


OUR_FAULTS = re.compile(
    r"(adapter|operation) failed|told once|kvstore is off|EngineDeadError|Failed to (shut|close)"
)


def check_ended_well(engine: Engine) -> None:
    """It ends by itself, and nothing of ours has gone wrong meanwhile."""
    assert engine.stop() == 0, engine.log()[-4000:]
    fault = OUR_FAULTS.search(engine.log())
    assert fault is None, engine.log()[fault.start() :][:4000]
