"""Settings of the guards: where each stops what it guards."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvstore.config.knob import knob


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tier, or what is named, is bypassed, and tried again by itself. Guards warn before,
    at lines that follow; `kvstore status` shows both. 0: never, or what the text says.
    """

    hold_s: Annotated[
        float,
        knob(
            "Seconds that a stop lasts at least; then a few may try. Each time that they fail the "
            "next stop is twice as long, up to 300.",
            when="a tier that fails should be tried less often.",
            ge=0,
            le=3_600,
        ),
    ] = 2.0
    window_s: Annotated[
        float,
        knob(
            "Seconds over which shares and ratios are taken.",
            when="traffic is so little that guards never see enough.",
            ge=1,
            le=86_400,
        ),
    ] = 60.0
    samples_min: Annotated[
        int,
        knob(
            "Blocks loaded or saved in a window before a share of them says anything; a quarter "
            "of it: of loads whose time clients report.",
            when="guards should act sooner, or later.",
            ge=1,
        ),
    ] = 64
    memory_free_stop_bytes: Annotated[
        int,
        knob(
            "Free memory at which nothing new is taken in and no more memory is made. 0: a 128th "
            "of it, at most 64 MiB.",
            when="something else on the node needs room to grow.",
            ge=0,
        ),
    ] = 0
    disk_free_stop_bytes: Annotated[
        int,
        knob(
            "Free bytes of the disk tier's file system at which nothing is saved. 0: a quarter of "
            "what the tier leaves free.",
            when="something else on the file system needs room.",
            ge=0,
        ),
    ] = 0
    errors_stop_share: Annotated[
        float,
        knob(
            "Share of loads at which nothing is loaded, and of saves at which nothing is saved.",
            when="a device that fails now and then is worse than none.",
            ge=0,
            le=1,
        ),
    ] = 0.5
    corrupt_stop_share: Annotated[
        float,
        knob(
            "Share of loads that come back damaged at which nothing is loaded, and of a "
            "fingerprint's at which it is held for `kvstore review`. Damaged blocks are misses "
            "in any case.",
            when="a device that damages blocks is not to be trusted with any.",
            ge=0,
            le=1,
        ),
    ] = 0.25
    load_stop_ratio: Annotated[
        float,
        knob(
            "Measured time of a tenant's loads from a tier, by the prefill time that they replace, "
            "at which its look-ups do not advise to load from there.",
            when="loads that lose are to be stopped sooner, or never.",
            ge=0,
        ),
    ] = 2.0
    held_stop: Annotated[
        int,
        knob(
            "Fingerprints that wait for `kvstore review` at which further incomplete ones are "
            "refused.",
            when="more engines without a revision are in use.",
            ge=0,
        ),
    ] = 64
