"""A device that fails for a while, below a real daemon: nothing that is whole is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_client import Client, ClientConfig
from tests.daemon import Daemon, make_daemon
from tests.e2e.stage import Prompt, model, until
from tests.faultfs import FaultFs, missing
from tests.faults import INDEX, Fault
from tests.torture.disk_watch import metrics, state_of

pytestmark = pytest.mark.process

MODEL = model(64 << 10)
CONFIG = ClientConfig(deadline_ms=20_000)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[FaultFs]:
    if reason := missing():
        pytest.skip(reason)
    with FaultFs(tmp_path / "device") as made:
        yield made


@pytest.fixture
def start(device: FaultFs, tmp_path: Path) -> Iterator[Callable[[], Daemon]]:
    """Starts the one daemon on the device."""
    daemon = make_daemon(
        tmp_path,
        host__capacity_bytes="8MiB",
        host__staging_bytes="2MiB",
        disk__path=str(device.path / "disk"),
        disk__capacity_bytes="64MiB",
    )
    yield daemon.start
    device.clear()
    if daemon.alive:
        daemon.kill()


def test_an_index_that_cannot_be_read_for_a_while_is_not_set_aside(
    device: FaultFs, start: Callable[[], Daemon]
) -> None:
    daemon = start()
    prompt, other = Prompt(MODEL, 1, 16), Prompt(MODEL, 2, 16)
    with Client(daemon.data_socket, config=CONFIG) as client:
        assert client.space(MODEL).push(prompt.keys, prompt.rows(), durable=True).stored == 16
    daemon.kill()
    device.set(Fault(("read",), INDEX, error="EIO"))
    start()
    with Client(daemon.data_socket, config=CONFIG) as client:
        space = client.space(MODEL)
        assert space.push(other.keys, other.rows()).stored == 16, "memory serves"
        assert space.fetch(other.keys).blocks == 16
        assert metrics(daemon)["kvstore_disk_set_aside_total"] == 0
        device.clear()
        until("it is open", lambda: state_of(daemon).startswith("ok"))
        fetched = space.fetch(prompt.keys)
    prompt.assert_right(list(fetched.data[: fetched.blocks]))
    assert fetched.blocks == 16
    assert daemon.stop() == 0
