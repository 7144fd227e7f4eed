"""The CUDA driver's calls through NVIDIA's own bindings, over a stand-in for the driver's library
that is compiled here: names, arguments, structs and error paths, without a GPU. Skipped where the
extra `gpu` or a C compiler is absent.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("cc") or shutil.which("gcc")


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
    pytest.mark.skipif(not _has_bindings(), reason="cuda-bindings is not installed"),
]

PROGRAM = """
from concurrent.futures import ThreadPoolExecutor
from kvstore import shm
from kvstore.model.values import Place, Region
from kvstore.tiers.base import Crossing
from kvstore.tiers.cuda import CudaDriver
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.host import HostTier

BLOCKS, BLOCK = 8, 65536
header = shm.header_bytes(BLOCKS)
total = header + BLOCKS * BLOCK
host = HostTier(1 << 22, region_bytes=1 << 20, mlock="off")
threads = ThreadPoolExecutor(2)
tier = DeviceTier(
    CudaDriver(0), 64 << 20, background=threads, host_map=host.mapped, export=True
)
host.unmapping = tier.release_host
threads.submit(tier.open).result()
tier.assign(Region(1, 0, "t", BLOCK, BLOCKS, header, total))
host.assign(Region(2, 1, "t", BLOCK, BLOCKS, header, total))

def crossing(slot):
    at = Place(1, 2, slot, 1, 0)
    return Crossing(Place(0, 1, slot, 1, 0), at, host.view(at, BLOCK), True)

for slot in range(BLOCKS):
    host.view(Place(1, 2, slot, 1, 0), BLOCK)[:] = slot + 1
failed = threads.submit(tier.cross, [crossing(slot) for slot in range(BLOCKS)]).result()
print("uuid", tier.device_uuid)
print("failed", sum(one is not None for one in failed))
if not tier.lost:
    read = [threads.submit(tier.read, Place(0, 1, i, 1, 0), BLOCK).result() for i in range(BLOCKS)]
    print("read", [int(data.min()) for data in read], [int(data.max()) for data in read])
    memory, mapped_bytes = tier.exported(1)
    print("exported", memory.kind.name, memory.fd >= 0, len(memory.ipc_handle), mapped_bytes)
host.unassign(2)
while host.work():
    pass
print("state", tier.stats().state)
threads.submit(tier.close).result()
threads.shutdown()
host.close()
"""

CLIENT = """
import contextlib, os
import numpy as np
from kvstore.wire.v1 import store_pb2 as pb
from kvstore_client.pools import CudaPools

class Place:
    index = 0

class Stream:
    cuda_stream = 1

class Tensor:
    device = Place()

    def __init__(self, size):
        self.data = np.zeros(size, np.uint8)

    def is_contiguous(self):
        return True

    def numel(self):
        return self.data.size

    def element_size(self):
        return 1

    def data_ptr(self):
        return self.data.ctypes.data

MAPPED = 2 << 20
uuid = "GPU-abababab-abab-abab-abab-abababababab"
pools = CudaPools(lambda device, stream: contextlib.nullcontext())
print("own", pools.readable(Place(), ["GPU-other", uuid]) == uuid)
print("other", repr(pools.readable(Place(), ["GPU-other"])))
fd = os.memfd_create("pool")
os.ftruncate(fd, MAPPED)
for block in range(8):
    os.pwrite(fd, bytes([block + 1]) * 4096, block * 4096)

def said(memory, fd):
    opened = pools.open(memory, fd, Place())
    pools.admit(opened, Place())
    got = []
    for block in range(8):
        target = Tensor(4096)
        pools.copy(Stream(), opened, block * 4096, target)
        got.append((int(target.data.min()), int(target.data.max())))
    pools.close(opened)
    return got

by_file = pb.DeviceMemory(kind=pb.DEVICE_HANDLE_KIND_CUDA_FD, mapped_bytes=MAPPED, device_uuid=uuid)
print("file", said(by_file, fd) == [(n, n) for n in range(1, 9)])
legacy = pb.DeviceMemory(
    kind=pb.DEVICE_HANDLE_KIND_CUDA_IPC,
    mapped_bytes=MAPPED,
    device_uuid=uuid,
    ipc_handle=b"\\x5c" * 64,
)
print("name", said(legacy, None) == [(7, 7)] * 8)
legacy.device_uuid = "GPU-other"
try:
    pools.open(legacy, None, Place())
except OSError as error:
    print("refused", error)
"""

REGISTERED = "register 528384 flags 0"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libcuda")
    out = folder / "libcuda.so.1"
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", "-w", "-o", str(out), str(HERE / "stand_in.c"), "-ldl"]
    subprocess.run(command, check=True)
    return folder


def run(library: Path, program: str = PROGRAM, **environ: str) -> tuple[dict[str, str], list[str]]:
    """What the program printed, by its first word, and what the stand-in was given."""
    given = {**os.environ, "LD_LIBRARY_PATH": str(library), **environ}
    given["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", program], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    lines = (line.split(" ", 1) for line in done.stdout.splitlines())
    return {words[0]: words[1] for words in lines}, done.stderr.splitlines()


def test_memory_is_made_exported_and_copied_by_the_virtual_memory_api(library: Path) -> None:
    said, given = run(library)
    assert said["uuid"] == "GPU-abababab-abab-abab-abab-abababababab"
    assert said["read"] == "[1, 2, 3, 4, 5, 6, 7, 8] [1, 2, 3, 4, 5, 6, 7, 8]"
    assert said["exported"] == f"CUDA_FD True 0 {2 << 20}"
    assert said["state"] == "ok"
    # Pinned memory of device 0 that can be exported as a POSIX descriptor, read and written there.
    assert f"create size {2 << 20} type 1 handles 1 loc 1 id 0" in given
    assert "access loc 1 id 0 flags 3 n 1" in given
    assert given.index(REGISTERED) < given.index("unregister")


def test_a_device_without_it_hands_out_legacy_handles(library: Path) -> None:
    said, given = run(library, PLAIN="1")
    assert said["read"] == "[1, 2, 3, 4, 5, 6, 7, 8] [1, 2, 3, 4, 5, 6, 7, 8]"
    assert said["exported"] == f"CUDA_IPC False 64 {2 << 20}"
    assert not [line for line in given if line.startswith("create")]


def test_memory_that_cannot_be_registered_is_copied(library: Path) -> None:
    said, given = run(library, NOPIN="1")
    assert said["failed"] == "0"
    assert said["state"] == "host memory is not pinned: CUDA_ERROR_NOT_SUPPORTED"
    assert "unregister" not in given


def test_an_illegal_address_is_the_loss_of_the_device(library: Path) -> None:
    said, _ = run(library, LOSE_AT="3")
    assert said["failed"] == "5"
    assert said["state"] == "lost: CUDA_ERROR_ILLEGAL_ADDRESS"


def test_a_client_opens_pools_by_descriptor_and_by_name(library: Path) -> None:
    said, given = run(library, CLIENT)
    assert (said["own"], said["other"]) == ("True", "''")
    assert (said["file"], said["name"]) == ("True", "True")
    assert said["refused"] == "a legacy handle is for its own GPU only"
    assert "access loc 1 id 0 flags 3 n 1" in given
    assert given.index("open by name flags 1") < given.index("close by name")
