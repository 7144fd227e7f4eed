"""The device tier of this daemon, as the settings say. Called by the assembly, once."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from kvstore.config import Settings
from kvstore.model.values import TierKind, TierSpec
from kvstore.mover import CROSS_WORKERS
from kvstore.policy.links import Link
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.driver import DeviceDriver
from kvstore.tiers.host import HostTier

NAME = "device"
# Until some copies were measured: a PCIe 4 link as copies see it, and copies within a GPU.
STAGED_BYTES_PER_SECOND = 10e9
SHARED_BYTES_PER_SECOND = 200e9
LATENCY_NS = 200_000


def with_device(settings: Settings, tiers: list[TierSpec]) -> list[TierSpec]:
    """The tiers, the host's first, with the device's where it stands: above host memory if engines
    copy out of it, else below, as it takes what host memory has no room for.
    """
    if not settings.device.capacity_bytes:
        return tiers
    spec = TierSpec(NAME, TierKind.POOL, settings.device.capacity_bytes)
    at = 0 if shares(settings) else 1
    return [*tiers[:at], spec, *tiers[at:]]


def shares(settings: Settings) -> bool:
    """Whether pools are handed to engines."""
    return settings.device.pools == "shared_unproven"


def begin(
    settings: Settings, host: HostTier, undo: contextlib.ExitStack
) -> tuple[ThreadPoolExecutor | None, DeviceTier | None]:
    """The threads that wait for the device, and the tier, open; neither where there is none.

    StartError: the GPU, or what its driver needs, is not there.
    """
    if not settings.device.capacity_bytes:
        return None, None
    # The mover's, and one for what need not be waited for.
    threads = ThreadPoolExecutor(CROSS_WORKERS + 1, "kvstore-gpu")
    undo.callback(threads.shutdown, wait=True)
    device = DeviceTier(
        _driver(settings),
        settings.device.capacity_bytes,
        background=threads,
        host_map=host.mapped,
        export=shares(settings),
    )
    threads.submit(device.open).result()
    host.unmapping = device.release_host
    undo.callback(lambda: threads.submit(device.close).result())
    return threads, device


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
