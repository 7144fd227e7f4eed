"""What the soak takes for climbing, and what for noise."""

from __future__ import annotations

import os
import random

import pytest

from tests.soak.watch import BOUNDS, Sample, climbs, sample

FLAT = Sample(0.0, 80.0, 60, 80, 29, 100.0, 260.0, 0.8)


def samples(seconds: int, **per_min: float) -> list[Sample]:
    """So much more a minute, with noise."""
    rng = random.Random(1)
    made = []
    for half in range(2 * seconds):
        at_s = half / 2
        values = {
            name: getattr(FLAT, name) + rng.uniform(-0.2, 0.2) + slope * at_s / 60
            for name, slope in {**dict.fromkeys(FLAT._fields[1:], 0.0), **per_min}.items()
        }
        made.append(FLAT._replace(at_s=at_s, **values))
    return made


@pytest.mark.parametrize("seconds", [20, 60, 600])
def test_noise_is_no_climb(seconds: int) -> None:
    assert list(climbs(samples(seconds))) == []


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.name)
def test_each_thing_that_climbs_is_named(bound: object) -> None:
    name = bound.name  # type: ignore[attr-defined]
    (said,) = climbs(samples(60, **{name: 120.0}))
    assert said.startswith(name)


def test_memory_that_is_cut_smaller_for_a_while_is_no_leak() -> None:
    """A soak of twelve seconds on a busy machine said so of twenty regions more."""
    assert list(climbs(samples(8, regions=166.0))) == []


def test_a_descriptor_counts_once_a_region_or_by_itself() -> None:
    """Of this very process: a second one of the same memory is one too many, as any other is."""
    before = sample(os.getpid(), None, 0.0)
    memory = os.memfd_create("kvstore-test")
    with open(memory, "r+b", buffering=0) as region, open(os.devnull, "rb"):
        region.write(bytes(1 << 20))
        again = os.dup(memory)
        now = sample(os.getpid(), None, 1.0)
        os.close(again)
    assert now.fds - before.fds == 2
    assert now.regions - before.regions == 1
    assert 1.0 < now.memfd_mb - before.memfd_mb < 1.1


def test_a_slow_climb_is_seen_in_a_long_soak() -> None:
    assert list(climbs(samples(60, rss_mb=7.0))) == []
    assert list(climbs(samples(600, rss_mb=7.0)))


def test_too_few_samples_say_nothing() -> None:
    assert list(climbs([FLAT])) == []
