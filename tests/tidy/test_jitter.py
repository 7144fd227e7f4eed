"""Odd schedules name functions that are there: what was renamed would run as ever."""

from __future__ import annotations

import importlib

import pytest

from tests.torture import jitter


@pytest.mark.parametrize("points", [jitter.DAEMON, jitter.LOOP, jitter.CLIENT])
def test_each_point_is_a_function_of_the_product(points: tuple[jitter.Point, ...]) -> None:
    for place, names in points:
        module, _, owner = place.partition(":")
        target = getattr(importlib.import_module(module), owner)
        for name in names.split():
            assert callable(getattr(target, name)), f"{place}.{name}"


def planted() -> list[object]:
    found: list[object] = []
    for place, names in jitter.CLIENT:
        module, _, owner = place.partition(":")
        target = getattr(importlib.import_module(module), owner)
        found += [getattr(target, name) for name in names.split()]
    return found


def test_what_is_planted_for_clients_is_put_back() -> None:
    before = planted()
    with jitter.jittery_clients("a test", 0.0):
        assert all(one is not other for one, other in zip(before, planted(), strict=True))
    assert all(one is other for one, other in zip(before, planted(), strict=True))
