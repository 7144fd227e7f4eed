"""A process that opens a pool of another one's GPU memory, as an engine does, and copies out of it.

    python -m tests.gpu.opener FD MAPPED_BYTES BLOCK_BYTES SECONDS

Says one JSON line once it has copied all blocks once, goes on copying until standard input ends or
the time is over, then says another: copies made, and blocks that were not all one byte.
"""

from __future__ import annotations

import json
import select
import sys
import time
from typing import Any

import numpy as np

from kvstore.tiers.cuda import load_bindings


def opened(api: Any, fd: int, mapped_bytes: int) -> int:
    """Imports and maps the memory; its address."""
    kinds = api.CUmemAllocationHandleType
    handle = done(
        api,
        api.cuMemImportFromShareableHandle(fd, kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
    )
    address = int(done(api, api.cuMemAddressReserve(mapped_bytes, 0, api.CUdeviceptr(0), 0)))
    done(api, api.cuMemMap(address, mapped_bytes, 0, handle, 0))
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    done(api, api.cuMemSetAccess(address, mapped_bytes, [access], 1))
    return address


def done(api: Any, answer: tuple[Any, ...]) -> Any:
    result, *values = answer
    assert result == api.CUresult.CUDA_SUCCESS, result
    return values[0] if values else None


def main() -> None:
    fd, mapped_bytes, block_bytes, seconds = map(int, sys.argv[1:5])
    api = load_bindings()
    done(api, api.cuInit(0))
    device = done(api, api.cuDeviceGet(0))
    done(api, api.cuCtxSetCurrent(done(api, api.cuDevicePrimaryCtxRetain(device))))
    pool = opened(api, fd, mapped_bytes)
    own = int(done(api, api.cuMemAlloc(mapped_bytes)))
    stream = done(api, api.cuStreamCreate(1))
    out = np.empty(mapped_bytes, np.uint8)
    copies = wrong = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done(api, api.cuMemcpyDtoDAsync(own, pool, mapped_bytes, stream))
        done(api, api.cuMemcpyDtoHAsync(out.ctypes.data, own, mapped_bytes, stream))
        done(api, api.cuStreamSynchronize(stream))
        blocks = out[: mapped_bytes // block_bytes * block_bytes].reshape(-1, block_bytes)
        wrong += int((blocks != blocks[:, :1]).any(axis=1).sum())
        copies += 1
        if copies == 1:
            print(json.dumps({"first": blocks[:, 0].tolist()}), flush=True)
        if select.select([sys.stdin], [], [], 0)[0] and not sys.stdin.readline():
            break
    print(json.dumps({"copies": copies, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
