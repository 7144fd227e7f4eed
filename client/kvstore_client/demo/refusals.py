"""Offers that look like the stored model and are not: each must be a miss that names the field.

And the last one, a daemon that is killed while the engine uses it: a miss, within the deadline.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import torch

from kvstore.model.fingerprint import Fingerprint
from kvstore.wire.v1 import admin_pb2, admin_pb2_grpc
from kvstore_client import Client
from kvstore_client.demo.evidence import Claim, Job, Rejection, Transcript
from kvstore_client.demo.model import DemoModel
from kvstore_client.engines.prefix_cache import PrefixCache
from kvstore_client.engines.transformers import fingerprint_of, generate
from kvstore_client.weights import DigestMemory, files_digest, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ADMIN_DEADLINE_S", "refusals", "survive_a_dead_daemon"]

ADMIN_DEADLINE_S: Final = 10.0
DEAD_DAEMON_MS: Final = 2_100.0


def refusals(
    job: Job,
    made: DemoModel,
    client: Client,
    fingerprint: Fingerprint,
    prompt: list[int],
    transcript: Transcript,
) -> None:
    """Makes the offers one after the other and records what came back."""
    scratch = Path(job.scratch_folder)
    changes: list[tuple[str, str, Callable[[], Fingerprint]]] = [
        (
            "the same name, one bit of its weights flipped",
            "identity.weights_revision",
            lambda: _with(fingerprint, weights_revision=_revision_of_a_flipped_copy(made, scratch)),
        ),
        (
            "the same weights, run in another element type",
            "encoding.kv_dtype",
            lambda: _in_another_dtype(made, fingerprint),
        ),
        (
            "the same model, after its weight epoch was raised to 1",
            "identity.weight_epoch",
            lambda: _after_raising_the_epoch(job, fingerprint),
        ),
    ]
    for offer, field, make in changes:
        offered = make()
        answers: list[str] = []
        differences: list[str] = []
        tokens = 0
        # A space that was closed under an open session says so once, then says why.
        while len(answers) < 2 and not differences:
            restored = PrefixCache(client, made.model, offered).restore(prompt)
            answers.append(restored.why)
            tokens += restored.tokens
            differences = [str(each) for each in restored.hit.differences] if restored.hit else []
        answer = ", then ".join(answers)
        transcript.rejections.append(Rejection(offer, tokens, answer, differences))
        named = any(each.startswith(f"{field}:") for each in differences)
        text = f"refused, naming {field}: {offer}"
        transcript.claims.append(Claim(text, tokens == 0 and named, answer))


def survive_a_dead_daemon(
    job: Job, made: DemoModel, cache: PrefixCache, prompt: list[int], transcript: Transcript
) -> None:
    """Kills the daemon (the demo's own, by its pid) and goes on answering."""
    os.kill(job.daemon_pid, signal.SIGKILL)
    begun = time.monotonic()
    restored = cache.restore(prompt)
    waited_ms = (time.monotonic() - begun) * 1e3
    answered = len(generate(made.model, prompt[-64:], None, 2).token_ids) > 0
    true = restored.tokens == 0 and answered and waited_ms < DEAD_DAEMON_MS
    detail = f"{restored.why} after {waited_ms:.0f} ms"
    transcript.claims.append(
        Claim("the daemon killed: a miss, and the engine goes on", true, detail)
    )


def _with(fingerprint: Fingerprint, **changes: Any) -> Fingerprint:
    return dataclasses.replace(
        fingerprint, identity=dataclasses.replace(fingerprint.identity, **changes)
    )


def _revision_of_a_flipped_copy(made: DemoModel, scratch: Path) -> str:
    copy = scratch / "flipped" / made.folder.name
    shutil.copytree(made.folder, copy)
    weights = next(iter(sorted(copy.glob("*.safetensors"))))
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    return files_digest(weight_files(copy), memory=DigestMemory(scratch / "digests"))


def _in_another_dtype(made: DemoModel, fingerprint: Fingerprint) -> Fingerprint:
    other = torch.bfloat16 if made.model.dtype == torch.float32 else torch.float32
    before = made.model.dtype
    model: Any = made.model
    try:
        return fingerprint_of(
            model.to(other),
            model_name=fingerprint.identity.model_name,
            block_tokens=fingerprint.encoding.block_tokens,
            weights_revision=fingerprint.identity.weights_revision,
        )
    finally:
        model.to(before)


def _after_raising_the_epoch(job: Job, fingerprint: Fingerprint) -> Fingerprint:
    with grpc.insecure_channel(f"unix:{job.admin_socket}") as channel:
        admin_pb2_grpc.AdminStub(channel).SetWeightEpoch(
            admin_pb2.SetWeightEpochRequest(
                model_name=fingerprint.identity.model_name, epoch=1, why="demo"
            ),
            timeout=ADMIN_DEADLINE_S,
        )
    return fingerprint
