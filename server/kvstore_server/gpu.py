"""The device tier of this daemon, as the settings say. Called by the assembly, once."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Executor, wait

from kvstore.config import Settings
from kvstore.model.values import PAGE_BYTES, TierKind, TierSpec
from kvstore.mover import CROSS_WORKERS
from kvstore.policy.links import Link
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.disk.threads import DeviceThreads
from kvstore.tiers.driver import DeviceDriver
from kvstore.tiers.host import HostTier
from kvstore_server.logs import event

log = logging.getLogger(__name__)

NAME = "device"
# Until some copies were measured: a PCIe 4 link as copies see it, and copies within a GPU.
STAGED_BYTES_PER_SECOND = 10e9
SHARED_BYTES_PER_SECOND = 200e9
LATENCY_NS = 200_000
GRANULE_BYTES = 2 << 20
"""What memory of NVIDIA's GPUs comes in: cut to less, the last regions would find no room."""
UNPROVEN = (
    "pools are lent to engines: that one survives this daemon's kill -9 while it copies out of "
    "them has not been proven on a device"
)
END_S = 5.0
"""How long the daemon's end waits for the device: copies take milliseconds, unpinning seconds."""


def with_device(settings: Settings, tiers: list[TierSpec]) -> list[TierSpec]:
    """The tiers, the host's first, with the device's where it stands: above host memory if engines
    copy out of it, else below, as it takes what host memory has no room for.
    """
    if not settings.device.capacity_bytes:
        return tiers
    granule_bytes = PAGE_BYTES if settings.device.driver == "torch-cpu" else GRANULE_BYTES
    spec = TierSpec(
        NAME, TierKind.POOL, settings.device.capacity_bytes, granule_bytes=granule_bytes
    )
    at = 0 if shares(settings) else 1
    return [*tiers[:at], spec, *tiers[at:]]


def shares(settings: Settings) -> bool:
    """Whether pools are handed to engines."""
    return settings.device.pools == "shared_unproven"


def begin(
    settings: Settings, host: HostTier, undo: contextlib.ExitStack
) -> tuple[Executor | None, DeviceTier | None]:
    """The threads that wait for the device, and the tier, open; neither where there is none.

    StartError: the GPU, or what its driver needs, is not there.
    """
    if not settings.device.capacity_bytes:
        return None, None
    if shares(settings):
        event(log, logging.WARNING, UNPROVEN, setting="device.pools")
    # The mover's, and one for what need not be waited for.
    threads = DeviceThreads(CROSS_WORKERS + 1, "kvstore-gpu")
    undo.callback(threads.shutdown, wait=False, cancel_futures=True)
    device = DeviceTier(
        _driver(settings),
        settings.device.capacity_bytes,
        background=threads,
        host_map=host.mapped,
        export=shares(settings),
    )
    threads.submit(device.open).result()
    host.unmapping = device.release_host
    undo.callback(end, threads, device)
    return threads, device


def end(threads: DeviceThreads, device: DeviceTier, patience_s: float = END_S) -> bool:
    """Gives the device back once what runs there has ended; the mover is closed. False: it hangs,
    and is left to the process's end, which waits for none of these threads.
    """

    def close() -> None:
        threads.shutdown(wait=True, cancel_futures=True)
        device.close()

    last = DeviceThreads(1, "kvstore-gpu-end")
    closed = last.submit(close)
    last.shutdown(wait=False)
    wait([closed], patience_s)
    if not closed.done():
        log.error("device tier: the device does not answer, it is not waited for")
        return False
    closed.result()
    return True


def _driver(settings: Settings) -> DeviceDriver:
    # Imported late: a daemon without the tier needs neither.
    if settings.device.driver == "torch-cpu":
        from kvstore.tiers.torchcpu import TorchCpuDriver

        return TorchCpuDriver()
    from kvstore.tiers.cuda import CudaDriver

    return CudaDriver(settings.device.gpu)


def device_link(settings: Settings, host_link: Link) -> Link:
    """The estimate of its speed. Staged blocks go on from host memory as those that were there."""
    if shares(settings):
        return Link(NAME, bytes_per_second=SHARED_BYTES_PER_SECOND, latency_ns=LATENCY_NS)
    return Link(
        NAME, bytes_per_second=STAGED_BYTES_PER_SECOND, latency_ns=LATENCY_NS, then=host_link
    )
