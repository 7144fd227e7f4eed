"""Settings of the tier in GPU memory. Off until it has a capacity."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvstore.config.knob import knob


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The tier in a GPU's memory; it needs the extra `gpu`."""

    capacity_bytes: Annotated[
        int,
        knob(
            "GPU memory for blocks, taken as it is needed. 0: no device tier.",
            when="the GPU has memory that the engine leaves free.",
            ge=0,
        ),
    ] = 0
    gpu: Annotated[
        int,
        knob(
            "Which GPU, by its number among those that the daemon sees (CUDA_VISIBLE_DEVICES).",
            when="the node has several.",
            ge=0,
            le=63,
        ),
    ] = 0
    pools: Annotated[
        Literal["staged", "shared_unproven"],
        knob(
            "How engines reach it. staged: the tier takes what CPU memory has no room for, and "
            "gives it back by way of CPU memory; nothing of the GPU is shared. shared_unproven: "
            "the tier is above CPU memory, its pools are handed to the engines of their tenant, "
            "which copy within the GPU. That an engine survives the daemon's kill -9 in the middle "
            "of such a copy has not been proven, and who has a pool open can write it.",
            when="you have proven it on your machines (see deploy/docs/gpu.md), and engines fetch "
            "into tensors on a GPU.",
        ),
    ] = "staged"
    driver: Annotated[
        Literal["cuda", "torch-cpu"],
        knob(
            "What stands for the GPU. torch-cpu: CPU memory, copied by torch.",
            when="the tier is to be tried where there is no GPU; never in production.",
        ),
    ] = "cuda"
