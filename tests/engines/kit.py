"""Engines as processes, for tests: started, spoken to in lines of JSON, killed by their own pid.

engine = Engine(model, target=daemon.data_socket, log=folder / "engine.log")
done = engine.generate(prompts); done["cached"]
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.daemon import Daemon, _python_path
from tests.engines.engine_child import MARK
from tests.engines.models import VOCABULARY

START_S = 300.0
ANSWER_S = 180.0
BLOCK_TOKENS = 32
PROMPT_TOKENS = 300
STORED_TOKENS = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
"""Of a prompt: its whole blocks."""


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


class Engine:
    """One engine process. `target` None: without a store. `tier`: options of the tier."""

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
        entry = None if target is None else kvstore_tier(target, **(tier or {}))
        self._log = log
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(environ or {})}
        environment["PYTHONPATH"] = _python_path(environment)
        with log.open("ab") as sink:
            self._mark = sink.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.engine_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment,
                cwd=Path(__file__).resolve().parent.parent.parent,
            )
        self._seen = b""
        transfer = {} if target is None else {"kv_transfer_config": connector(entry, **extra or {})}
        self.send({"model": str(model), **transfer, **arguments})
        self._up = False

    def wait_up(self) -> Engine:
        """Until the engine takes prompts."""
        if not self._up:
            self._up = bool(self.receive(START_S)["up"])
        return self

    def send(self, command: dict[str, Any]) -> None:
        """Without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, deadline_s: float = ANSWER_S) -> dict[str, Any]:
        """The next answer. Raises EngineDied."""
        assert self.process.stdout is not None
        end = time.monotonic() + deadline_s
        descriptor = self.process.stdout.fileno()
        while True:
            head, line_end, rest = self._seen.partition(b"\n")
            if line_end:
                self._seen = rest
                if head.startswith(MARK.encode()):
                    answer: dict[str, Any] = json.loads(head[len(MARK) :])
                    return answer
                continue
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                raise EngineDied(f"no answer within {deadline_s} s:\n{self.log()[-4000:]}")
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise EngineDied(f"the engine ended:\n{self.log()[-4000:]}")
            self._seen += piece

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 32, **more: Any
    ) -> dict[str, Any]:
        """Greedy tokens of each prompt; see `engine_child.generate`."""
        self.wait_up()
        self.send({"prompts": prompts, "max_tokens": max_tokens, **more})
        return self.receive()

    def log(self) -> str:
        """What this engine has written."""
        with self._log.open("rb") as source:
            source.seek(self._mark)
            return source.read().decode(errors="replace")

    def stop(self) -> int:
        """Ends it in an orderly way; returns the exit code."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
                raise EngineDied(f"did not end:\n{self.log()[-4000:]}") from None
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.returncode

    def kill(self) -> None:
        """SIGKILL: nothing is tidied up."""
        self.process.kill()
        self.process.wait(30)


OUR_FAULTS = re.compile(
    r"(adapter|operation) failed|told once|kvstore is off|EngineDeadError|Failed to (shut|close)"
)


def check_ended_well(engine: Engine) -> None:
    """It ends by itself, and nothing of ours has gone wrong meanwhile."""
    assert engine.stop() == 0, engine.log()[-4000:]
    fault = OUR_FAULTS.search(engine.log())
    assert fault is None, engine.log()[fault.start() :][:4000]
