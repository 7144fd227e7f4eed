"""The device tier under a real server and clients, on the recording device: blocks go to it and
come back as they were, and the service goes on when the device is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.model.reasons import Reason
from kvstore.testing.gpu import RecordingDriver
from tests.e2e.stage import Prompt, model, until
from tests.integration.stack import Stack
from tests.rawclient import RawClient, reason

BLOCK = 64 << 10
MODEL = model(BLOCK)
PROMPTS = [Prompt(MODEL, seed, 8) for seed in range(16)]
"""8 MiB; the host's tier has 4 MiB, staging included, the device 2 MiB."""


@contextlib.contextmanager
def stack_on(folder: Path, driver: RecordingDriver) -> Iterator[Stack]:
    stack = Stack(folder, capacity_bytes=4 << 20, device=driver)
    stack.start()
    try:
        yield stack
    finally:
        stack.stop()


def read(client: RawClient, space: int, prompt: Prompt) -> int:
    """Blocks that came; each is what was put."""
    rows = client.get(space, prompt.keys)
    for row, expected in zip(rows, prompt.rows(), strict=True):
        assert row is None or (row == expected).all()
    return sum(row is not None for row in rows)


def fill(client: RawClient, space: int) -> None:
    for prompt in PROMPTS:
        assert reason(client.put(space, prompt.keys, prompt.rows()).reason) is Reason.OK


def device_blocks(stack: Stack) -> int:
    return next(p.blocks for p in stack.ask(stack.store.core.stats).pools if p.name == "device")


def test_blocks_come_back_from_a_device_whose_order_is_watched(
    tmp_path: Path,
) -> None:
    driver = RecordingDriver()
    with stack_on(tmp_path, driver) as stack, RawClient(stack.socket()) as client:
        space = client.open(MODEL).space_id
        fill(client, space)
        until("the device holds blocks", lambda: device_blocks(stack))
        for _ in range(3):
            came = [read(client, space, prompt) for prompt in PROMPTS]
        assert sum(came) > 40, "more than the host's tier holds alone"
        counters = stack.ask(stack.store.core.stats).counters
        assert counters["copies_demote"] > 0
        assert counters["copies_promote"] > 0
    assert driver.broken == []
    assert driver.registered == {}


@pytest.mark.parametrize("calls", [0, 1, 5, 50])
def test_the_service_goes_on_when_the_device_is_lost(tmp_path: Path, calls: int) -> None:
    driver = RecordingDriver()
    with stack_on(tmp_path, driver) as stack, RawClient(stack.socket()) as client:
        space = client.open(MODEL).space_id
        fill(client, space)
        until("the device holds blocks", lambda: device_blocks(stack))
        driver.lost_at = calls
        for _ in range(2):
            for prompt in PROMPTS:
                read(client, space, prompt)
        fill(client, space)
        until("the tier is dropped", lambda: not device_blocks(stack))
        assert "lost" in stack.ask(stack.store.stats).tier_states["device"]
        assert read(client, space, PROMPTS[-1]) == 8, "what was put last is there"
        until("its regions are closed", lambda: _used(stack) == 0)
        stack.ask(stack.store.core.check)
    assert "on the loop's thread" not in str(driver.broken)


def _used(stack: Stack) -> int:
    return stack.ask(stack.store.core.stats).pools[1].used_bytes
